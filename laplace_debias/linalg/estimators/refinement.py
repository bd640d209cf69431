"""How an estimator is run: to a number of products, or until its standard error is small."""

import math
from collections.abc import Callable
from dataclasses import replace

from laplace_debias.linalg.checks import check_at_least
from laplace_debias.linalg.results import Estimate
from laplace_debias.system.warn import warn


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
            warn(
                f"after {estimate.num_matvecs} products the standard error is {float(error):.3g}, "
                f"above tol · |estimate| = {float(goal):.3g}: raise `max_matvecs` or `tol`, or use "
                "a method that is better on decaying spectra ('hutch++', 'xtrace', 'xdiag').",
                RuntimeWarning,
            )
            return replace(estimate, converged=False)
        # Hutchinson's rate gives the number; at most twice as many before the next check.
        needed = total * min(2.0, max(1.25, float((error / goal) ** 2)))
        total = min(max_matvecs, math.ceil(needed) + 1)
        if total >= size and estimate.num_matvecs + size <= max_matvecs:
            return exact()
        estimate = advance(total)
    return estimate
