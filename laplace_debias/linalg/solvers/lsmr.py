"""Linear least squares by LSMR, from SciPy."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_at_least, check_operator, check_right_side
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import LinearSolution, Status
from laplace_debias.operators.base import LinearOperator
from laplace_debias.system.checks import real

# What SciPy's LSMR calls its reasons to stop.
_STATUS = {
    0: Status.CONVERGED,
    1: Status.CONVERGED,
    2: Status.LEAST_SQUARES,
    3: Status.ILL_CONDITIONED,
    4: Status.CONVERGED,
    5: Status.LEAST_SQUARES,
    6: Status.ILL_CONDITIONED,
    7: Status.MAX_ITER,
}
_ADVICE = {
    Status.CONVERGED: (
        "The residual is at most `tol` (‖b‖ + ‖A‖ ‖x‖): `x` solves a system that differs from this "
        "one by `tol`. Where `residual_norms` are too large beside ‖b‖, lower `tol`."
    ),
    Status.ILL_CONDITIONED: (
        "Rounding keeps the residual above `tol` (‖b‖ + ‖A‖ ‖x‖): compute in float64, raise `tol`, "
        "or set `damping`."
    ),
    Status.MAX_ITER: (
        "The residual is not below the tolerance after `max_iter` iterations: raise `max_iter` or "
        "`tol`, or set `damping`."
    ),
}


def lsmr(
    A: LinearOperator,
    b: Float[Tensor, "rows *k"],
    *,
    damping: float = 0.0,
    tol: float = 1e-6,
    max_iter: int | None = None,
    progress: bool = False,
) -> LinearSolution:
    r"""Minimises $\|A x - b\|^2 + \mu^2 \|x\|^2$ for any operator, also rectangular or singular.

    SciPy's LSMR, on the CPU in float64; products run where the operator is, in its dtype. Of all
    minimisers it finds the shortest. Right-hand sides are solved one by one.

    Args:
        A: Operator `[rows, columns]`; its adjoint is multiplied too.
        b: Right-hand sides, `[rows]` or `[rows, k]`.
        damping: μ. For a symmetric positive definite A this does not solve with `A + μ I`.
        tol: Where to stop: at ‖b − A x‖ ≤ tol (‖b‖ + ‖A‖ ‖x‖), `"converged"`, or else at
            ‖Aᵀ(b − A x)‖ ≤ tol ‖A‖ ‖b − A x‖, `"least_squares"`, with an estimate of A's Frobenius
            norm. Beside ‖b‖ alone the residual is larger, by up to A's condition number: it is in
            `residual_norms`.
        max_iter: Iterations a right-hand side, each two products; default
            `10 * min(rows, columns)`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, b or a product is not finite, or a number
            is out of range.

    Reference:
        Fong, Saunders. LSMR: an iterative algorithm for sparse least-squares problems. SIAM Journal
        on Scientific Computing, 2011.
    """
    # Slow to import, and few need it.
    from scipy.sparse.linalg import LinearOperator as SciPyOperator
    from scipy.sparse.linalg import lsmr as scipy_lsmr

    check_operator(A)
    check_right_side(A, b, "b")
    if not real(damping, "damping") >= 0:
        raise ValueError(f"`damping` is {damping}; expected 0 or more.")
    if not real(tol, "tol") > 0:
        raise ValueError(f"`tol` is {tol}; expected a positive relative residual.")
    if max_iter is None:
        max_iter = 10 * min(A.shape)
    check_at_least(max_iter, 1, "max_iter")
    with Products(A, progress=progress, label="lsmr") as products:

        def multiply(vector: np.ndarray) -> np.ndarray:
            return products(torch.tensor(vector.ravel()).to(b)).cpu().double().numpy()

        def multiply_adjoint(vector: np.ndarray) -> np.ndarray:
            return products.adjoint(torch.tensor(vector.ravel()).to(b)).cpu().double().numpy()

        operator = SciPyOperator(
            A.shape, matvec=multiply, rmatvec=multiply_adjoint, dtype=np.float64
        )
        solutions, reasons, norms_of_A = [], [], []
        for right in b.reshape(len(b), -1).T:
            result = scipy_lsmr(
                operator,
                right.cpu().double().numpy(),
                damp=damping,
                atol=tol,
                btol=tol,
                conlim=0,
                maxiter=max_iter,
            )
            solutions.append(torch.from_numpy(np.asarray(result[0])).to(b))
            reasons.append(_STATUS[result[1]])
            norms_of_A.append(result[5])
        x = torch.stack(solutions, dim=1).reshape(A.shape[1], *b.shape[1:])
        residual_norms = (b - products(x)).norm(dim=0)
    # SciPy's recursion does not see the rounding of products and of x.
    bounds = tol * (
        b.norm(dim=0) + torch.tensor(norms_of_A).to(b).view_as(residual_norms) * x.norm(dim=0)
    )
    is_above = (residual_norms > bounds).flatten().tolist()
    statuses = tuple(
        Status.ILL_CONDITIONED if reason is Status.CONVERGED and above else reason
        for reason, above in zip(reasons, is_above, strict=True)
    )
    return LinearSolution(x, statuses, residual_norms, products.count, advice=_ADVICE)
