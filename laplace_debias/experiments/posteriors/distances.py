"""How far posteriors from few examples are from full-batch, in the metrics of their predictions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from laplace_debias.experiments.posteriors.predictions import METRICS
from laplace_debias.experiments.shared.confidence import jackknife_error
from laplace_debias.experiments.shared.methods import CROSSFIT, DEBIASED, FULL, MINI
from laplace_debias.experiments.shared.store import Row

Gaps = dict[tuple[int, float], float]
"""By draw and prior precision, |metric − that of full-batch|."""


@dataclass(frozen=True)
class Distance:
    """Distance of the test NLL to full-batch's, in nats per example: a mean over draws.

    Attributes:
        prior_precision: δ; None for the mean over all of them.
        mini: |NLL of mini-batch − NLL of full-batch|.
        mini_se: Its standard error over draws; None for a single draw, as below.
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


def distances_by_precision(
    rows: Sequence[Mapping[str, Any]], distance_range: tuple[float, float] | None = None
) -> list[Distance]:
    """How far mini-batch and debiased are from full-batch in the NLL, and how the two compare.

    Args:
        rows: Rows of one data set; mini-batch and debiased in the same draws.
        distance_range: Least and greatest prior precision of interest; all if None.

    Returns:
        One row per prior precision in the range, ascending, and a last one over all of these.

    Raises:
        ValueError: If no row of full-batch is in the range.
    """
    low, high = (0.0, math.inf) if distance_range is None else distance_range
    both = [_gaps(rows, method, "nll") for method in (MINI, DEBIASED)]
    grid = sorted({delta for _, delta in both[0] if low <= delta <= high})
    if not grid:
        raise ValueError(f"no row of {FULL!r} has a prior precision in [{low}, {high}]")

    def over_draws(gaps: Gaps, deltas: Sequence[float]) -> list[float]:
        draws = dict.fromkeys(draw for draw, _ in gaps)
        return [fmean([gaps[draw, delta] for delta in deltas]) for draw in draws]

    return [
        _distance(delta, *(over_draws(gaps, deltas) for gaps in both))
        for delta, deltas in [*((delta, [delta]) for delta in grid), (None, grid)]
    ]


def distances_by_data(rows: Sequence[Row]) -> list[Row]:
    """How far the posteriors from few examples are from full-batch on each data set.

    Args:
        rows: Rows of `measured`, of any number of data sets.

    Returns:
        A row per data set and method: mean |metric − that of full-batch| over draws and prior
        precisions for NLL (nats), ECE and accuracy; the greatest one of the NLL; and the ratio of
        its mean to the mini-batch's.
    """
    table: list[Row] = []
    for name in dict.fromkeys(row["data"] for row in rows):
        of_data = [row for row in rows if row["data"] == name]
        of_mini = math.nan
        for method in (MINI, DEBIASED, CROSSFIT):
            gaps = {m: list(_gaps(of_data, method, m).values()) for m in METRICS[:3]}
            if not gaps["nll"]:
                continue
            means = {metric: sum(values) / len(values) for metric, values in gaps.items()}
            of_mini = means["nll"] if method == MINI else of_mini
            table.append(
                {
                    "data": name,
                    "method": method,
                    **means,
                    "greatest nll": max(gaps["nll"]),
                    "nll ratio": means["nll"] / of_mini if of_mini else math.nan,
                }
            )
    return table


def _gaps(rows: Sequence[Mapping[str, Any]], method: str, metric: str) -> Gaps:
    full = {row["prior_precision"]: row[metric] for row in rows if row["method"] == FULL}
    return {
        (row["draw"], delta): abs(row[metric] - full[delta])
        for row in rows
        if row["method"] == method and (delta := row["prior_precision"]) in full
    }


def _distance(delta: float | None, mini: list[float], debiased: list[float]) -> Distance:
    pairs = list(zip(mini, debiased, strict=True))
    return Distance(
        prior_precision=delta,
        mini=fmean(mini),
        mini_se=jackknife_error(mini, fmean),
        debiased=fmean(debiased),
        debiased_se=jackknife_error(debiased, fmean),
        ratio=_ratio(pairs),
        ratio_se=jackknife_error(pairs, _ratio),
    )


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    mini, debiased = (math.fsum(values) for values in zip(*pairs, strict=True))
    return debiased / mini if mini > 0 else (1.0 if debiased == 0 else math.inf)
