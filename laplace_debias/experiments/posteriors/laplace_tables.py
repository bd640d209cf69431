"""Metrics of posteriors over prior precisions, and how far they are from full-batch's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from laplace_debias import metrics
from laplace_debias.experiments.shared.predictives import Grid, Name, classification_metrics

MAP, MINI, DEBIASED, CROSSFIT, FULL = METHODS = (
    "MAP",
    "mini-batch",
    "debiased",
    "cross-fitted",
    "full-batch",
)
METRICS = ("nll", "ece", "accuracy", "auroc")

Row = dict[str, Any]


def measured(
    name: str,
    probs: Mapping[Name, Tensor],
    labels: Tensor,
    prior_precisions: Sequence[float],
    clean: Mapping[Name, Tensor],
) -> list[Row]:
    """Metrics of every posterior on one data set.

    Args:
        name: Of the data set; on `"severity …"` there is an AUROC.
        probs: Probabilities `[P, n, C]` by method and draw.
        labels: `[n]`.
        prior_precisions: The grid of δ.
        clean: Probabilities on the clean test images, to tell corrupted ones from.

    Returns:
        A row a method, draw and prior precision; one of None for the MAP.
    """
    rows = []
    for method, draw in sorted(probs, key=lambda key: (METHODS.index(key[0]), key[1])):
        grid: Grid = (None,) if method == MAP else prior_precisions
        for index, delta in enumerate(grid):
            of_point = probs[method, draw][index]
            auroc = None
            if name.startswith("severity"):
                scores = (metrics.entropy(p) for p in (clean[method, draw][index], of_point))
                auroc = metrics.auroc(*scores).item()
            rows.append(
                {
                    "data": name,
                    "method": method,
                    "draw": draw,
                    "prior_precision": delta,
                    **classification_metrics(of_point, labels),
                    "auroc": auroc,
                }
            )
    return rows


def distances(rows: Sequence[Row]) -> list[Row]:
    """How far the posteriors from few examples are from full-batch.

    Args:
        rows: Rows of `measured`, of any number of data sets.

    Returns:
        A row a data set and method: mean |metric − that of full-batch| over draws and prior
        precisions for NLL (nats), ECE and accuracy; the greatest one of the NLL; and the ratio of
        its mean to the mini-batch's.
    """
    full = {(r["data"], r["prior_precision"]): r for r in rows if r["method"] == FULL}
    table: list[Row] = []
    for name in dict.fromkeys(row["data"] for row in rows):
        of_mini = math.nan
        for method in (MINI, DEBIASED, CROSSFIT):
            of_method = [r for r in rows if (r["data"], r["method"]) == (name, method)]
            if not of_method:
                continue
            gaps = {
                metric: [
                    abs(r[metric] - full[name, r["prior_precision"]][metric]) for r in of_method
                ]
                for metric in METRICS[:3]
            }
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


def findings(table: Sequence[Row]) -> list[str]:
    """What was seen, a sentence a method, made from the numbers.

    Args:
        table: Rows of `distances`.
    """
    sentences = []
    for method in (DEBIASED, CROSSFIT):
        ratios = {row["data"]: row["nll ratio"] for row in table if row["method"] == method}
        if ratios:
            told = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in ratios.items())
            sentences.append(
                f"{method}: the NLL is, over all draws and prior precisions, this many times as "
                f"far from full-batch's as the mini-batch's: {told}."
            )
    return sentences
