"""Estimates with their standard errors, and how they are refined until these are small."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.products import check_at_least


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value that is known up to a standard error.

    `float(estimate)` is the value of a scalar estimate.

    Args:
        value: The estimate.
        standard_error: Its standard error, of the same shape: 0 if the value is exact, infinite
            if it rests on a single sample, which says nothing of its own spread.
        num_matvecs: How many products with the operator (or its adjoint) it took.
        converged: False if a tolerance was asked for and missed.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    num_matvecs: int
    converged: bool = True

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def exact(cls, value: Float[Tensor, "*shape"], num_matvecs: int = 0) -> "Estimate":
        """A value without error."""
        return cls(value, torch.zeros_like(value), num_matvecs)


def mean_of(samples: Float[Tensor, "*shape count"]) -> tuple[Tensor, Tensor]:
    """The mean over the last dimension and its standard error, infinite for one sample."""
    count = samples.shape[-1]
    mean = samples.mean(dim=-1)
    if count == 1:
        return mean, torch.full_like(mean, math.inf)
    return mean, samples.std(dim=-1) / count**0.5


def check_budget(
    num_matvecs: int, least: int, why: str, tol: float | None, max_matvecs: int | None
) -> int:
    """Checks how many products an estimator may use; gives the greatest number.

    Args:
        num_matvecs: The number asked for.
        least: What the method needs.
        why: What it needs them for.
        tol: Relative standard error at which to stop.
        max_matvecs: The greatest number with `tol`; by default ten times `num_matvecs`.

    Raises:
        ValueError: A number is too small, or `max_matvecs` comes without `tol`.
    """
    check_at_least(num_matvecs, least, "num_matvecs", why)
    if tol is None:
        if max_matvecs is not None:
            raise ValueError(
                f"`max_matvecs` is {max_matvecs} without `tol`; expected both or none. Give the "
                "number of products as `num_matvecs`, or a tolerance to reach."
            )
        return num_matvecs
    if not tol > 0:
        raise ValueError(f"`tol` is {tol}; expected a positive relative standard error.")
    if max_matvecs is None:
        return 10 * num_matvecs
    check_at_least(
        max_matvecs, num_matvecs, "max_matvecs", "`num_matvecs` come before the first look"
    )
    return max_matvecs


def refine(
    advance: Callable[[int], Estimate],
    exact: Callable[[], Estimate],
    *,
    size: int,
    num_matvecs: int,
    tol: float | None,
    max_matvecs: int,
) -> Estimate:
    """Runs an estimator to a number of products or to a tolerance.

    Args:
        advance: Brings the estimator to a number of products in all and gives its estimate.
        exact: Gives the exact result with `size` further products.
        size: How many products make the result exact.
        num_matvecs: The number of products, with `tol` the first at which to look.
        tol: Where to stop: ‖standard error‖ ≤ `tol` · ‖value‖. Stopping there favours standard
            errors that happen to be too small, noticeably so after fewer than some sixty products.
        max_matvecs: The greatest number of products, those of the exact result included.

    Returns:
        The estimate; where the tolerance was missed, with `converged` false and a warning.
    """
    if num_matvecs >= size:
        return exact()
    total = num_matvecs
    estimate = advance(total)
    while tol is not None:
        error, goal = estimate.standard_error.norm(), tol * estimate.value.norm()
        if error <= goal:
            break
        if total >= max_matvecs:
            warnings.warn(
                f"after {estimate.num_matvecs} products the standard error is {float(error):.3g}, "
                f"above tol · |estimate| = {float(goal):.3g}: raise `max_matvecs` or `tol`, or use "
                "a method that is better on decaying spectra ('hutch++', 'xtrace', 'xdiag').",
                RuntimeWarning,
                stacklevel=3,
            )
            return replace(estimate, converged=False)
        # Hutchinson's rate tells how many it takes; twice as many at most before the next look.
        needed = total * min(2.0, max(1.25, float((error / goal) ** 2)))
        total = min(max_matvecs, math.ceil(needed) + 1)
        if total >= size and estimate.num_matvecs + size <= max_matvecs:
            return exact()
        estimate = advance(total)
    return estimate
