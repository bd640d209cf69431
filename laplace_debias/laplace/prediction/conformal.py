"""Split-conformal prediction: class sets and intervals with guaranteed coverage."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.prediction.evaluation import (
    Scores,
    check_held_out,
    check_targets,
    concatenate_batches,
    examples_of_rows,
    probabilities_or_means,
    score,
)
from laplace_debias.laplace.prediction.predictor import Predictor
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.metrics import Report
from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.definitions import share_statistic
from laplace_debias.metrics.report import report_of
from laplace_debias.metrics.statistics import Mean, with_examples
from laplace_debias.system.checks import check_is, real, whole
from laplace_debias.system.ranks import collective, process_group
from laplace_debias.system.shown import counted

GroupFunction = Callable[[Any], Tensor]
"""A function from inputs to the group of each example, as integers `[B]`."""


@dataclass(frozen=True, eq=False)
class ClassSets:
    """A set of classes for each example.

    Attributes:
        contains: Whether a class is in the set, `[*batch, classes]`.
    """

    contains: Bool[Tensor, "*batch classes"]

    @property
    def sizes(self) -> Int[Tensor, "*batch"]:
        """The number of classes of each set."""
        return self.contains.sum(-1)

    def covers(self, labels: Shaped[Tensor, "..."]) -> Bool[Tensor, "*batch"]:
        """Return whether each label is in its set.

        Labels may have a trailing dimension of size 1. With two classes, labels may be
        floating-point numbers, like the targets of a binary problem.

        Raises:
            ValueError: If labels and sets differ in shape, or a label is not the index of a class,
                for example because the target is ignored.
        """
        *sizes, num_classes = self.contains.shape
        if labels.shape not in ((*sizes,), (*sizes, 1)):
            raise ValueError(
                f"`labels` has shape {tuple(labels.shape)}, but the sets have shape "
                f"{tuple(sizes)}. Pass a label for each set."
            )
        is_class = (labels >= 0) & (labels < num_classes)
        if not is_class.all():
            raise ValueError(
                f"`labels` contains {labels[~is_class][0].item()}, but the classes are 0 to "
                f"{num_classes - 1}. For ignored targets, pass `labels.clamp_min(0)`, and select "
                "the results of the other targets, `[labels >= 0]`."
            )
        return self.contains.gather(-1, labels.long().reshape(*sizes, 1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Intervals:
    """An interval for each output of each example, in the units of the targets.

    Attributes:
        low: Lower ends, `[*batch, outputs]`.
        high: Upper ends, `[*batch, outputs]`.
    """

    low: Float[Tensor, "*batch outputs"]
    high: Float[Tensor, "*batch outputs"]

    @property
    def sizes(self) -> Float[Tensor, "*batch outputs"]:
        """The widths of the intervals."""
        return self.high - self.low

    def covers(self, targets: Float[Tensor, "..."]) -> Bool[Tensor, "*batch outputs"]:
        """Return whether each target is in its interval, including the ends.

        For a single output, targets may lack the last dimension, but the result always has it.

        Raises:
            ValueError: If targets and intervals differ in shape.
        """
        if targets.shape != self.low.shape:
            if (*targets.shape, 1) != self.low.shape:
                raise ValueError(
                    f"`targets` has shape {tuple(targets.shape)}, but the intervals have shape "
                    f"{tuple(self.low.shape)}. Pass a target for each interval."
                )
            targets = targets.unsqueeze(-1)
        return (self.low <= targets) & (targets <= self.high)


def mass_above(
    probs: Float[Tensor, "*batch classes"], penalty: float = 0.0, free_rank: int = 1
) -> Float[Tensor, "*batch classes"]:
    r"""Compute the adaptive score of each class.

    $$s_k = \sum_{i:\ p_i > p_k} p_i + \lambda \max(0, r_k - r_0)$$

    The sum is the total probability of all classes that are more probable than class k, and $r_k$
    is their number plus one. The set $\{k : s_k \le q\}$ therefore contains the most probable
    classes up to the one at which their total probability exceeds q. It is never empty for
    $q \ge 0$.

    Args:
        probs: Class probabilities.
        penalty: The penalty λ for each rank beyond $r_0$. With 0, the sets are adaptive (APS); with
            a positive number, they are regularised (RAPS) and smaller for uncertain examples.
        free_rank: $r_0$, the number of classes without a penalty.

    Reference:
        Romano, Sesia, Candès. Classification with valid and adaptive coverage. NeurIPS, 2020.
        Angelopoulos, Bates, Malik, Jordan. Uncertainty sets for image classifiers using conformal
        prediction. ICLR, 2021. Both without their randomisation.
    """
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(1, probs.shape[-1] + 1, dtype=torch.float64, device=probs.device)
    probability_above = ordered.cumsum(-1) - ordered
    # Equally probable classes share the rank and the score of the first of them.
    is_tied = F.pad(ordered.diff(dim=-1) == 0, (1, 0))
    ranks = ranks.expand_as(ordered).masked_fill(is_tied, 0).cummax(-1).values
    probability_above = probability_above.masked_fill(is_tied, 0).cummax(-1).values
    scores = probability_above + penalty * (ranks - free_rank).clamp(min=0)
    by_class = torch.empty_like(scores)
    return by_class.scatter(-1, order, scores)


def conformal_quantile(
    scores: Float[Tensor, "n *outputs"], level: float, num_positions: int = 1
) -> Float[Tensor, "*outputs"]:
    """Return the ⌈(n + T) · level⌉-th smallest score, for examples with up to T positions.

    A new example adds up to T scores. The quantile is at least that of all n + T scores, whatever
    the new scores are, so the positions of an example may be dependent.

    Raises:
        ValueError: If there are too few scores for the level.
    """
    num_scores = len(scores)
    # The product is rounded, because floating-point errors may put it slightly above a whole
    # number.
    rank = max(1, math.ceil(round((num_scores + num_positions) * level, 9)))
    if rank > num_scores:
        least = math.ceil(round(num_positions * level / (1 - level), 9))
        examples = counted(num_scores, "calibration example")
        verb = "is" if num_scores == 1 else "are"
        raise ValueError(
            f"{examples} {verb} too few for `level={level}`. Pass at least "
            f"{counted(least, 'example')} (if you use groups, this many in each group; if outputs "
            "have positions, this many positions), or use a lower level."
        )
    return scores.sort(dim=0).values[rank - 1]


class Conformal:
    r"""Prediction sets or intervals with a guaranteed probability of coverage.

    The guarantee requires no assumptions about the model, only that calibration and new examples
    are exchangeable. It holds on average over examples (with `groups`, within each group) and over
    the draw of the calibration data. If outputs have positions, it holds on average over positions,
    which may be dependent, of examples that have at most as many as the longest calibration
    example. The posterior determines how the size of the sets varies between inputs.

    - Classes: adaptive sets of the most probable classes (`mass_above`).
    - Regression: mean ± q · standard deviation of the predictive, which includes the noise, with a
      separate q for each output.

    Args:
        predictor: A fitted `Laplace` or `Mixture` for classification, a binary problem, or a
            regression with a normal predictive distribution.
        method: How to predict; see `Laplace.predict`.
        samples: Number of draws; see `Laplace.predict`.
        link: The function from logits to probabilities; see `Laplace.predict`.
        penalty: The penalty λ of regularised adaptive sets for each class beyond `free_rank`; 0 for
            no penalty.
        free_rank: The number of classes in a set that incur no penalty.
        groups: A function from inputs to the group of each example, as integers `[B]`. The coverage
            then holds within each group.

    Attributes:
        quantiles: For each group (0 without groups), the largest score that a set may contain; set
            by `calibrate`.
        level: The level passed to `calibrate`; None before calibration.

    Raises:
        TypeError: If `predictor` is not a `Laplace` or `Mixture`, or `groups` is not a function.
        ValueError: If `penalty` is negative, or `free_rank` is below 1.

    Reference:
        Papadopoulos, Proedrou, Vovk, Gammerman. Inductive confidence machines for regression. ECML,
        2002. Vovk. Conditional validity of inductive conformal predictors. ACML, 2012.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Conformal, Laplace
        >>> x, y = torch.randn(300, 4), torch.randint(3, (300,))
        >>> la = Laplace(nn.Linear(4, 3).eval()).fit([(x[:200], y[:200])])
        >>> conformal = Conformal(la).calibrate([(x[200:], y[200:])], level=0.9)
        >>> conformal.predict(torch.randn(5, 4)).contains.shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        predictor: Predictor,
        method: str = "glm",
        samples: int | None = None,
        *,
        link: str | Link | None = None,
        penalty: float = 0.0,
        free_rank: int = 1,
        groups: GroupFunction | None = None,
    ) -> None:
        check_is(predictor, "predictor", Predictor)
        check_is(groups, "groups", Callable, type(None))
        if not 0 <= real(penalty, "penalty") < math.inf:
            raise ValueError(f"`penalty` is {penalty}. Pass 0 or a positive number.")
        whole(free_rank, "free_rank")
        self._predictor = predictor
        self._options: dict[str, Any] = {"method": method, "samples": samples, "link": link}
        self._penalty = penalty
        self._free_rank = free_rank
        self._groups = groups
        self.quantiles: dict[int, Tensor] = {}
        self.level: float | None = None
        self._calibrated_for: list[dict[str, Any]] = []

    @collective("calibrate")
    def calibrate(
        self, loader: Batches, level: float = 0.9, *, generator: torch.Generator | None = None
    ) -> "Conformal":
        """Calibrate the size of the sets on held-out examples, and return `self`.

        Args:
            loader: Labelled batches `(x, y)` that were used neither to train the network nor to
                tune the posterior.
            level: The guaranteed probability with which a set covers its target.
            generator: Seeds the draws, if the method draws samples.

        Raises:
            ValueError: If the level is not between 0 and 1, there are too few examples for this
                level, or `groups` does not return one integer per example. Also raises the errors
                of `Laplace.predict`.
            NotImplementedError: If the predictive is neither a normal distribution nor a
                distribution over exclusive classes.
        """
        check_level(level)
        check_held_out(loader)
        batches = []
        for scores, groups in self._scored_batches(loader, generator):
            batches.append([self._scores_of_targets(scores), groups, scores.is_first])
        scores_of_targets, groups, is_first = concatenate_batches(batches, "calibrate")
        examples = is_first.cumsum(0)
        quantiles = {}
        for group in groups.unique().tolist():
            is_in_group = groups == group
            num_positions = int(examples[is_in_group].bincount().max())
            quantiles[group] = conformal_quantile(
                scores_of_targets[is_in_group], level, num_positions
            )
        self.quantiles = quantiles
        self.level = level
        self._calibrated_for = self._posterior_values()
        return self

    def predict(
        self, x: Inputs | Record, *, generator: torch.Generator | None = None
    ) -> ClassSets | Intervals:
        """Return a set of classes, or an interval, for each input.

        Args:
            x: Inputs, in any form that `Laplace.predict` accepts.
            generator: Seeds the draws, if the method draws samples.

        Raises:
            RuntimeError: If `calibrate` has not been called, or the posterior was fitted, tuned or
                updated since.
            ValueError: If a group has no calibration examples. Also raises the errors of
                `Laplace.predict`.
        """
        self._check_calibrated()
        predictive = self._predict(x, generator)
        values = probabilities_or_means(predictive)
        quantiles = self._quantiles_for(self._groups_of(x, len(values))).to(values.device)
        shape = predictive.batch_shape
        if isinstance(predictive, Normal | MultivariateNormal):
            deviations = predictive.variance.reshape(values.shape).sqrt()
            half_width = quantiles.to(values.dtype) * deviations
            low = (values - half_width).unflatten(0, shape)
            high = (values + half_width).unflatten(0, shape)
            return Intervals(low, high)
        return ClassSets(self._class_sets(values, quantiles).unflatten(0, shape))

    @collective("evaluate")
    def evaluate(
        self, loader: Batches, *, generator: torch.Generator | None = None, level: float = 0.95
    ) -> Report:
        """Measure the coverage and the size of the sets on labelled data.

        Args:
            loader: Labelled batches `(x, y)` that `calibrate` did not use.
            generator: Seeds the draws, if the method draws samples.
            level: Nominal coverage of the confidence intervals of both metrics, which treat
                examples as independent, but not the positions of an example.

        Returns:
            `coverage`, the fraction of covered targets; and either `set_size`, the mean number of
            classes, or `width`, the mean width of the intervals. With groups, the report also
            contains `coverage_<group>`.

        Raises:
            RuntimeError: If `calibrate` has not been called. Also raises the errors of `predict`.
        """
        self._check_calibrated()
        check_level(level)
        check_held_out(loader)
        batches = []
        is_normal = False
        for scores, groups in self._scored_batches(loader, generator):
            quantiles = self._quantiles_for(groups).to(scores.values.device)
            covered = self._scores_of_targets(scores) <= quantiles
            if scores.deviations is not None:
                is_normal = True
                sizes = (2 * quantiles * scores.deviations.double()).mean(1)
            else:
                sizes = self._class_sets(scores.values, quantiles).sum(-1)
            columns = [covered.double(), sizes.double(), groups, scores.targets, scores.is_first]
            batches.append(columns)
        covered, sizes, groups, labels, is_first = concatenate_batches(batches, "evaluate")
        # A process without examples made no predictions, so it cannot know the kind of predictive.
        is_normal = any(process_group().exchange(is_normal))
        examples = examples_of_rows(is_first)
        size_name = "width" if is_normal else "set_size"
        statistics = with_examples(
            {
                "coverage": share_statistic(covered),
                size_name: Mean(sizes.mean().item(), sizes, lowest=0),
            },
            examples,
        )
        if self._groups is not None:
            for group in groups.unique().tolist():
                is_in_group = groups == group
                coverage = share_statistic(covered[is_in_group])
                if examples is not None:
                    coverage = replace(coverage, examples=examples[is_in_group])
                statistics[f"coverage_{group}"] = coverage
        return report_of(statistics, labels, level)

    def state_dict(self) -> dict[str, Any]:
        """Return the level, the quantiles, and the settings and posterior used to compute them.

        The posterior is not included; save it to a file of its own.
        """
        return {
            "level": self.level,
            "quantiles": dict(self.quantiles),
            "settings": self._settings,
            "posterior": self._calibrated_for,
        }

    def load_state_dict(self, state: dict[str, Any]) -> "Conformal":
        """Restore the state that `state_dict` returned, and return `self`.

        Raises:
            ValueError: If an entry is missing, or if the quantiles were computed for other
                settings, with which the coverage would differ.
        """
        if set(state) != {"level", "quantiles", "settings", "posterior"}:
            raise ValueError(
                f"The state has the entries {sorted(state)}. Pass what `Conformal.state_dict()` "
                "returned, with 'level', 'quantiles', 'settings' and 'posterior'. States of "
                "earlier versions lack some of them: call `calibrate` again."
            )
        for name, value in self._settings.items():
            saved = state["settings"].get(name)
            if saved != value:
                raise ValueError(
                    f"The state was calibrated with {name}={saved!r}, but this Conformal has "
                    f"{name}={value!r}, which would change the coverage. Pass the same value to "
                    "the constructor."
                )
        self.level = state["level"]
        self.quantiles = dict(state["quantiles"])
        self._calibrated_for = state["posterior"]
        return self

    def _posterior_values(self) -> list[dict[str, Any]]:
        """Return the values of each posterior that change if it is fitted, tuned or updated.

        The log-determinant changes with the curvature, which a fit to other data measures anew.
        """
        return [
            {
                "likelihood": state.likelihood.describe(),
                "prior precision": [f"{value:g}" for value in state.prior.precision.reshape(-1)],
                "temperature": state.temperature,
                "link": None if state.link is None else state.link.options(),
                "number of training examples": state.posterior.num_data,
                "log-determinant": state.posterior.log_det_precision().item(),
            }
            for state in self._predictor._states
            if isinstance(state, FittedPosterior)
        ]

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings on which the quantiles depend, as values that `torch.load` accepts."""
        link = self._options["link"]
        if isinstance(link, str):
            link = Link(link)
        return {
            **self._options,
            "link": None if link is None else link.options(),
            "penalty": self._penalty,
            "free_rank": self._free_rank,
            "groups": None if self._groups is None else "a function",
        }

    def __repr__(self) -> str:
        calibrated = "not calibrated" if self.level is None else f"level={self.level}"
        return f"Conformal({self._predictor!r}, {calibrated})"

    def _scored_batches(
        self, loader: Batches, generator: torch.Generator | None
    ) -> Iterator[tuple[Scores, Int[Tensor, " n"]]]:
        """Yield the scores and the groups of each batch's targets that are not ignored."""
        state = self._predictor._states[0]
        for batch in state.spec.stream(loader, state.device, generator):
            predictive = self._predict(batch.inputs, generator)
            checked = check_targets(
                self._predictor.likelihood, predictive, batch.targets, state.spec.class_dim
            )
            scores = score(predictive, checked)
            groups = self._groups_of(batch.inputs, len(checked.counted))
            yield scores, groups[checked.counted.cpu()]

    def _predict(self, x: Inputs | Record, generator: torch.Generator | None) -> Distribution:
        """Predict, and require that the predictive is normal or over exclusive classes."""
        predictive = self._predictor.predict(x, generator=generator, **self._options)
        is_exclusive = isinstance(
            predictive, torch.distributions.Categorical | torch.distributions.Bernoulli
        )
        if not (is_exclusive or isinstance(predictive, Normal | MultivariateNormal)):
            raise NotImplementedError(
                f"Predictive distributions of type {type(predictive).__name__} are not "
                "supported. Use a likelihood for mutually exclusive classes, for two "
                "classes, or for normally distributed targets. For several labels per example, fit "
                'one Laplace(module, "binary") per label, where `module` returns only the logit of '
                "that label."
            )
        return predictive

    def _scores_of_targets(self, scores: Scores) -> Float[Tensor, "n *outputs"]:
        values = scores.values
        if scores.deviations is not None:
            targets = scores.targets.reshape(values.shape).double()
            return (targets - values.double()).abs() / scores.deviations.double()
        labels = scores.targets.reshape(-1, 1).long()
        return self._scores_of_classes(values).gather(1, labels).squeeze(1)

    def _scores_of_classes(
        self, values: Float[Tensor, "n *classes"]
    ) -> Float[Tensor, "n all_classes"]:
        """Return the scores of all classes from probabilities, `[n, C]` or `[n]` (binary)."""
        probs = torch.stack([1 - values, values], -1) if values.ndim == 1 else values
        return mass_above(probs, self._penalty, self._free_rank)

    def _class_sets(
        self, values: Float[Tensor, "n *classes"], quantiles: Float[Tensor, " n"]
    ) -> Bool[Tensor, "n all_classes"]:
        """Return the classes whose scores do not exceed an example's quantile."""
        return self._scores_of_classes(values) <= quantiles.unsqueeze(-1)

    def _groups_of(self, x: Inputs | Record, size: int) -> Int[Tensor, " n"]:
        """Return the group of each input; without groups, all inputs are in group 0."""
        if self._groups is None:
            return torch.zeros(size, dtype=torch.long)
        groups = self._groups(x)
        is_of_integers = isinstance(groups, Tensor) and not groups.is_floating_point()
        if not is_of_integers or groups.shape != (size,):
            shape = tuple(groups.shape) if isinstance(groups, Tensor) else type(groups).__name__
            raise ValueError(
                f"`groups` returned {shape} for {counted(size, 'example')}. Return a tensor with "
                "one integer per example."
            )
        return groups.long().cpu()

    def _quantiles_for(self, groups: Int[Tensor, " n"]) -> Float[Tensor, "n *outputs"]:
        """Return the calibrated quantile of each input's group."""
        missing = sorted(set(groups.tolist()) - set(self.quantiles))
        if missing:
            raise ValueError(
                f"The groups {missing} have no calibration examples. Only the groups "
                f"{sorted(self.quantiles)} have calibration examples. Calibrate with "
                "examples of each group."
            )
        calibrated = sorted(self.quantiles)
        quantiles = torch.stack([self.quantiles[group] for group in calibrated])
        return quantiles[torch.searchsorted(torch.tensor(calibrated), groups)]

    def _check_calibrated(self) -> None:
        if self.level is None:
            raise RuntimeError("Conformal is not calibrated. Call `calibrate(loader)` first.")
        posterior_values = self._posterior_values()
        if len(posterior_values) != len(self._calibrated_for):
            raise RuntimeError(
                f"The calibration used {len(self._calibrated_for)} posteriors, but there are "
                f"{len(posterior_values)} now, so the coverage is not guaranteed. Call "
                "`calibrate(loader)` again."
            )
        for values, earlier_values in zip(posterior_values, self._calibrated_for, strict=True):
            for name, value in values.items():
                earlier_value = earlier_values.get(name)
                if not _is_same(value, earlier_value):
                    raise RuntimeError(
                        f"The posterior has changed since the calibration: its {name} was "
                        f"{earlier_value} and is {value}, so the coverage is not guaranteed. Call "
                        "`calibrate(loader)` again."
                    )


def _is_same(value: Any, calibrated: Any) -> bool:
    """Return whether two values are equal, up to rounding if both are floating-point numbers.

    A log-determinant that was computed on a different machine has other last digits.
    """
    if isinstance(value, float) and isinstance(calibrated, float):
        return math.isclose(value, calibrated, rel_tol=1e-5, abs_tol=1e-5)
    return value == calibrated
