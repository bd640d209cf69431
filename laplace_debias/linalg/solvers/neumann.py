"""Solve linear equations by a truncated Neumann series."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_right_side, check_square
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.linalg.estimators.norms import spectral_norm
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import LinearSolution, Status
from laplace_debias.linalg.solvers.conjugate_gradient import Preconditioner, precondition
from laplace_debias.operators.base import LinearOperator
from laplace_debias.system.checks import real, whole

_GROWTH = 10.0
"""If the residual grows by this factor, the series counts as diverging."""

_SCALE_TOLERANCE = 0.1


def neumann(
    A: LinearOperator,
    b: Float[Tensor, "n *k"],
    num_terms: int = 100,
    *,
    scale: float | None = None,
    preconditioner: Preconditioner | None = None,
    tol: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> LinearSolution:
    r"""Solve $A x = b$ approximately by K terms of the scaled Neumann series.

    $$x = \alpha \sum_{j=0}^{K-1} (I - \alpha P A)^j P b.$$

    The series converges if $|1 - \lambda| < 1$ for every eigenvalue λ of $\alpha P A$. If A is
    symmetric and there is no preconditioner, this means that A is positive definite and
    $\alpha < 2/\lambda_{\max}$. Term j shrinks as $(1 - \alpha\lambda_{\min})^j$, so for
    ill-conditioned operators, `cg` needs far fewer products. Unlike the result of `cg`, however,
    the sum is linear in b.

    Args:
        A: Operator `[n, n]`.
        b: Right-hand sides, `[n]` or `[n, k]`.
        num_terms: K, the number of terms. Each term costs one product per right-hand side.
        scale: α. Default: 1 with a preconditioner; otherwise the inverse of an upper estimate of
            the spectral norm, which needs a few extra products.
        preconditioner: P, an approximate inverse of A, as an operator or a function.
        tol: If given, stop early once ‖b − A x‖ ≤ `tol` ‖b‖ for all right-hand sides.
        generator: Source of randomness for the default scale, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        The solution. Its status is `"converged"` if `tol` was given and reached, `"max_iter"` after
        all terms, and `"diverged"` if a residual grew. In the last case, x is the best partial sum.

    Raises:
        ValueError: If shapes, dtypes or devices do not match, b or a product is not finite, or a
            number is out of range.

    Reference:
        Lorraine, Vicol, Duvenaud. Optimizing millions of hyperparameters by implicit
        differentiation. AISTATS, 2020.
    """
    check_square(A, "Neumann series", generator)
    check_right_side(A, b, "b")
    whole(num_terms, "num_terms")
    if scale is not None and not scale > 0:
        raise ValueError(
            f"`scale` is {scale}. Pass a positive number below 2 / λ_max, where λ_max "
            "is the largest eigenvalue."
        )
    if tol is not None and not real(tol, "tol") > 0:
        raise ValueError(f"`tol` is {tol}. Pass a positive relative residual.")
    num_scale_matvecs = 0
    if scale is None and preconditioner is None:
        scale, num_scale_matvecs = _default_scale(A, generator)
    elif scale is None:
        scale = 1.0
    # A negative tolerance is never reached, so all terms are summed.
    tolerance = -1.0 if tol is None else tol
    # Each right-hand side has its own residual norm, and its best partial sum so far.
    start_norms = column_norms(b)
    x = torch.zeros_like(b)
    residual = b
    norms = start_norms
    best = x
    best_norms = start_norms
    is_bounded = torch.ones_like(start_norms, dtype=torch.bool)
    with Products(A, progress=progress, total=num_terms * b[:1].numel()) as products:
        for _ in range(num_terms):
            # A right-hand side whose residual has grown takes no further steps.
            step = torch.where(is_bounded, scale * precondition(preconditioner, residual), 0)
            x = x + step
            residual = residual - products(step)
            norms = column_norms(residual)
            is_better = norms < best_norms
            best = torch.where(is_better, x, best)
            best_norms = torch.where(is_better, norms, best_norms)
            is_solved = norms <= tolerance * start_norms
            is_bounded = norms <= _GROWTH * start_norms
            if (is_solved | ~is_bounded).all():
                break
    has_diverged = norms > start_norms
    growth = float((norms / start_norms.clamp(min=torch.finfo(norms.dtype).tiny)).max())
    # If the series of a right-hand side diverges, return its best partial sum.
    x = torch.where(has_diverged, best, x)
    norms = torch.where(has_diverged, best_norms, norms)
    return LinearSolution(
        x,
        _statuses(has_diverged, is_solved),
        norms.to(b),
        num_scale_matvecs + products.count,
        advice=_advice(num_terms, scale, growth),
    )


def _default_scale(A: LinearOperator, generator: torch.Generator | None) -> tuple[float, int]:
    """Return α, the inverse of an upper estimate of ‖A‖, and the number of products it needed."""
    norm = spectral_norm(A, tol=_SCALE_TOLERANCE, generator=generator)
    bound = float(norm.value + norm.standard_error)
    if bound > 0:
        return 1 / bound, norm.num_matvecs
    return 1.0, norm.num_matvecs


def _statuses(has_diverged: Tensor, is_solved: Tensor) -> tuple[Status, ...]:
    """Return the stopping reason of each right-hand side, given scalars or tensors `[k]`."""
    statuses = []
    for diverged, solved in zip(has_diverged.reshape(-1), is_solved.reshape(-1), strict=True):
        if diverged:
            statuses.append(Status.DIVERGED)
        elif solved:
            statuses.append(Status.CONVERGED)
        else:
            statuses.append(Status.MAX_ITER)
    return tuple(statuses)


def _advice(num_terms: int, scale: float, growth: float) -> dict[Status, str]:
    """Return what to do for each status; the largest residual grew by the factor `growth`."""
    return {
        Status.MAX_ITER: (
            f"All {num_terms} terms are summed. For a smaller residual, raise `num_terms`, pass "
            "a `preconditioner`, or use `cg`."
        ),
        Status.DIVERGED: (
            f"The series diverges with the scale {scale:.3g}, because the residual grew to "
            f"{growth:.3g} times the right-hand side. Set `scale` below 2 / λ_max. If the "
            "operator has negative eigenvalues, add damping."
        ),
    }
