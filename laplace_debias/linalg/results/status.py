"""Why an algorithm stopped."""

from enum import Enum


class Status(str, Enum):
    """Why an algorithm stopped. Compares equal to its value, so `status == "converged"` works."""

    EXACT = "exact"
    CONVERGED = "converged"
    UNVERIFIED = "unverified"
    LEAST_SQUARES = "least_squares"
    MAX_ITER = "max_iter"
    NEGATIVE_CURVATURE = "negative_curvature"
    ZERO_CURVATURE = "zero_curvature"
    INDEFINITE_PRECONDITIONER = "indefinite_preconditioner"
    BREAKDOWN = "breakdown"
    STOPPED = "stopped"
    EXHAUSTED = "exhausted"
    ILL_CONDITIONED = "ill_conditioned"
    DIVERGED = "diverged"

    @property
    def is_success(self) -> bool:
        """Whether the result is as precise as was asked for."""
        return self in _SUCCESSES

    @property
    def remedy(self) -> str:
        """What it means and what to do about it."""
        return _REMEDIES[self]


_SUCCESSES = (Status.EXACT, Status.CONVERGED, Status.UNVERIFIED, Status.LEAST_SQUARES)

_REMEDIES = {
    Status.EXACT: "The result has a closed form: nothing to do.",
    Status.CONVERGED: "The residual is below the tolerance: nothing to do.",
    Status.UNVERIFIED: (
        "The residuals are below the tolerance, but the search for further eigenpairs did not come "
        "to its end: raise `max_matvecs` to be sure."
    ),
    Status.LEAST_SQUARES: "The equations have no exact solution; `x` minimises the residual.",
    Status.MAX_ITER: (
        "The residual is not below the tolerance after `max_iter` iterations: raise `max_iter` or "
        "`tol`, pass a `preconditioner`, or add damping to the operator."
    ),
    Status.NEGATIVE_CURVATURE: (
        "The operator curves downwards along `negative_direction`, so it is not positive definite "
        "and the quadratic has no minimum: use the GGN instead of the Hessian, add damping, or "
        "follow that direction. `x` is the last iterate before it."
    ),
    Status.ZERO_CURVATURE: (
        "The operator is singular along `negative_direction`, on which the right-hand side is not "
        "zero, so there is no solution: add damping. `x` is the last iterate before it."
    ),
    Status.INDEFINITE_PRECONDITIONER: (
        "The preconditioner maps a residual to one with which it has no positive inner product: "
        "pass a symmetric positive definite approximation of the operator's inverse."
    ),
    Status.BREAKDOWN: (
        "A product, or what the preconditioner made of a residual, holds NaN or Inf: look for them "
        "in the operator's data and parameters and in the preconditioner, or compute in float64. "
        "`x` is the last finite iterate."
    ),
    Status.STOPPED: "Stopped by your rule, or because the run beside it came to its end.",
    Status.EXHAUSTED: (
        "Every direction has been used: for more, run the first quadratic for longer."
    ),
    Status.ILL_CONDITIONED: (
        "The condition number is beyond the precision of the numbers: set `damping`, or compute in "
        "float64."
    ),
    Status.DIVERGED: "The iteration diverges; `x` is the best iterate. Use a smaller step.",
}
