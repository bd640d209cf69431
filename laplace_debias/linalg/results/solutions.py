"""Solutions of linear equations: what was found, why the solver stopped, and how it got there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.linalg.results.status import Status

# What each entry of a history is: a number for a vector of right-hand sides, [k] for a matrix.
History = Sequence[Tensor]

_WORST = (Status.ILL_CONDITIONED, Status.DIVERGED)


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """An approximate solution of A x = b, or of k of them at once.

    Attributes:
        x: The solution, `[n]` or `[n, k]`.
        statuses: Why each right-hand side stopped; one entry for a vector.
        residual_norms: ‖b − A x‖ of each right-hand side, a number or `[k]`; in a `Solution` with
            its history.
        num_matvecs: Products of the operator or its adjoint with one vector, all right-hand sides
            together.
        advice: What the solver has to say about a status, in place of its general remedy.
    """

    x: Float[Tensor, "n *k"]
    statuses: tuple[Status, ...]
    residual_norms: Float[Tensor, "*k"]
    num_matvecs: int
    advice: Mapping[Status, str] = field(default_factory=dict, kw_only=True)

    @property
    def status(self) -> Status:
        """`CONVERGED` if every right-hand side is, else the worst reason; of equals, the first."""
        return max(self.statuses, key=_severity)

    @property
    def converged(self) -> bool:
        """Whether every right-hand side is solved, or its residual minimised, to the tolerance."""
        return all(status.is_success for status in self.statuses)

    @property
    def message(self) -> str:
        """Why it stopped and what to do about it, a line for each reason."""
        lines = []
        for status in dict.fromkeys(self.statuses):
            count = self.statuses.count(status)
            which = "" if len(self.statuses) == 1 else f" ({count} of {len(self.statuses)})"
            lines.append(f"{status.value}{which}: {self.advice.get(status, status.remedy)}")
        return "\n".join(lines)


def _severity(status: Status) -> int:
    if status is Status.CONVERGED:
        return 0
    if status.is_success:
        return 1
    return 3 if status in _WORST else 2


@dataclass(frozen=True, eq=False)
class Solution(LinearSolution):
    """A solution of A x = b, or of k of them at once, with its history of T iterations.

    A right-hand side that is done before the others rests: its steps are zero. Its slopes and
    curvatures are NaN, because they are no longer measured.

    Attributes:
        x: The solution, `[n]` or `[n, k]`.
        statuses: Why each right-hand side stopped; one entry for a vector.
        residual_norms: ‖b − A x_t‖ by recursion, `[T + 1]` or `[T + 1, k]`.
        num_matvecs: Products of the operator with one vector, all right-hand sides together.
        values: The quadratic ½ x_tᵀ A x_t − bᵀ x_t, which the solution minimises, `[T + 1]` or
            `[T + 1, k]`.
        slopes: s(x_t; d_t) = −d_tᵀ(b − A x_t) along normalised directions, `[T]` or `[T, k]`.
        curvatures: c(d_t) = d_tᵀ A d_t, `[T]` or `[T, k]`.
        step_sizes: τ_t = −s(x_t; d_t) / c(d_t) (Eq. 3), `[T]` or `[T, k]`.
        num_iterations: Steps that each right-hand side took, a number or `[k]`.
        negative_direction: The normalised direction along which the curvature was not positive,
            `[n]` or `[n, k]`, zero for right-hand sides that met none; None if none did.
        negative_curvature: The curvature along it, a number or `[k]`; NaN where there is none.
        directions: d_t as columns, `[n, T]` or `[n, T, k]`, if they were kept.
        trajectory: x_t as columns, `[n, T + 1]` or `[n, T + 1, k]`, if it was kept.
    """

    residual_norms: Float[Tensor, "iterates *k"]
    values: Float[Tensor, "iterates *k"]
    slopes: Float[Tensor, "steps *k"]
    curvatures: Float[Tensor, "steps *k"]
    step_sizes: Float[Tensor, "steps *k"]
    num_iterations: Int[Tensor, "*k"]
    negative_direction: Float[Tensor, "n *k"] | None = None
    negative_curvature: Float[Tensor, "*k"] | None = None
    directions: Float[Tensor, "n steps *k"] | None = None
    trajectory: Float[Tensor, "n iterates *k"] | None = None


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
