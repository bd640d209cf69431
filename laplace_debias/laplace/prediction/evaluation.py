"""Evaluation of predictions: metrics over loaders, collected in a report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
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
from laplace_debias.metrics.statistics import with_examples
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
        is_first: Whether each row is the first of its example. An example has several rows if its
            outputs have positions.
        deviations: Standard deviations of numbers; None for classes and labels, and for a
            predictive without a variance.
        levels: The smallest levels of central intervals that contain the targets; None if the
            predictive is normal, or has no variance or no distribution function.
    """

    kind: PredictiveKind
    values: Float[Tensor, "n *outputs"]
    log_probs: Float[Tensor, " n"]
    targets: Tensor
    is_first: Bool[Tensor, " n"]
    deviations: Float[Tensor, "n *outputs"] | None = None
    levels: Float[Tensor, "n *outputs"] | None = None

    @classmethod
    def concatenate(cls, batches: Sequence["Scores"]) -> "Scores":
        """Concatenate the scores of several batches, over all processes that share the data."""
        columns = [batch._columns() for batch in batches]
        concatenated = concatenate_batches([list(batch.values()) for batch in columns], "evaluate")
        kind_and_names = None
        if batches:
            kind_and_names = batches[0].kind, list(columns[0])
        # A process without examples has no scores, so it takes the kind and the names from another.
        kind, names = next(filter(None, process_group().exchange(kind_and_names)))
        return cls(kind, **dict(zip(names, concatenated, strict=True)))

    def _columns(self) -> dict[str, Tensor]:
        """The tensors, keyed by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def is_first_of_example(
    num_examples: int, counted: Bool[Tensor, " rows"]
) -> Bool[Tensor, " counted_rows"]:
    """Return whether each row that counts is the first of its example.

    Before ignored rows are left out, every example of the batch has the same number of rows.
    """
    rows_per_example = max(1, len(counted) // num_examples)
    examples = torch.arange(len(counted), device=counted.device) // rows_per_example
    return examples[counted].diff(prepend=examples.new_tensor([-1])) != 0


def examples_of_rows(is_first: Bool[Tensor, " n"]) -> Int[Tensor, " n"] | None:
    """Return the number of each row's example, or None if each row is an example."""
    return None if is_first.all() else is_first.cumsum(0)


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
        score_inputs: A function from inputs to scores that should be larger for OOD data, one for
            each row; None for the entropy, or for the variance of a regression.
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
            uncertainties = score_inputs(batch.inputs)
            batches_of_uncertainties.append(_counted_rows(uncertainties, batch, checked))
    scores = Scores.concatenate(batches_of_scores)
    if score_inputs is None:
        return _report(scores, predict, batches, ood, intervals=intervals, level=level)
    # The report's own uncertainties are replaced by the scores of the inputs.
    report = _report(scores, predict, batches, {}, intervals=False, level=level)
    uncertainties, is_first = concatenate_batches(batches_of_uncertainties, "evaluate")
    uncertainties_ood, ood_examples = _for_ood_sets(ood, lambda x: score_inputs(x).flatten())
    statistics = report._statistics | separation(
        uncertainties, uncertainties_ood, examples_of_rows(is_first), ood_examples
    )
    return report_of(statistics, report._targets, level, intervals)


def _counted_rows(
    uncertainties: Float[Tensor, " rows"], batch: Batch, checked: CheckedTargets
) -> list[Tensor]:
    """Leave out rows of ignored targets, if each row has a target.

    Returns:
        The remaining rows, and whether each of them is the first of its example.
    """
    counted = torch.ones_like(uncertainties, dtype=torch.bool)
    if len(uncertainties) == len(checked.counted):
        counted = checked.counted.to(uncertainties.device)
    return [uncertainties[counted], is_first_of_example(batch.num_examples, counted)]


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
    examples = examples_of_rows(scores.is_first)

    def for_ood_sets(
        summarise: Callable[[Distribution], Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return _for_ood_sets(ood, lambda x: summarise(predict(x)))

    if scores.kind == "labels":
        probs_ood, ood_examples = for_ood_sets(probabilities_or_means)
        return metrics.evaluate_multilabel(
            values,
            scores.targets.long().reshape(values.shape),
            probs_ood,
            log_probs=scores.log_probs,
            examples=examples,
            ood_examples=ood_examples,
            intervals=intervals,
            level=level,
        )
    if scores.kind == "classes":
        probs, labels = classified(values, scores.targets)
        probs_ood, ood_examples = for_ood_sets(probabilities_or_means)
        return metrics.evaluate(
            probs,
            labels,
            probs_ood,
            # Near p = 1, the digits of 1 − p are lost. For a single label, the log-probabilities
            # keep them.
            log_probs=scores.log_probs if values.ndim == 1 else None,
            examples=examples,
            ood_examples=ood_examples,
            intervals=intervals,
            level=level,
        )
    targets = scores.targets.reshape(values.shape).to(values.dtype)
    if scores.deviations is None:
        statistics = with_examples(
            {"nll": nll_statistic(scores.log_probs), "rmse": rmse_statistic(values, targets)},
            examples,
        )
        if ood:
            variances, is_first = _for_all(batches, "test", lambda x: _mean_variance(predict(x)))
            variances_ood, ood_examples = for_ood_sets(_mean_variance)
            statistics |= separation(
                variances, variances_ood, examples_of_rows(is_first), ood_examples
            )
        return report_of(statistics, targets, level, intervals)
    deviations_ood, ood_examples = for_ood_sets(_standard_deviations)
    if scores.kind == "normal":
        return metrics.evaluate_regression(
            values,
            scores.deviations,
            targets,
            deviations_ood,
            log_probs=scores.log_probs,
            examples=examples,
            ood_examples=ood_examples,
            intervals=intervals,
            level=level,
        )
    return metrics.evaluate_numbers(
        values,
        scores.deviations,
        targets,
        scores.log_probs,
        deviations_ood,
        levels=scores.levels,
        examples=examples,
        ood_examples=ood_examples,
        intervals=intervals,
        level=level,
    )


def _for_ood_sets(
    ood: Mapping[str, Iterable[Batch]], predict: Callable[[Inputs], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Predict for each OOD set, and return the rows, and their examples if these have several."""
    predictions = {}
    examples = {}
    for name, data in ood.items():
        predictions[name], is_first = _for_all(data, name, predict)
        examples_of_set = examples_of_rows(is_first)
        if examples_of_set is not None:
            examples[name] = examples_of_set
    return predictions, examples


def _for_all(
    data: Iterable[Batch], name: str, predict: Callable[[Inputs], Tensor]
) -> tuple[Tensor, Bool[Tensor, " rows"]]:
    """Predict for batches that are distributed over all processes, and collect the results.

    Returns:
        The rows of the predictions, and whether each row is the first of its example.
    """
    predictions = []
    first_rows = []
    for batch in repeated_examples(data):
        rows = predict(batch.inputs)
        predictions.append(rows)
        counted = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        first_rows.append(is_first_of_example(batch.num_examples, counted))
    local_columns = None
    if predictions:
        local_columns = [torch.cat(predictions), torch.cat(first_rows)]
    columns = process_group().on_all(local_columns)
    if columns is None:
        raise ValueError(
            f"The OOD loader {name!r} has no batches. Pass a loader with at least one batch."
        )
    rows, is_first = columns
    return rows, is_first


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
        # A user's distribution may have no variance.
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
        is_first=is_first_of_example(predictive.batch_shape[0], counted),
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
