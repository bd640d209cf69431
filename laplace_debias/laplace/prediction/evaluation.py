"""Evaluation of predictions: metrics over loaders, collected in a report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, MultivariateNormal, Normal

from laplace_debias import metrics
from laplace_debias.curvature.data.batch import Batch, append_dims
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.dataset_size import check_held_out_sampler
from laplace_debias.curvature.data.shards import check_shared
from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.outputs import targets_classes_last
from laplace_debias.laplace.prediction.intervals import interval_levels, single_targets
from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.definitions import nll_statistic, rmse_statistic
from laplace_debias.metrics.evaluation import separation
from laplace_debias.metrics.report import report_of
from laplace_debias.system.ranks import process_group


def check_held_out(*data: Batches) -> None:
    """Require held-out data in which no example is repeated, even if several processes read it."""
    ranks = process_group()
    for loader in data:
        if ranks.size > 1:
            check_shared(ranks, loader)
        check_held_out_sampler(loader)


def repeated_examples(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches without weights, in which each example of weight w is repeated w times."""
    for batch in batches:
        weights = batch.weights
        if weights is None:
            yield batch
            continue
        if (weights != weights.floor()).any():
            raise ValueError(
                "The weights of examples have fractions, but `evaluate` counts an example of "
                "weight w as w examples. Pass whole numbers."
            )
        positions = torch.arange(batch.num_examples).repeat_interleave(weights.long().cpu())
        if len(positions):
            repeated = batch.take(positions.to(batch.targets.device))
            yield replace(repeated, weights=None)


def concatenate_batches(batches: Sequence[Sequence[Tensor]], verb: str) -> list[Tensor]:
    """Concatenate the columns of several batches, over all processes that share the data.

    Args:
        batches: The columns of each batch, with one row for each target that is not ignored.
        verb: The verb for the use of the data in error messages, such as `"evaluate"`.
    """
    columns = [torch.cat(column) for column in zip(*batches, strict=True)]
    columns_of_all = process_group().on_all(columns or None)
    if columns_of_all is None:
        raise ValueError(
            f"The loader has no batches, so there is nothing to {verb}. Pass a loader with at "
            "least one batch."
        )
    if not len(columns_of_all[0]):
        raise ValueError(
            f"All targets of the loader are ignored, so there is nothing to {verb}. Pass batches "
            "in which at least one target is not ignored."
        )
    return columns_of_all


PredictiveKind = Literal["classes", "labels", "normal", "numbers"]
"""The kind of targets of a predictive: classes, several labels, numbers with a normal predictive,
or other numbers.
"""


@dataclass(frozen=True, eq=False)
class CheckedTargets:
    """The targets of a batch, checked against their predictive.

    Attributes:
        labels: The targets, with one row per term.
        counted: Whether each term counts, which means that it is not ignored.
        targets_with_density: The targets in the shape that `predictive.log_prob` expects, with
            zeros in place of ignored targets.
    """

    labels: Tensor
    counted: Bool[Tensor, " terms"]
    targets_with_density: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """A predictive and its targets, with one row for each target that is not ignored.

    Attributes:
        kind: The kind of the predictive.
        values: Probabilities, `[n, C]` (`[n]` for a single logit), or means of numbers, `[n, C]`.
        log_probs: The log-probabilities of the targets.
        targets: The targets.
        deviations: Standard deviations of numbers; None for classes and labels, and for a
            predictive without a variance.
        levels: The smallest levels of central intervals that contain the targets; None if the
            predictive is normal, or has no variance or no distribution function.
    """

    kind: PredictiveKind
    values: Float[Tensor, "n *outputs"]
    log_probs: Float[Tensor, " n"]
    targets: Tensor
    deviations: Float[Tensor, "n *outputs"] | None = None
    levels: Float[Tensor, "n *outputs"] | None = None

    @classmethod
    def concatenate(cls, batches: Sequence["Scores"]) -> "Scores":
        """Concatenate the scores of several batches, over all processes that share the data."""
        columns = [batch._columns() for batch in batches]
        concatenated = concatenate_batches([list(batch.values()) for batch in columns], "evaluate")
        own = (batches[0].kind, list(columns[0])) if batches else None
        # A process without examples has no scores, so it takes the kind and the names from another.
        kind, names = next(form for form in process_group().exchange(own) if form is not None)
        return cls(kind, **dict(zip(names, concatenated, strict=True)))

    def _columns(self) -> dict[str, Tensor]:
        """The tensors, keyed by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def evaluate_predictions(
    predict: Callable[[Inputs], Distribution],
    likelihood: Likelihood,
    batches: Iterable[Batch],
    ood: Mapping[str, Iterable[Batch]],
    class_dim: int | None = None,
    *,
    intervals: bool = True,
    level: float = 0.95,
    score_inputs: Callable[[Inputs], Tensor] | None = None,
) -> metrics.Report:
    """Evaluate a predictive on labelled data, and its uncertainty on OOD data.

    Args:
        predict: A function from inputs to a predictive.
        likelihood: The likelihood, which checks the targets.
        batches: Labelled batches, which may be read twice. An example of weight w counts w times.
        ood: Out-of-distribution batches by name.
        class_dim: The dimension of the outputs that holds the classes.
        intervals: Whether to compute confidence intervals.
        level: The nominal coverage of the intervals.
        score_inputs: A function from inputs to scores that should be larger for OOD data; None for
            the entropy, or for the variance of a regression.
    """
    # The level is checked first, because the predictions may take a long time.
    check_level(level)
    batches_of_scores = []
    batches_of_uncertainties = []
    for batch in repeated_examples(batches):
        predictive = predict(batch.inputs)
        checked = check_targets(likelihood, predictive, batch.targets, class_dim)
        batches_of_scores.append(score(predictive, checked))
        if score_inputs is not None:
            uncertainties = score_inputs(batch.inputs).flatten()
            if len(uncertainties) == len(checked.counted):
                uncertainties = uncertainties[checked.counted.to(uncertainties.device)]
            batches_of_uncertainties.append([uncertainties])
    scores = Scores.concatenate(batches_of_scores)
    if score_inputs is None:
        return _report(scores, predict, batches, ood, intervals=intervals, level=level)
    (uncertainties,) = concatenate_batches(batches_of_uncertainties, "evaluate")
    report = _report(scores, predict, batches, {}, intervals=False, level=level)
    uncertainties_ood = {
        name: _for_all(data, name, score_inputs).flatten() for name, data in ood.items()
    }
    statistics = report._statistics | separation(uncertainties, uncertainties_ood)
    return report_of(statistics, report._targets, level, intervals)


def _report(
    scores: Scores,
    predict: Callable[[Inputs], Distribution],
    batches: Iterable[Batch],
    ood: Mapping[str, Iterable[Batch]],
    *,
    intervals: bool,
    level: float,
) -> metrics.Report:
    """Evaluate predictions, and their uncertainty on OOD data."""
    values = scores.values

    def for_ood_sets(summarise: Callable[[Distribution], Tensor]) -> dict[str, Tensor]:
        return {
            name: _for_all(data, name, lambda x: summarise(predict(x)))
            for name, data in ood.items()
        }

    if scores.kind == "labels":
        return metrics.evaluate_multilabel(
            values,
            scores.targets.long().reshape(values.shape),
            for_ood_sets(probabilities_or_means),
            log_probs=scores.log_probs,
            intervals=intervals,
            level=level,
        )
    if scores.kind == "classes":
        probs, labels = classified(values, scores.targets)
        return metrics.evaluate(
            probs,
            labels,
            for_ood_sets(probabilities_or_means),
            # Near p = 1, the digits of 1 − p are lost. For a single label, the log-probabilities
            # keep them.
            log_probs=scores.log_probs if values.ndim == 1 else None,
            intervals=intervals,
            level=level,
        )
    targets = scores.targets.reshape(values.shape).to(values.dtype)
    if scores.deviations is None:
        statistics = {
            "nll": nll_statistic(scores.log_probs),
            "rmse": rmse_statistic(values, targets),
        }
        if ood:
            in_distribution = _for_all(batches, "test", lambda x: _mean_variance(predict(x)))
            statistics |= separation(in_distribution, for_ood_sets(_mean_variance))
        return report_of(statistics, targets, level, intervals)
    if scores.kind == "normal":
        return metrics.evaluate_regression(
            values,
            scores.deviations,
            targets,
            for_ood_sets(_standard_deviations),
            log_probs=scores.log_probs,
            intervals=intervals,
            level=level,
        )
    return metrics.evaluate_numbers(
        values,
        scores.deviations,
        targets,
        scores.log_probs,
        for_ood_sets(_standard_deviations),
        levels=scores.levels,
        intervals=intervals,
        level=level,
    )


def _for_all(data: Iterable[Batch], name: str, predict: Callable[[Inputs], Tensor]) -> Tensor:
    """Predict for batches that are distributed over all processes, and collect the results."""
    predictions = [predict(batch.inputs) for batch in repeated_examples(data)]
    columns = process_group().on_all([torch.cat(predictions)] if predictions else None)
    if columns is None:
        raise ValueError(
            f"The OOD loader {name!r} has no batches. Pass a loader with at least one batch."
        )
    return columns[0]


def check_targets(
    likelihood: Likelihood,
    predictive: Distribution,
    targets: Tensor,
    class_dim: int | None = None,
    leading: int = 0,
) -> CheckedTargets:
    """Check that a batch's targets match their predictive.

    The predictive may have `leading` dimensions before the batch dimensions, along which only the
    first entry is checked.
    """
    shape = predictive.batch_shape[leading:]
    values = probabilities_or_means(predictive)[: shape.numel()]
    outputs = values.unsqueeze(-1) if values.ndim == 1 else values
    outputs_in_shape = outputs.unflatten(0, shape)
    targets = targets_classes_last(targets, outputs_in_shape.ndim, class_dim)
    _, labels = flat_terms(outputs_in_shape, targets)
    likelihood.check_predicted(outputs, labels)
    if likelihood.targets == "numbers":
        # Targets of a single output may lack the last dimension, so they are reshaped.
        labels = labels.reshape(values.shape)
    counted = likelihood.counted(labels)
    if counted is None:
        counted = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    # `log_prob` needs valid targets, so ignored targets are replaced by zero.
    targets_with_density = torch.where(append_dims(counted, labels.ndim), labels, 0)
    targets_with_density = targets_with_density.reshape(shape + predictive.event_shape)
    if not isinstance(predictive, torch.distributions.Categorical):
        targets_with_density = targets_with_density.to(values.dtype)
    return CheckedTargets(labels, counted, targets_with_density)


def score(predictive: Distribution, checked: CheckedTargets) -> Scores:
    """Score a predictive on the targets that are not ignored."""
    counted = checked.counted
    kind = kind_of(predictive)
    values = probabilities_or_means(predictive)
    log_probs = predictive.log_prob(checked.targets_with_density).flatten()
    deviations = None
    levels = None
    if kind in ("normal", "numbers"):
        with suppress(NotImplementedError):
            deviations = _standard_deviations(predictive)[counted]
    if kind == "numbers" and deviations is not None:
        levels = interval_levels(single_targets(predictive), checked.targets_with_density)
        if levels is not None:
            levels = levels.reshape(values.shape)[counted]
    return Scores(
        kind,
        values=values[counted],
        log_probs=log_probs[counted],
        targets=checked.labels[counted],
        deviations=deviations,
        levels=levels,
    )


def kind_of(predictive: Distribution) -> PredictiveKind:
    """Return the kind of targets of a predictive."""
    if isinstance(predictive, Normal | MultivariateNormal):
        return "normal"
    if isinstance(getattr(predictive, "base_dist", None), Bernoulli):
        return "labels"
    return "classes" if hasattr(predictive, "probs") else "numbers"


def probabilities_or_means(predictive: Distribution) -> Float[Tensor, "n *outputs"]:
    """Return probabilities or means, with one row per term."""
    values = predictive.probs if hasattr(predictive, "probs") else predictive.mean
    return values.flatten(0, len(predictive.batch_shape) - 1)


def _standard_deviations(predictive: Distribution) -> Float[Tensor, "n *outputs"]:
    """Return standard deviations, with one row per term."""
    return predictive.variance.flatten(0, len(predictive.batch_shape) - 1).sqrt()


def _mean_variance(predictive: Distribution) -> Float[Tensor, " n"]:
    """Return the mean variance of the outputs of each term."""
    return predictive.variance.flatten(0, -2).mean(-1)


def classified(
    values: Float[Tensor, "n *classes"], labels: Tensor
) -> tuple[Float[Tensor, "m *kept"], Integer[Tensor, " m"]]:
    """Return probabilities and labels, with one row per label."""
    if labels.numel() == values.numel():
        return values.flatten(), labels.flatten().long()
    return values, labels.long()
