"""The prior precision: tuned on held-out data or by the marginal likelihood."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace.evaluation import Scored, joined, score
from laplace_debias.metrics import accuracy, brier, ece, nll

# Metrics of class probabilities; True where more is better.
_OF_PROBABILITIES: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "accuracy": (accuracy, True),
    "brier": (brier, False),
    "ece": (ece, False),
    "nll": (nll, False),
}


@dataclass(frozen=True)
class Tuning:
    """What a search for the prior precision found.

    Attributes:
        prior_precision: The best value.
        metric: What was optimised: a metric's name, or `"log_marginal_likelihood"`.
        value: The metric there.
        table: One row for each value tried: `prior_precision` and the metric.
        sigma: The noise that was tuned with it, one number or one per output; None if it was not.
    """

    prior_precision: float
    metric: str
    value: float
    table: list[dict[str, float]]
    sigma: float | list[float] | None = None

    def __float__(self) -> float:
        return self.prior_precision


def tune_on_grid(
    predict_grid: Callable[[Inputs, Tensor], list[Distribution]],
    likelihood: Likelihood,
    batches: Batches,
    metric: str,
    grid: Float[Tensor, " grid"],
    class_dim: int | None = None,
) -> Tuning:
    """The prior precision with the best metric on held-out data, in one pass.

    Args:
        predict_grid: From inputs `[B, ...]` and the grid to the predictive at each of its points.
        likelihood: What targets must fit.
        batches: Held-out batches `(x, y)`.
        metric: `"nll"`, or with class probabilities `"accuracy"`, `"brier"` or `"ece"`; of several
            labels over all of them.
        grid: Prior precisions.
        class_dim: As `score`.

    Raises:
        ValueError: For a metric that does not fit, a grid that is empty or not positive, no batch,
            targets that are all ignored, or a metric that is NaN everywhere.
    """
    is_regression = isinstance(likelihood, (Gaussian, HeteroscedasticGaussian))
    known = ["nll"] if is_regression else list(_OF_PROBABILITIES)
    if metric not in known:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood: use one of {', '.join(known)}."
        )
    if grid.ndim != 1 or len(grid) == 0 or not bool(((grid > 0) & grid.isfinite()).all()):
        raise ValueError(
            "The grid must hold positive, finite prior precisions, as torch.logspace(-4, 4, 21) "
            f"does; got {grid.tolist()}."
        )
    points: list[list[Scored]] = [[] for _ in grid]
    for x, y in batches:
        predictives = predict_grid(x, grid)
        for parts, predicted in zip(points, predictives, strict=True):
            parts.append(score(likelihood, predicted, y, class_dim))
    values = [_value(metric, joined(parts, "tune on")) for parts in points]
    return _best(metric, grid.tolist(), values)


def _value(metric: str, scored: Scored) -> float:
    """A metric of what was predicted at one prior precision."""
    if metric == "nll":
        return scored.nll
    function, _ = _OF_PROBABILITIES[metric]
    return float(function(*scored.classified))


def _best(metric: str, grid: Sequence[float], values: Sequence[float]) -> Tuning:
    """Pick the best grid point.

    Raises:
        ValueError: If no value is a number.
    """
    _, more_is_better = _OF_PROBABILITIES[metric]
    table = [{"prior_precision": p, metric: v} for p, v in zip(grid, values, strict=True)]
    rows = [row for row in table if row[metric] == row[metric]]
    if not rows:
        raise ValueError(f"The {metric} is NaN at every prior precision: check the predictions.")
    best = (max if more_is_better else min)(rows, key=lambda row: row[metric])
    return Tuning(best["prior_precision"], metric, best[metric], table)


def maximise_marginal_likelihood(
    log_marginal_likelihood: Callable[[Tensor], Tensor],
    bounds: tuple[float, float] = (1e-8, 1e8),
) -> Tuning:
    """Maximise the log marginal likelihood over one prior precision, on a logarithmic scale.

    Args:
        log_marginal_likelihood: From a scalar δ to the log marginal likelihood.
        bounds: The range searched.

    Raises:
        ValueError: If the optimum lies on the range's edge.
    """
    # Here, as it takes a third of a second to import.
    from scipy.optimize import minimize_scalar

    name = "log_marginal_likelihood"
    table: list[dict[str, float]] = []

    def loss(log_delta: float) -> float:
        delta = torch.tensor(10.0**log_delta, dtype=torch.float64)
        value = log_marginal_likelihood(delta).item()
        table.append({"prior_precision": delta.item(), name: value})
        return -value

    low, high = (torch.tensor(bounds).log10()).tolist()
    result = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-3})
    if min(result.x - low, high - result.x) < 1e-2:
        raise ValueError(
            f"The marginal likelihood has no optimum between {bounds[0]:g} and {bounds[1]:g} "
            f"(the search ended at {10**result.x:.3g}): tune on validation data instead."
        )
    table.sort(key=lambda row: row["prior_precision"])
    return Tuning(10.0**result.x, name, -result.fun, table)
