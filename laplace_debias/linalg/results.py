"""Results of the algorithms: values, their errors, and why an algorithm stopped."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.system.shown import one_line


class Status(StrEnum):
    """The reason why an algorithm stopped; each member compares equal to its string value."""

    EXACT = "exact"
    CONVERGED = "converged"
    UNVERIFIED = "unverified"
    MAX_ITER = "max_iter"
    NEGATIVE_CURVATURE = "negative_curvature"
    ZERO_CURVATURE = "zero_curvature"
    INDEFINITE_PRECONDITIONER = "indefinite_preconditioner"
    BREAKDOWN = "breakdown"
    STOPPED = "stopped"
    EXHAUSTED = "exhausted"
    DIVERGED = "diverged"

    @property
    def is_success(self) -> bool:
        """Whether the result has the requested precision."""
        return self in (Status.EXACT, Status.CONVERGED, Status.UNVERIFIED)


_REMEDIES = {
    Status.EXACT: "The result has a closed form, so nothing needs to be changed.",
    Status.CONVERGED: "The residual is below the tolerance, so nothing needs to be changed.",
    Status.UNVERIFIED: (
        "The residuals are below the tolerance, but the search for further eigenpairs did not "
        "finish, so eigenpairs may be missing. Raise `max_matvecs`."
    ),
    Status.MAX_ITER: (
        "The residual is not below the tolerance after `max_iter` iterations. Raise `max_iter` or "
        "`tol`, pass a `preconditioner`, or add damping to the operator."
    ),
    Status.NEGATIVE_CURVATURE: (
        "The operator has negative curvature along `negative_direction`, so it is not positive "
        "definite and the quadratic has no minimum. Use the GGN instead of the Hessian, add "
        "damping, or follow this direction. `x` is the last iterate before this direction was met."
    ),
    Status.ZERO_CURVATURE: (
        "The operator is singular along `negative_direction`, but the right-hand side is not zero "
        "in this direction, so there is no solution. Add damping. `x` is the last iterate before "
        "this direction was met."
    ),
    Status.INDEFINITE_PRECONDITIONER: (
        "The preconditioner is not positive definite, because the inner product of a residual "
        "and the preconditioned residual is not positive. Pass a symmetric positive definite "
        "approximation of the operator's inverse."
    ),
    Status.BREAKDOWN: (
        "A product, or the preconditioned residual, contains NaN or Inf. Look for them in the "
        "operator's data and parameters and in the preconditioner, or compute in float64. `x` is "
        "the last finite iterate."
    ),
    Status.STOPPED: "The run was ended by the rule in `stop`, or because the other run ended.",
    Status.EXHAUSTED: (
        "The run has used all directions that the run of the first quadratic computed. For more "
        "directions, compute more iterations in that run."
    ),
    Status.DIVERGED: "The iteration diverges; `x` is the best iterate. Use a smaller step.",
}


# Each entry of a history is a scalar if the right-hand side is a vector, and has shape [k] if there
# are k right-hand sides.
History = Sequence[Tensor]


class Result:
    """Base class of results, whose `repr` fits on one line."""

    __repr__ = one_line


@dataclass(frozen=True, eq=False, repr=False)
class LinearSolution(Result):
    """An approximate solution of A x = b for one or several right-hand sides.

    Attributes:
        x: The solution, `[n]` or `[n, k]`.
        statuses: For each right-hand side, why the solver stopped (a single entry if b is a
            vector).
        residual_norms: ‖b − A x‖ for each right-hand side, a scalar or `[k]`. A `Solution` contains
            the whole history.
        num_matvecs: Number of matrix-vector products, summed over all right-hand sides.
        advice: The solver's own advice for a status, which replaces the general remedy.
    """

    x: Float[Tensor, "n *k"]
    statuses: tuple[Status, ...]
    residual_norms: Float[Tensor, "*k"]
    num_matvecs: int
    advice: Mapping[Status, str] = field(default_factory=dict, kw_only=True)

    @property
    def status(self) -> Status:
        """`CONVERGED` if all right-hand sides converged, otherwise one of the other reasons."""
        if Status.DIVERGED in self.statuses:
            return Status.DIVERGED
        return next((each for each in self.statuses if not each.is_success), Status.CONVERGED)

    @property
    def converged(self) -> bool:
        """Whether every right-hand side was solved to the tolerance."""
        return all(status.is_success for status in self.statuses)

    @property
    def message(self) -> str:
        """Why the solver stopped and what to do, with one line per reason."""
        lines = []
        for status in dict.fromkeys(self.statuses):
            count = self.statuses.count(status)
            share = "" if len(self.statuses) == 1 else f" ({count} of {len(self.statuses)})"
            lines.append(f"{status.value}{share}: {self.advice.get(status, _REMEDIES[status])}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class Solution(LinearSolution):
    """A solution of A x = b for one or several right-hand sides, with its history.

    If a right-hand side is done before the others, its remaining steps are zero, and its remaining
    slopes and curvatures are NaN, because they are not measured.

    Attributes:
        residual_norms: ‖b − A x_t‖ for T iterations, updated recursively, `[T + 1]` or
            `[T + 1, k]`.
        values: The quadratic ½ x_tᵀ A x_t − bᵀ x_t, which the solution minimises, `[T + 1]` or
            `[T + 1, k]`.
        slopes: s(x_t; d_t) = −d_tᵀ(b − A x_t) along normalised directions, `[T]` or `[T, k]`.
        curvatures: c(d_t) = d_tᵀ A d_t, `[T]` or `[T, k]`.
        step_sizes: τ_t = −s(x_t; d_t) / c(d_t) (Eq. 3), `[T]` or `[T, k]`.
        num_iterations: Number of steps of each right-hand side, a scalar or `[k]`.
        negative_direction: The normalised direction along which the curvature was not positive,
            `[n]` or `[n, k]`. It is zero for right-hand sides without such a direction, and None if
            there is no such direction at all.
        negative_curvature: The curvature along this direction, a scalar or `[k]`; NaN for
            right-hand sides without such a direction.
        directions: d_t as columns, `[n, T]` or `[n, T, k]`, if they were kept.
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


@dataclass(frozen=True, eq=False, repr=False)
class DebiasedSolution(Result):
    """The two trajectories of debiased conjugate gradients.

    Attributes:
        debiased: The trajectory with directions from the first quadratic and step sizes from the
            second (Eq. 8). Its slopes, curvatures, values and residuals are those of the second
            quadratic.
        single: Conjugate gradients on the first quadratic.
    """

    debiased: Solution
    single: Solution

    @property
    def x(self) -> Float[Tensor, "n *k"]:
        """The debiased solution."""
        return self.debiased.x

    @property
    def directions(self) -> Float[Tensor, "n steps *k"] | None:
        """The search directions, which both trajectories share, if they were kept."""
        return self.single.directions

    @property
    def num_matvecs(self) -> int:
        """The total number of products with the two operators."""
        return self.single.num_matvecs + self.debiased.num_matvecs


@dataclass(frozen=True, eq=False, repr=False)
class Iterate(Result):
    """The state of a solver after an iteration, which stopping rules and callbacks receive.

    The histories are extended in place between calls. Use their last entries, and copy anything
    that you want to keep.

    Attributes:
        iteration: Steps taken so far, t; 0 at the start.
        x: The iterate, in the shape of the right-hand sides.
        direction: The normalised direction of the last step (zero for a right-hand side that is
            done); None at the start.
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


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Result):
    """A value with a standard error.

    `float(estimate)` is the value of a scalar estimate, and `estimate.interval(0.95)` is a
    confidence interval for the true value.

    Args:
        value: The estimate.
        standard_error: Its standard error, of the same shape. It is 0 if the value is exact, and
            infinite if there is only one sample, because the spread is then unknown.
        num_matvecs: Number of products with the operator or its adjoint.
        converged: False if a requested tolerance was not reached.
        degrees_of_freedom: The degrees of freedom ν of the standard error, in the shape of the
            value or as a scalar: the relative variance of the squared standard error is 2/ν, like
            that of a χ² variable with ν degrees of freedom. Infinite for an exact value, and 0 for
            a single sample.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    num_matvecs: int
    converged: bool = True
    degrees_of_freedom: Float[Tensor, "*shape"] | float = math.inf

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        r"""Compute a confidence interval from the quantiles of Student's t distribution.

        The level applies to each entry separately, not to all of them jointly. The interval of an
        exact value is a point, and that of a single sample is (−∞, ∞).

        Raises:
            ValueError: If `level` is not between 0 and 1.

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
        """Wrap a value that is known exactly."""
        return cls(value, torch.zeros_like(value), num_matvecs)


def half_width(
    standard_error: Float[Tensor, "*shape"],
    degrees_of_freedom: Float[Tensor, "*shape"] | float,
    level: float,
) -> Float[Tensor, "*shape"]:
    """Compute the half-width of Student's interval, which is 0 or ∞ if the standard error is."""
    if not 0 < level < 1:
        raise ValueError(f"`level` is {level}. Pass a probability between 0 and 1, such as 0.95.")
    # Import SciPy only here, because its import is slow and most estimates are used without it.
    from scipy.stats import t as student

    degrees = torch.as_tensor(degrees_of_freedom, dtype=torch.float64).cpu().numpy()
    quantile = torch.as_tensor(student.ppf((1 + level) / 2, degrees)).to(standard_error)
    settled = (standard_error == 0) | standard_error.isinf()
    return torch.where(settled, standard_error, quantile * standard_error)


@dataclass(frozen=True, eq=False, repr=False)
class SpectralDensity(Result):
    r"""A smoothed spectral density, and the quadrature that it was computed from.

    Args:
        grid: The eigenvalues λ at which the density is given, in ascending order, `[points]`. On a
            logarithmic scale, they are evenly spaced in log₁₀ |λ|.
        density: Fraction of the eigenvalues per unit of λ, or per decade on a logarithmic scale,
            `[points]`. Its integral over λ, or log₁₀ |λ|, is 1 − `null_fraction`.
        standard_error: Standard error, `[points]`. Its square is the sum of two squares: of the
            standard error of the mean over probes, and of `quadrature_error`. Infinite for a single
            probe.
        quadrature_error: Estimated error of replacing all eigenvalues by the few Lanczos nodes,
            both smoothed by `width`, `[points]`; 0 if all eigenvalues are known.
        degrees_of_freedom: Degrees of freedom of the standard error, as in `Estimate`, `[points]`.
        nodes: Ritz values, `[probes, steps]`.
        weights: Weights of the nodes, `[probes, steps]`, which sum to 1 for each probe.
        scale: `"linear"` or `"log"`.
        width: Standard deviation of the smoothing Gaussian, in units of λ or in decades.
        null_fraction: On a logarithmic scale, the fraction of eigenvalues with |λ| ≤ `floor`, which
            the density leaves out; 0 on a linear scale.
        negative_fraction: Fraction of eigenvalues below −`floor`; on a logarithmic scale, these
            are shown at their absolute values.
        floor: Largest absolute value that counts as zero.
        num_matvecs: Number of products.
    """

    grid: Float[Tensor, " points"]
    density: Float[Tensor, " points"]
    standard_error: Float[Tensor, " points"]
    quadrature_error: Float[Tensor, " points"]
    degrees_of_freedom: Float[Tensor, " points"]
    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    scale: str
    width: float
    null_fraction: float
    negative_fraction: float
    floor: float
    num_matvecs: int

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
        """Compute a confidence interval for the smoothed density at each grid point."""
        margin = half_width(self.standard_error, self.degrees_of_freedom, level)
        return (self.density - margin).clamp(min=0), self.density + margin


@dataclass(frozen=True, eq=False, repr=False)
class EigenPairs(Result):
    """Eigenvalues and eigenvectors of a symmetric operator.

    Args:
        values: Eigenvalues in descending order, `[k]`; fewer than k if ARPACK did not converge.
        vectors: Orthonormal eigenvectors as columns, `[D, k]`.
        residuals: An upper bound on ‖A v − λ v‖ for each pair, `[k]`. Some eigenvalue lies within
            this distance of λ.
        num_matvecs: Number of products.
        status: `EXACT`, `CONVERGED`, `UNVERIFIED` (converged, but it was not verified that no pair
            was missed) or `MAX_ITER` (not all pairs converged).
        message: The status in words, and the remedy if there is one.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "D k"]
    residuals: Float[Tensor, " k"]
    num_matvecs: int
    status: Status
    message: str

    @property
    def converged(self) -> bool:
        """Whether all residuals are below the tolerance."""
        return self.status.is_success

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))
