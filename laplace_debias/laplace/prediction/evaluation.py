"""A report on predictions: the metrics of a predictive over loaders."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, MultivariateNormal, Normal

from laplace_debias import metrics
from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Batches, Stream
from laplace_debias.curvature.network.dataset_size import check_sampler
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.outputs import targets_classes_last
from laplace_debias.curvature.network.shards import check_shared
from laplace_debias.laplace.prediction.intervals import interval_levels, single_targets
from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.definitions import nll_statistic, rmse_statistic
from laplace_debias.metrics.evaluation import separation
from laplace_debias.metrics.report import report_of
from laplace_debias.system.ranks import process_group


def check_held_out(*data: Batches) -> None:
    """Require held-out data that all processes share."""
    ranks = process_group()
    if ranks.size > 1:
        for loader in data:
            check_shared(ranks, loader)
            check_sampler(loader)


class RepeatedExamples:
    """Batches in which an example of weight w occurs w times.

    Args:
        stream: The batches, which may have weights.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for batch in self._stream:
            weights = batch.weights
            if weights is None:
                yield batch.inputs, batch.targets
                continue
            if (weights != weights.floor()).any():
                raise ValueError(
                    "The weights of examples have fractions, but `evaluate` counts an example of "
                    "weight w as w examples. Pass whole numbers."
                )
            indices = torch.arange(batch.num_examples).repeat_interleave(weights.long().cpu())
            if len(indices):
                repeated = batch.take(indices.to(batch.targets.device))
                yield repeated.inputs, repeated.targets


def concatenate_batches(batches: Sequence[Sequence[Tensor]], verb: str) -> list[Tensor]:
    """Concatenate the columns of several batches, over all processes that share the data.

    Args:
        batches: For each batch its columns, of one row per target that counts.
        verb: The purpose of the columns in error messages, such as `"evaluate"`.
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


def evaluate_predictions(
    predict: Callable[[Inputs], Distribution],
    likelihood: Likelihood,
    batches: Batches,
    ood: Mapping[str, Batches],
    class_dim: int | None = None,
    *,
    intervals: bool = True,
    level: float = 0.95,
    score_inputs: Callable[[Inputs], Tensor] | None = None,
) -> metrics.Report:
    """Evaluate a predictive on labelled data, and its uncertainty on OOD data.

    Args:
        predict: From inputs to a predictive.
        likelihood: The likelihood, which checks targets.
        batches: Labelled batches.
        ood: Out-of-distribution batches by name.
        class_dim: The dimension of the outputs that has the classes.
        intervals: Whether to compute confidence intervals.
        level: Their coverage.
        score_inputs: From inputs to scores, larger for OOD data; None for the entropy, or the
            variance.
    """
    # Before the predictions, which may take long.
    check_level(level)
    scored = _score_batches(predict, likelihood, batches, class_dim, score_inputs)
    if score_inputs is None:
        return _report(scored, predict, batches, ood, intervals=intervals, level=level)
    report = _report(scored, predict, batches, {}, intervals=False, level=level)
    scores_ood = {name: _for_all(data, name, score_inputs).flatten() for name, data in ood.items()}
    assert scored.scores is not None
    statistics = report._statistics | separation(scored.scores, scores_ood)
    return report_of(statistics, report._targets, level, intervals)


@dataclass(frozen=True, eq=False)
class _ScoredData:
    """The predictions for labelled data, with a row for each target that counts.

    Attributes:
        values: Probabilities, or means.
        log_probs: The log-probabilities of the targets.
        targets: The targets.
        further: The other columns that `score` returns.
        scores: The scores by which OOD data are separated; None if they are not asked for.
        is_multilabel: Whether the predictive is that of several labels.
        has_probabilities: Whether it is that of classes or labels.
        is_normal: Whether it is normal.
    """

    values: Tensor
    log_probs: Float[Tensor, " n"]
    targets: Tensor
    further: Sequence[Tensor]
    scores: Float[Tensor, " n"] | None
    is_multilabel: bool
    has_probabilities: bool
    is_normal: bool


def _score_batches(
    predict: Callable[[Inputs], Distribution],
    likelihood: Likelihood,
    batches: Batches,
    class_dim: int | None,
    score_inputs: Callable[[Inputs], Tensor] | None,
) -> _ScoredData:
    """Predict labelled data, over all processes that share it; it is read once."""
    scored_batches = []
    is_multilabel = False
    has_probabilities = False
    is_normal = False
    for x, y in batches:
        predictive = predict(x)
        is_multilabel = isinstance(getattr(predictive, "base_dist", None), Bernoulli)
        has_probabilities = is_multilabel or hasattr(predictive, "probs")
        is_normal = isinstance(predictive, Normal | MultivariateNormal)
        columns = score(likelihood, predictive, y, class_dim)
        if score_inputs is not None:
            _, counted, _ = check_targets(likelihood, predictive, y, class_dim)
            batch_scores = score_inputs(x).flatten()
            if len(batch_scores) == len(counted):
                batch_scores = batch_scores[counted.to(batch_scores.device)]
            columns.append(batch_scores)
        scored_batches.append(columns)
    values, log_probs, targets, *further = concatenate_batches(scored_batches, "evaluate")
    scores = None if score_inputs is None else further.pop()
    # A process without examples has predicted nothing that would show it.
    flags = process_group().exchange((is_multilabel, has_probabilities, is_normal))
    is_multilabel, has_probabilities, is_normal = map(any, zip(*flags, strict=True))
    return _ScoredData(
        values,
        log_probs,
        targets,
        further,
        scores,
        is_multilabel=is_multilabel,
        has_probabilities=has_probabilities,
        is_normal=is_normal,
    )


def _report(
    scored: _ScoredData,
    predict: Callable[[Inputs], Distribution],
    batches: Batches,
    ood: Mapping[str, Batches],
    *,
    intervals: bool,
    level: float,
) -> metrics.Report:
    """Evaluate predictions, and their uncertainty on OOD data."""
    values = scored.values
    log_probs = scored.log_probs
    targets = scored.targets
    has_probabilities = scored.has_probabilities
    if not has_probabilities:
        targets = targets.reshape(values.shape).to(values.dtype)
    if not has_probabilities and not scored.further:
        statistics = {"nll": nll_statistic(log_probs), "rmse": rmse_statistic(values, targets)}
        if ood:

            def mean_variance(x: Inputs) -> Tensor:
                variance = predict(x).variance
                return variance.flatten(0, -2).mean(-1)

            in_distribution = _for_all(batches, "test", mean_variance)
            variances = {name: _for_all(data, name, mean_variance) for name, data in ood.items()}
            statistics |= separation(in_distribution, variances)
        return report_of(statistics, targets, level, intervals)

    def predicted_values(x: Inputs) -> Tensor:
        predictive = predict(x)
        if has_probabilities:
            return probabilities_or_means(predictive)
        return predictive.variance.flatten(0, len(predictive.batch_shape) - 1).sqrt()

    predicted_ood = {name: _for_all(data, name, predicted_values) for name, data in ood.items()}
    options: dict[str, Any] = {"intervals": intervals, "level": level}
    if scored.is_normal:
        return metrics.evaluate_regression(
            values, scored.further[0], targets, predicted_ood, log_probs=log_probs, **options
        )
    if not has_probabilities:
        deviation, *levels = scored.further
        if levels:
            options["levels"] = levels[0]
        return metrics.evaluate_numbers(
            values, deviation, targets, log_probs, predicted_ood, **options
        )
    if scored.is_multilabel:
        labels = targets.long().reshape(values.shape)
        return metrics.evaluate_multilabel(
            values, labels, predicted_ood, log_probs=log_probs, **options
        )
    probs, labels = classified(values, targets)
    # A probability near 1 has no digits left for 1 − p; the logits of one label have.
    if values.ndim == 1:
        options["log_probs"] = log_probs
    return metrics.evaluate(probs, labels, predicted_ood, **options)


def _for_all(data: Batches, name: str, predict: Callable[[Inputs], Tensor]) -> Tensor:
    """Predict a set of batches, over all processes that share it."""
    predictions = [predict(x) for x, _ in data]
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
) -> tuple[Tensor, Bool[Tensor, " terms"], Tensor]:
    """Check that a batch's targets match their predictive.

    The predictive may have `leading` dimensions in front of the batch's; only the first of their
    entries is compared.

    Returns:
        The targets with a row for each term; which of these count; and the targets that
        `predictive.log_prob` takes, zeros where they do not count.
    """
    shape = predictive.batch_shape[leading:]
    values = probabilities_or_means(predictive)[: shape.numel()]
    outputs = values.unsqueeze(-1) if values.ndim == 1 else values
    outputs_in_shape = outputs.unflatten(0, shape)
    targets = targets_classes_last(targets, outputs_in_shape.ndim, class_dim)
    _, labels = flat_terms(outputs_in_shape, targets)
    likelihood.check_predicted(outputs, labels)
    if likelihood.targets == "numbers":
        # The targets of a single output may have no dimension for it.
        labels = labels.reshape(values.shape)
    counted = likelihood.counted(labels)
    if counted is None:
        counted = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    # A target that does not count still needs to have a density.
    with_density = torch.where(counted.view(-1, *[1] * (labels.ndim - 1)), labels, 0)
    with_density = with_density.reshape(shape + predictive.event_shape)
    if not isinstance(predictive, torch.distributions.Categorical):
        with_density = with_density.to(values.dtype)
    return labels, counted, with_density


def score(
    likelihood: Likelihood, predictive: Distribution, targets: Tensor, class_dim: int | None
) -> list[Tensor]:
    """Score a predictive on the targets that count, one row for each.

    Returns:
        Probabilities, `[n, C]` or for a single logit `[n]`, else means, `[n, C]`; log-probabilities
        `[n]`; labels. For numbers also standard deviations; if the predictive is not normal, the
        levels of the intervals that contain the targets, if it has a distribution function.
    """
    labels, counted, with_density = check_targets(likelihood, predictive, targets, class_dim)
    values = probabilities_or_means(predictive)
    log_probs = predictive.log_prob(with_density).flatten()
    columns = [values[counted], log_probs[counted], labels[counted]]
    single = single_targets(predictive)
    if isinstance(single, Bernoulli) or hasattr(predictive, "probs"):
        return columns
    try:
        deviation = predictive.variance.reshape(values.shape)[counted].sqrt()
    except NotImplementedError:
        return columns
    columns.append(deviation)
    if not isinstance(predictive, Normal | MultivariateNormal):
        levels = interval_levels(single, with_density)
        if levels is not None:
            columns.append(levels.reshape(values.shape)[counted])
    return columns


def probabilities_or_means(predictive: Distribution) -> Float[Tensor, "n *outputs"]:
    """Return probabilities or means, with one row per term."""
    values = predictive.probs if hasattr(predictive, "probs") else predictive.mean
    return values.flatten(0, len(predictive.batch_shape) - 1)


def classified(
    values: Float[Tensor, "n *classes"], labels: Tensor
) -> tuple[Float[Tensor, "m *kept"], Integer[Tensor, " m"]]:
    """Return class probabilities and labels, with one row per label."""
    if labels.numel() == values.numel():
        return values.flatten(), labels.flatten().long()
    return values, labels.long()
