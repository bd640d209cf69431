"""Extreme eigenpairs of a symmetric operator: Lanczos, ARPACK, subspace iteration."""

import torch

from laplace_debias.linalg.checks import (
    check_at_least,
    check_choice,
    check_finite,
    check_generator,
    check_square,
)
from laplace_debias.linalg.eigen.methods import (
    arpack_eigenpairs,
    best,
    dense_eigenpairs,
    lanczos_eigenpairs,
    subspace_iteration,
)
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_eigh
from laplace_debias.system.warn import warn

METHODS = {
    "lanczos": lanczos_eigenpairs,
    "arpack": arpack_eigenpairs,
    "power": subspace_iteration,
}
WHICH = ("largest", "smallest", "magnitude")
_SMALL = 32
"""Operators of at most so many columns are multiplied out."""


def eigsh(
    A: LinearOperator,
    k: int = 10,
    method: str = "lanczos",
    which: str = "largest",
    *,
    tol: float = 1e-6,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> EigenPairs:
    r"""The k extreme eigenpairs of a symmetric operator, from products alone.

    - `"lanczos"`: Lanczos with full reorthogonalisation and thick restarts, on the operator's
      device. Once all pairs have converged, a random direction orthogonal to them starts again, so
      that eigenvalues come with their multiplicity and none beyond the last is overlooked: one that
      is further out by more than the tolerance is missed with a probability of about 1e-4. Where
      `max_matvecs` ends that search, `status` is `UNVERIFIED`. Holds up to `max(4 k, 256)` vectors,
      fewer beyond 2 GiB.
    - `"arpack"`: SciPy's, whose vectors live on the CPU. It may miss copies of a multiple
      eigenvalue, so `status` is `UNVERIFIED`.
    - `"power"`: subspace iteration with a block of `k + max(k, 10)` vectors and a Rayleigh–Ritz
      step. Simple and slow: its rate is the ratio of the eigenvalues after and before the block's
      end. Counts products by the block.

    The operator must be symmetric. The projections show at no cost whether it is; a claim is not
    needed. A structured operator's eigenpairs are exact (no products). Those of one of at
    most 32, or 2k, columns come from `to_dense` (as many products as columns).

    Args:
        A: Symmetric operator of shape `[D, D]`.
        k: How many pairs, 1 … D.
        method: `"lanczos"`, `"arpack"` or `"power"`.
        which: `"largest"` or `"smallest"` algebraically, or the largest in `"magnitude"`.
        tol: Greatest residual norm, relative to the largest |eigenvalue| found; at least ten times
            the dtype's rounding. An eigenvalue whose gap to the others is wide compared to that is
            far more precise: its error is about the residual's square over the gap. Eigenvalues
            closer than the tolerance to each other, or to those beyond the k-th, are not
            distinguished; nor are those below it from zero. Choose it well below the ratio of the
            k-th eigenvalue to the first.
        max_matvecs: Greatest number of products, up to the last block's; default
            `max(1000, 50 k)`, for `"power"` `max(10_000, 1000 k)`.
        generator: Source of the random start, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        Values `[k]` descending, vectors `[D, k]`, residuals and more.

    Raises:
        ValueError: The operator is not square or not symmetric, a product not finite, k out of
            range, a name unknown, a number too small, or the generator on another device.

    Warns:
        RuntimeWarning: Not all pairs have converged; the result's `message` names the remedy.

    Reference:
        Wu, Simon. Thick-restart Lanczos method for large symmetric eigenvalue problems. SIMAX,
        2000. Lehoucq, Sorensen, Yang. ARPACK users' guide. SIAM, 1998. Saad. Numerical methods for
        large eigenvalue problems. SIAM, 2011, chapter 5.
    """
    n = check_square(A, "eigenpairs")
    check_choice(method, METHODS, "method")
    check_choice(which, WHICH, "which")
    if not 1 <= k <= n:
        raise ValueError(
            f"`k` is {k}; expected 1 … {n}, as {type(A).__name__} has shape {A.shape}."
        )
    if not tol > 0:
        raise ValueError(f"`tol` is {tol}; expected a positive relative residual.")
    if max_matvecs is None:
        max_matvecs = max(10_000, 1000 * k) if method == "power" else max(1000, 50 * k)
    check_at_least(max_matvecs, k, "max_matvecs", "one for each of `k` pairs")
    check_generator(generator, A)
    check_finite(A)
    closed_form = exact_eigh(A)
    if closed_form is not None:
        chosen = best(closed_form.values, k, which)
        values, vectors = closed_form.values[chosen], closed_form.vectors[:, chosen].to_dense()
        return EigenPairs(values, vectors, torch.zeros_like(values), 0, Status.EXACT, "exact")
    with Products(A, progress=progress, label=f"eigsh ({method})") as P:
        if n <= max(_SMALL, 2 * k) and max_matvecs >= n:
            result = dense_eigenpairs(P, k, which)
        else:
            result = METHODS[method](P, k, which, tol, max_matvecs, generator)
    if not result.converged:
        warn(result.message, RuntimeWarning)
    return result
