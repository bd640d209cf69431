"""Intervals of one metric, and of the difference of two methods in it."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from laplace_debias.metrics.checks import (
    check_level,
    check_same_device,
    check_same_length,
    check_scores,
)
from laplace_debias.metrics.intervals import Interval
from laplace_debias.metrics.of_classification import CLASSIFICATION
from laplace_debias.metrics.of_scores import SCORES
from laplace_debias.metrics.statistics import (
    Mean,
    Proportion,
    Resampled,
    Sampling,
    Statistic,
    resampled_counts,
)

Metric = Callable[[Tensor, Tensor], Tensor]
"""A function of predictions `[n, ...]` and targets `[n, ...]` that returns a scalar tensor."""

_COUNTS_AT_ONCE = 2**23


def bootstrap(
    metric: Metric,
    probs: Float[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """Percentile bootstrap over examples.

    The metric is computed on `num_resamples` draws of n examples with replacement; the interval is
    between the `(1 - level)/2` and the `(1 + level)/2` quantile. It tells how far another test set
    of this size might lead, not another training run or another batch for the curvature.

    Draws of `accuracy`, `nll` and `brier` are products of matrices, and fast; so are those of the
    calibration errors. These are biased on small sets, more so on a draw: their interval is
    reflected at the value (the basic bootstrap), so that the bias is taken away instead of doubled,
    and extended to hold the value.

    Args:
        metric: Function of `(probs, labels)`, for example `nll`.
        probs: Predictions `[n, ...]`.
        labels: Labels or targets `[n, ...]`.
        num_resamples: Number of draws.
        level: Coverage aimed at, between 0 and 1.
        generator: Source of the draws, on any device; torch's default if None.

    Returns:
        The metric of all examples, and the ends of its interval.

    Raises:
        ValueError: `probs` is empty, lengths or devices differ, `num_resamples` < 1 or `level` is
            not between 0 and 1; and whatever `metric` raises on all examples.

    Reference:
        Efron. Bootstrap methods: another look at the jackknife. Annals of Statistics, 1979.
        Davison, Hinkley. Bootstrap methods and their application. 1997, section 5.2.
    """
    _check_resampled(probs, labels, num_resamples, level)
    statistic = CLASSIFICATION[metric](probs, labels) if metric in CLASSIFICATION else None
    value = metric(probs, labels).item() if statistic is None else statistic.value
    draws = _draws(metric, [(probs, labels)], [statistic], num_resamples, generator)[0]
    low, high = _percentiles(draws, level)
    if isinstance(statistic, Resampled):
        low, high = max(0.0, 2 * value - high), min(statistic.highest, 2 * value - low)
        low, high = min(low, value), max(high, value)
    return Interval(value, low, high)


def paired_difference(
    metric: Metric,
    a: Float[Tensor, "n ..."],
    b: Float[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The interval of `metric(a, labels) - metric(b, labels)`, two methods on the same examples.

    The metrics of this package have the interval that fits them, as in `compare`: Agresti and Min's
    for the accuracy, Hall's for means, DeLong's for the area under the curve. Of another function
    the draws of examples are the same for both methods, and the interval is between percentiles of
    the differences.

    Args:
        metric: Function of `(predictions, labels)`. `auroc`, `aupr`, `aupr_in` and `fpr95` are
            taken of the scores of both kinds of examples, with labels 1 where they are OOD and 0
            where not.
        a: Predictions of one method, `[n, ...]`, or scores `[n]`.
        b: Those of the other one, for the same examples.
        labels: Labels or targets `[n, ...]`.
        num_resamples: Number of draws, for metrics whose interval needs them.
        level: Coverage aimed at, between 0 and 1.
        seed: Of these draws; torch's generators are left alone.

    Returns:
        The difference and the ends of its interval.

    Raises:
        ValueError: Predictions are empty, lengths or devices differ, `num_resamples` < 2 or `level`
            is not between 0 and 1; for scores, labels are not 0 and 1 with both there; and whatever
            `metric` raises on all examples.

    Example:
        >>> import torch
        >>> from laplace_debias.metrics import nll
        >>> labels = torch.arange(100) % 2
        >>> half = torch.full((100,), 0.5)
        >>> difference = paired_difference(nll, half, 0.9 * labels + 0.05, labels)
        >>> round(difference, 2), difference.low > 0
        (0.64, True)
    """
    how = Sampling(level, num_resamples, seed)
    for predictions in (a, b):
        _check_resampled(predictions, labels, num_resamples, level)
    if metric in CLASSIFICATION or metric in SCORES:
        mine, its = (statistic_of(metric, predictions, labels) for predictions in (a, b))
        return mine.difference(its, how)
    value = metric(a, labels).item() - metric(b, labels).item()
    generator = torch.Generator().manual_seed(seed)
    draws = _draws(metric, [(a, labels), (b, labels)], [None, None], num_resamples, generator)
    return Interval(value, *_percentiles(draws[0] - draws[1], level))


def confidence_interval(
    metric: Metric,
    predictions: Float[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    *,
    num_resamples: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The interval of one of this package's metrics, as `evaluate` gives it.

    Args:
        metric: `accuracy`, `nll`, `brier`, `ece`, `ece_equal_mass`, `smooth_ece`, `mce`,
            `classwise_ece`, `aurc`; or `auroc`, `aupr`, `aupr_in`, `fpr95`.
        predictions: Probabilities, or scores `[n]` as `paired_difference` takes them.
        labels: Class indices `[n]`; for scores 1 where an example is OOD and 0 where not.
        num_resamples: Number of draws, for metrics whose interval needs them.
        level: Coverage aimed at, between 0 and 1.
        seed: Of these draws; torch's generators are left alone.

    Raises:
        ValueError: `metric` is another function; as `paired_difference`.
    """
    how = Sampling(level, num_resamples, seed)
    return statistic_of(metric, predictions, labels).interval(how)


def statistic_of(metric: Metric, predictions: Tensor, labels: Tensor) -> Statistic:
    """The statistic of a metric of this package; arguments are those of `confidence_interval`.

    Raises:
        ValueError: It is no such metric, or the arguments do not fit it.
    """
    if metric in CLASSIFICATION:
        return CLASSIFICATION[metric](predictions, labels)
    if metric not in SCORES:
        names = ", ".join(known.__name__ for known in (*CLASSIFICATION, *SCORES))
        raise ValueError(
            f"`metric` is {getattr(metric, '__name__', metric)}; expected one of {names}. "
            "`bootstrap` takes any function."
        )
    check_scores(predictions, "predictions")
    check_same_length(predictions, labels, "predictions", "labels")
    check_same_device(predictions, labels, "predictions", "labels")
    if not ((labels == 0) | (labels == 1)).all() or not 0 < int(labels.sum()) < len(labels):
        raise ValueError(
            "`labels` must be 1 where an example is OOD and 0 where not, with examples of both."
        )
    return SCORES[metric](predictions[labels == 0], predictions[labels == 1])


def _check_resampled(probs: Tensor, labels: Tensor, num_resamples: int, level: float) -> None:
    if num_resamples < 1:
        raise ValueError(
            f"`num_resamples` is {num_resamples}; expected at least 1, for example 1000."
        )
    check_level(level)
    if probs.numel() == 0:
        raise ValueError(
            f"`probs` is empty, of shape {list(probs.shape)}; expected at least one example."
        )
    check_same_length(probs, labels, "probs", "labels")
    check_same_device(probs, labels, "probs", "labels")


def _draws(
    metric: Metric,
    data: list[tuple[Tensor, Tensor]],
    statistics: list[Statistic | None],
    num_resamples: int,
    generator: torch.Generator | None,
) -> list[Float[Tensor, " draws"]]:
    """The metric of draws of the examples, the same ones for each of several predictions."""
    found: list[list[Tensor]] = [[] for _ in data]
    size = len(data[0][0])
    chunk = max(1, _COUNTS_AT_ONCE // size)
    for start in range(0, num_resamples, chunk):
        counts = resampled_counts(min(chunk, num_resamples - start), size, generator)
        for (predictions, labels), statistic, draws in zip(data, statistics, found, strict=True):
            counted = counts.to(predictions.device)
            if isinstance(statistic, Resampled):
                draws.append(statistic.resample(counted))
            elif isinstance(statistic, Proportion):
                draws.append(counted.double() @ statistic.holds.double() / size)
            elif isinstance(statistic, Mean) and metric.__name__ in ("nll", "brier"):
                draws.append(counted.double() @ statistic.influence.double() / size)
            else:
                draws += [
                    metric(predictions[chosen], labels[chosen])[None]
                    for row in counted.long()
                    for chosen in [torch.arange(size, device=row.device).repeat_interleave(row)]
                ]
    return [torch.cat(draws).double().cpu() for draws in found]


def _percentiles(draws: Float[Tensor, " draws"], level: float) -> tuple[float, float]:
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = draws.quantile(tails).tolist()
    return low, high
