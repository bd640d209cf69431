"""What an iterative solver returns: the solution, why it stopped, and how it got there."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from jaxtyping import Float, Int
from torch import Tensor


class Status(str, Enum):
    """Why a solver stopped. Compares equal to its value, so `status == "converged"` works."""

    CONVERGED = "converged"
    MAX_ITER = "max_iter"
    NEGATIVE_CURVATURE = "negative_curvature"
    ZERO_CURVATURE = "zero_curvature"
    INDEFINITE_PRECONDITIONER = "indefinite_preconditioner"
    BREAKDOWN = "breakdown"
    STOPPED = "stopped"
    EXHAUSTED = "exhausted"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self]


_REMEDIES = {
    Status.CONVERGED: "The residual is below the tolerance: nothing to do.",
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
        "Every direction has been used: for more of them, run the first quadratic for longer."
    ),
}

# What each entry of a history is: a number for a vector of right-hand sides, [k] for a matrix.
History = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Iterate:
    """A solver at work, for stopping rules and callbacks.

    The histories grow from call to call: look at their last entries, and copy what is to be kept.

    Attributes:
        iteration: Steps taken so far, t; 0 at the start.
        x: Where it stands, of the right-hand sides' shape.
        direction: The normalised direction of the last step (zero for a right-hand side that is
            done), None at the start.
        residual_norms: ‖b − A x_t‖, t + 1 entries.
        values: ½ x_tᵀ A x_t − bᵀ x_t, t + 1 entries.
        slopes: s(x_t; d_t) along the normalised directions, t entries.
        curvatures: c(d_t), t entries.
        step_sizes: τ_t, t entries.
    """

    iteration: int
    x: Float[Tensor, "n *k"]
    direction: Float[Tensor, "n *k"] | None
    residual_norms: History
    values: History
    slopes: History
    curvatures: History
    step_sizes: History


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution of A x = b, or of k of them at once, with its history of T iterations.

    A right-hand side that is done before the others rests: its steps are zero, its slopes and
    curvatures NaN, because they are no longer measured.

    Attributes:
        x: The solution, `[n]` or `[n, k]`.
        statuses: Why each right-hand side stopped; one entry for a vector.
        residual_norms: ‖b − A x_t‖ by recursion, `[T + 1]` or `[T + 1, k]`.
        values: The quadratic ½ x_tᵀ A x_t − bᵀ x_t, which the solution minimises, `[T + 1]` or
            `[T + 1, k]`.
        slopes: s(x_t; d_t) = −d_tᵀ(b − A x_t) along normalised directions, `[T]` or `[T, k]`.
        curvatures: c(d_t) = d_tᵀ A d_t, `[T]` or `[T, k]`.
        step_sizes: τ_t = −s(x_t; d_t) / c(d_t) (Eq. 3), `[T]` or `[T, k]`.
        num_iterations: Steps that each right-hand side took, a number or `[k]`.
        num_matvecs: Products of the operator with one vector, all right-hand sides together.
        negative_direction: The normalised direction along which the curvature was not positive,
            `[n]` or `[n, k]`, zero for right-hand sides that met none; None if none did.
        negative_curvature: The curvature along it, a number or `[k]`; NaN where there is none.
        directions: d_t as columns, `[n, T]` or `[n, T, k]`, if they were kept.
        trajectory: x_t as columns, `[n, T + 1]` or `[n, T + 1, k]`, if it was kept.
    """

    x: Float[Tensor, "n *k"]
    statuses: tuple[Status, ...]
    residual_norms: Float[Tensor, "iterates *k"]
    values: Float[Tensor, "iterates *k"]
    slopes: Float[Tensor, "steps *k"]
    curvatures: Float[Tensor, "steps *k"]
    step_sizes: Float[Tensor, "steps *k"]
    num_iterations: Int[Tensor, "*k"]
    num_matvecs: int
    negative_direction: Float[Tensor, "n *k"] | None = None
    negative_curvature: Float[Tensor, "*k"] | None = None
    directions: Float[Tensor, "n steps *k"] | None = None
    trajectory: Float[Tensor, "n iterates *k"] | None = None

    @property
    def status(self) -> Status:
        """`CONVERGED` if every right-hand side is, else the first other reason."""
        others = (status for status in self.statuses if status is not Status.CONVERGED)
        return next(others, Status.CONVERGED)

    @property
    def converged(self) -> bool:
        """Whether every right-hand side is solved to the tolerance."""
        return self.status is Status.CONVERGED

    @property
    def message(self) -> str:
        """Why it stopped and what to do about it, a line for each reason."""
        lines = []
        for status in dict.fromkeys(self.statuses):
            count = self.statuses.count(status)
            which = "" if len(self.statuses) == 1 else f" ({count} of {len(self.statuses)})"
            lines.append(f"{status.value}{which}: {status.remedy}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class DebiasedSolution:
    """The two trajectories of debiased conjugate gradients.

    Attributes:
        debiased: Directions from the first quadratic, step sizes from the second (Eq. 8); its
            slopes, curvatures, values and residuals are those of the second quadratic.
        single: What conjugate gradients on the first quadratic alone did.
    """

    debiased: Solution
    single: Solution

    @property
    def x(self) -> Float[Tensor, "n *k"]:
        """The debiased solution."""
        return self.debiased.x

    @property
    def directions(self) -> Float[Tensor, "n steps *k"] | None:
        """The directions that both share, if they were kept."""
        return self.single.directions

    @property
    def num_matvecs(self) -> int:
        """Products with either operator."""
        return self.single.num_matvecs + self.debiased.num_matvecs
