"""Estimates with standard errors and intervals, and how they are refined until these are small."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor

from laplace_debias.linalg.products import check_at_least


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value that is known up to a standard error.

    `float(estimate)` is the value of a scalar estimate, `estimate.interval(0.95)` an interval for
    what is estimated.

    Args:
        value: The estimate.
        standard_error: Its standard error, of the same shape: 0 if the value is exact, infinite
            if it rests on a single sample, which says nothing of its own spread.
        num_matvecs: How many products with the operator (or its adjoint) it took.
        converged: False if a tolerance was asked for and missed.
        degrees_of_freedom: How well the standard error itself is known, of the value's shape or
            one number for all: its square has the relative variance of a χ² variable with so many
            degrees of freedom, 2/ν. Infinite for an exact value, 0 for a single sample.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    num_matvecs: int
    converged: bool = True
    degrees_of_freedom: Float[Tensor, "*shape"] | float = math.inf

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        r"""A confidence interval, value ± quantile · standard error, by Student's t.

        Entry by entry, not jointly. An exact value gives the point; a single sample gives
        (−∞, ∞), because nothing tells its spread.

        Args:
            level: Probability with which the interval covers what is estimated.

        Returns:
            The lower and the upper end, each of the value's shape.

        Raises:
            ValueError: `level` is not between 0 and 1.

        Reference:
            Student. The probable error of a mean. 1908. Satterthwaite. An approximate distribution
            of estimates of variance components. 1946.

        Example:
            >>> import torch
            >>> from laplace_debias.linalg import Estimate
            >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
            >>> [f"{float(end):.2f}" for end in Estimate(two, one, 4, True, 3.0).interval()]
            ['-1.18', '5.18']
        """
        margin = half_width(self.standard_error, self.degrees_of_freedom, level)
        return self.value - margin, self.value + margin

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def exact(cls, value: Float[Tensor, "*shape"], num_matvecs: int = 0) -> "Estimate":
        """A value without error."""
        return cls(value, torch.zeros_like(value), num_matvecs)


def half_width(
    standard_error: Float[Tensor, "*shape"],
    degrees_of_freedom: Float[Tensor, "*shape"] | float,
    level: float,
) -> Float[Tensor, "*shape"]:
    """Half of the length of Student's interval; infinite or 0 where the standard error is.

    Raises:
        ValueError: `level` is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(
            f"`level` is {level}; expected a probability between 0 and 1, such as 0.95."
        )
    known = torch.as_tensor(degrees_of_freedom, dtype=torch.float64).cpu().numpy()
    quantile = torch.as_tensor(student.ppf((1 + level) / 2, known)).to(standard_error)
    settled = (standard_error == 0) | standard_error.isinf()
    return torch.where(settled, standard_error, quantile * standard_error)


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
