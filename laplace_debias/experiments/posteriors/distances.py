"""How far one posterior's predictions are from another's, over draws of batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Metrics of one predictive on test images.

    Attributes:
        method: Where the predictive comes from.
        draw: Which draw of batches, from 0.
        prior_precision: δ; None for a method without.
        validation_nll: Mean NLL on the validation images, in nats.
        accuracy: Fraction of hits.
        nll: Mean NLL, in nats.
        ece: Expected calibration error.
        brier: Brier score.
    """

    method: str
    draw: int
    prior_precision: float | None
    validation_nll: float
    accuracy: float
    nll: float
    ece: float
    brier: float


@dataclass(frozen=True)
class Distance:
    """Distance of the test NLL to full-batch's, in nats an example: a mean over draws.

    Attributes:
        prior_precision: δ; None for the mean over all of them.
        mini: |NLL of mini-batch − NLL of full-batch|.
        mini_se: Its standard error over draws; None for a single one, as below.
        debiased: |NLL of debiased − NLL of full-batch|.
        debiased_se: Its standard error.
        ratio: `debiased / mini`, of the means.
        ratio_se: Its standard error, by the jackknife over draws.
    """

    prior_precision: float | None
    mini: float
    mini_se: float | None
    debiased: float
    debiased_se: float | None
    ratio: float
    ratio_se: float | None


def distances(
    sweep: Sequence[Measurement],
    mini: str,
    debiased: str,
    full: str,
    distance_range: tuple[float, float] | None = None,
) -> list[Distance]:
    """How far two methods are from a third in the test NLL, and how the two compare.

    Args:
        sweep: Measurements of each method at the same prior precisions; `mini` and `debiased` in
            the same draws, `full` in one.
        mini: Name of the method that others are compared with.
        debiased: Name of the method that is compared.
        full: Name of the method that both should be close to.
        distance_range: Least and greatest prior precision of interest; all if None.

    Returns:
        One row a prior precision in the range, ascending, and one over all of these.

    Raises:
        ValueError: If no measurement of `full` is in the range.
    """
    low, high = (0.0, math.inf) if distance_range is None else distance_range
    reference = {
        row.prior_precision: row.nll
        for row in sweep
        if row.method == full
        and row.prior_precision is not None
        and low <= row.prior_precision <= high
    }
    if not reference:
        raise ValueError(f"no measurement of {full!r} has a prior precision in [{low}, {high}]")
    gaps: dict[str, dict[float, dict[int, float]]] = {mini: {}, debiased: {}}
    for row in sweep:
        if row.method in gaps and row.prior_precision in reference:
            by_draw = gaps[row.method].setdefault(row.prior_precision, {})
            by_draw[row.draw] = abs(row.nll - reference[row.prior_precision])
    grid = sorted(reference)
    per_point = [
        _distance(delta, *(list(gaps[name][delta].values()) for name in (mini, debiased)))
        for delta in grid
    ]
    means = (
        [_mean([gaps[name][delta][draw] for delta in grid]) for draw in gaps[name][grid[0]]]
        for name in (mini, debiased)
    )
    return [*per_point, _distance(None, *means)]


def _distance(delta: float | None, mini: list[float], debiased: list[float]) -> Distance:
    pairs = list(zip(mini, debiased, strict=True))
    return Distance(
        prior_precision=delta,
        mini=_mean(mini),
        mini_se=_jackknife(pairs, lambda pairs: _mean([a for a, _ in pairs])),
        debiased=_mean(debiased),
        debiased_se=_jackknife(pairs, lambda pairs: _mean([b for _, b in pairs])),
        ratio=_ratio(pairs),
        ratio_se=_jackknife(pairs, _ratio),
    )


def _ratio(pairs: list[tuple[float, float]]) -> float:
    mini, debiased = (math.fsum(values) for values in zip(*pairs, strict=True))
    return debiased / mini if mini > 0 else (1.0 if debiased == 0 else math.inf)


def _jackknife(
    pairs: list[tuple[float, float]], statistic: Callable[[list[tuple[float, float]]], float]
) -> float | None:
    """Standard error of a statistic of draws; of a mean it is the usual one."""
    n = len(pairs)
    if n < 2:
        return None
    left_out = [statistic(pairs[:i] + pairs[i + 1 :]) for i in range(n)]
    centre = _mean(left_out)
    return math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in left_out))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
