"""Extreme eigenpairs of a symmetric operator: Lanczos, ARPACK, subspace iteration."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_choice, check_square, check_symmetric
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.linalg.eigen.krylov import KrylovBasis, order, ritz_pairs
from laplace_debias.linalg.eigen.lanczos import capacity, search
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status
from laplace_debias.operators.base import NUMPY_TYPES, LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import exact_eigh
from laplace_debias.system.checks import whole
from laplace_debias.system.shown import counted, warn

_BOUND_STEPS = 12
"""Largest number of Lanczos steps, and of products, with which `_far_end` bounds the spectrum, to
determine the shift for ARPACK and subspace iteration."""


def select(
    values: Tensor, vectors: Any, residuals: Tensor, *, k: int, end: str
) -> tuple[Tensor, Any, Tensor]:
    """Select the k eigenpairs at one end of the spectrum, and sort them in descending order.

    The vectors are the columns of a tensor or an operator.
    """
    outermost = order(values, end).argsort(descending=True, stable=True)[:k]
    selected = outermost[values[outermost].argsort(descending=True, stable=True)]
    return values[selected], vectors[:, selected], residuals[selected]


def selected_pairs(
    values: Tensor,
    vectors: Tensor,
    residuals: Tensor,
    *,
    k: int,
    end: str,
    num_matvecs: int,
    status: Status,
    message: str,
) -> EigenPairs:
    """Build the result from the k pairs at one end of the spectrum."""
    values, vectors, residuals = select(values, vectors, residuals, k=k, end=end)
    return EigenPairs(
        values=values,
        vectors=vectors,
        residuals=residuals,
        num_matvecs=num_matvecs,
        status=status,
        message=message,
    )


def dense_eigenpairs(products: Products, k: int, end: str) -> EigenPairs:
    """Compute the k pairs at one end of the spectrum by decomposing the dense matrix."""
    A = products.operator
    matrix = torch.cat([columns for _, columns in products.columns()], dim=1)
    check_symmetric(A, (matrix - matrix.T).abs(), float(column_norms(matrix).max()))
    values, vectors = eigh((matrix + matrix.T) / 2, "the operator")
    residuals = column_norms(matrix @ vectors - vectors * values).to(values)
    return selected_pairs(
        values,
        vectors,
        residuals,
        k=k,
        end=end,
        num_matvecs=products.count,
        status=Status.CONVERGED,
        message="converged",
    )


def lanczos_eigenpairs(
    products: Products,
    k: int,
    end: str,
    *,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Compute eigenpairs by thick-restart Lanczos from a random start."""
    A = products.operator
    n = A.shape[0]
    num_vectors = capacity(n, k, A.dtype.itemsize)
    basis = KrylovBasis(A, products, size=n, capacity=num_vectors, generator=generator)
    # Computing the dense matrix needs n more products. If the limit allows this, and the basis can
    # hold all columns, stop the search after n products, and decompose the matrix instead.
    can_be_dense = basis.capacity == n and 2 * n <= max_matvecs
    limit = n if can_be_dense else max_matvecs
    result = search(basis, products, k=k, end=end, tol=tol, max_matvecs=limit)
    if can_be_dense and not result.was_verified:
        return dense_eigenpairs(products, k, end)
    status = Status.CONVERGED
    message = "converged"
    if not result.has_converged:
        status = Status.MAX_ITER
        message = _unconverged_message(result.pairs.residuals[:k], result.goal, products.count)
    elif not result.was_verified:
        status = Status.UNVERIFIED
        message = (
            "converged, but the search for more pairs ended at `max_matvecs` = "
            f"{max_matvecs}, so a copy of a multiple eigenvalue, or an eigenvalue further out than "
            "the last of these pairs, may be missing; to be sure, raise `max_matvecs`"
        )
    rotation = result.pairs.combinations[:, :k].to(basis.vectors)
    return selected_pairs(
        result.pairs.values[:k].to(basis.vectors),
        basis.vectors.T @ rotation,
        result.pairs.residuals[:k].to(basis.vectors),
        k=k,
        end=end,
        num_matvecs=products.count,
        status=status,
        message=message,
    )


def _unconverged_message(residuals: Tensor, goal: float, count: int) -> str:
    """Describe how many eigenpairs have converged, and how to make the others converge."""
    num_converged = int((residuals <= goal).sum())
    return (
        f"{num_converged} of {counted(len(residuals), 'eigenpair')} converged in "
        f"{counted(count, 'product')} (largest residual {float(residuals.max()):.3g}, expected "
        f"{goal:.3g}). Raise `max_matvecs` or `tol` (command line: --tolerance), or request fewer "
        "pairs"
    )


def arpack_eigenpairs(
    products: Products,
    k: int,
    end: str,
    *,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Compute eigenpairs by SciPy's ARPACK."""
    # Import SciPy only here, because its import is slow.
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence
    from scipy.sparse.linalg import LinearOperator as SciPyOperator
    from scipy.sparse.linalg import eigsh as arpack

    A = products.operator
    n = A.shape[0]
    num_vectors = min(n, max(2 * k + 1, k + 40))
    # The shift and the scale need products before ARPACK starts. ARPACK then needs one product per
    # vector to fill its basis, and one per vector that it does not keep in each restart.
    num_preparing = _BOUND_STEPS + 1
    num_per_restart = num_vectors - k
    least = num_preparing + num_vectors + num_per_restart
    _check_products(max_matvecs, least, f"ARPACK stores {num_vectors} vectors")
    max_restarts = (max_matvecs - num_preparing - num_vectors) // num_per_restart
    # ARPACK's tolerance is relative to each eigenvalue, so eigenvalues near zero would never
    # converge. Therefore, shift by the opposite end of the spectrum, so that the requested
    # eigenvalues are the largest.
    shift = _far_end(products, end, generator)
    start = draw(A, 1, "gaussian", generator)[:, 0]
    # For eigenvalues below eps^⅔, however, ARPACK's tolerance is absolute, so scale the operator.
    scale = float(column_norms(products(start)) / column_norms(start)) or 1.0

    def multiply(vector: np.ndarray) -> np.ndarray:
        """Multiply a vector by the shifted and scaled operator, (A − shift · I) / scale."""
        column = torch.from_numpy(vector.ravel()).to(A.device, A.dtype)
        return ((products(column) - shift * column) / scale).cpu().numpy()

    (scipy_name,) = [name for name, choice in _SCIPY_NAMES.items() if choice == end]
    status = Status.UNVERIFIED
    message = "converged; ARPACK may have missed copies of an eigenvalue"
    try:
        _, eigenvectors = arpack(
            SciPyOperator((n, n), matvec=multiply, dtype=NUMPY_TYPES[A.dtype]),
            k=k,
            which=scipy_name,
            v0=start.cpu().numpy(),
            ncv=num_vectors,
            maxiter=max_restarts,
            tol=tol,
        )
    except ArpackNoConvergence as error:
        eigenvectors = error.eigenvectors
        status = Status.MAX_ITER
        message = (
            f"{eigenvectors.shape[1]} of {k} eigenpairs converged in {products.count} products, "
            "and only these are returned. Raise `max_matvecs` or `tol`, or use method='lanczos'"
        )
    except ArpackError:
        # ARPACK rejects operators that map its start vector to zero, such as (after the shift)
        # multiples of the identity.
        return lanczos_eigenpairs(
            products, k, end, tol=tol, max_matvecs=max_matvecs, generator=generator
        )
    vectors = torch.from_numpy(np.ascontiguousarray(eigenvectors)).to(A.device, A.dtype)
    images = products(vectors) if vectors.shape[1] else vectors
    values = (vectors * images).sum(dim=0)
    residuals = column_norms(images - vectors * values).to(values)
    return selected_pairs(
        values,
        vectors,
        residuals,
        k=k,
        end=end,
        num_matvecs=products.count,
        status=status,
        message=message,
    )


def subspace_iteration(
    products: Products,
    k: int,
    end: str,
    *,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Compute eigenpairs by multiplying a block of vectors and taking Rayleigh–Ritz steps.

    In each iteration, the block V is rotated to its Ritz vectors, and then replaced by an
    orthonormal basis of (A − shift · I) V.
    """
    A = products.operator
    n = A.shape[0]
    width = min(n, k + max(k, 10))
    _check_products(max_matvecs, width + _BOUND_STEPS, f"the block has {width} vectors")
    shift = _far_end(products, end, generator)
    block = torch.linalg.qr(draw(A, width, "gaussian", generator)).Q
    rounding = 10 * torch.finfo(A.dtype).eps
    # The tolerance is relative to the largest absolute eigenvalue, which may be at the other end of
    # the spectrum.
    scale = abs(shift)
    while True:
        images = products(block)
        projection = block.T @ images
        scale = max(scale, float(column_norms(images).max()))
        check_symmetric(A, (projection - projection.T).abs(), scale)
        values, rotation = eigh((projection + projection.T) / 2, "the projected operator")
        block = block @ rotation
        images = images @ rotation
        residuals = column_norms(images - block * values).to(values)
        goal = max(tol, rounding) * max(scale, float(values.abs().max()))
        _, _, selected_residuals = select(values, block, residuals, k=k, end=end)
        status = None
        if (selected_residuals <= goal).all():
            status = Status.CONVERGED
            message = "converged"
        elif products.count + width > max_matvecs:
            status = Status.MAX_ITER
            message = _unconverged_message(selected_residuals, goal, products.count)
        if status is not None:
            return selected_pairs(
                values,
                block,
                residuals,
                k=k,
                end=end,
                num_matvecs=products.count,
                status=status,
                message=message,
            )
        block = torch.linalg.qr(images - shift * block).Q


def _check_products(max_matvecs: int, least: int, reason: str) -> None:
    if max_matvecs < least:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs}, but at least {least} matrix-vector "
            f"products are needed, because {reason}. Raise `max_matvecs`, or use "
            '`method="lanczos"`.'
        )


def _far_end(products: Products, end: str, generator: torch.Generator | None) -> float:
    """Return a shift after which the requested eigenvalues are those of largest magnitude.

    The shift is a bound on the end of the spectrum that is opposite to the requested one, from a
    Ritz value and its residual after a few Lanczos steps. It is 0 if the largest magnitudes are
    requested.
    """
    if end == "magnitude":
        return 0.0
    A = products.operator
    n = A.shape[0]
    basis = KrylovBasis(A, products, size=n, capacity=min(n, _BOUND_STEPS), generator=generator)
    basis.add_random()
    for _ in range(basis.capacity):
        if not basis.expand(0):
            break
    opposite = "smallest" if end == "largest" else "largest"
    pairs = ritz_pairs(basis, opposite)
    value = float(pairs.values[0])
    error = float(pairs.residuals[0])
    if opposite == "largest":
        return value + error
    return value - error


METHODS = {
    "lanczos": lanczos_eigenpairs,
    "arpack": arpack_eigenpairs,
    "power": subspace_iteration,
}
_SCIPY_NAMES = {"LA": "largest", "SA": "smallest", "LM": "magnitude"}
_UNSUPPORTED_SCIPY_NAMES = {
    "BE": "Call `eigsh` twice, with 'largest' and with 'smallest'.",
    "SM": (
        "For a positive semi-definite operator, use 'smallest'. For any other operator, use "
        "'smallest' with `A @ A`, whose eigenvalues are the squares."
    ),
}
"""SciPy's names without an equivalent, and what to do instead."""
_SMALL = 32
"""Operators with at most this many columns are always converted to a dense matrix."""


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
    r"""Compute the k extreme eigenpairs of a symmetric operator from products with vectors.

    - `"lanczos"`: Lanczos with full reorthogonalisation and thick restarts, on the operator's
      device. Once all pairs have converged, Lanczos starts again from a random direction orthogonal
      to them, to find repeated and overlooked eigenvalues. After this check, the probability is
      only about 1e-4 that it has missed an eigenvalue that lies further out by more than the
      tolerance. If `max_matvecs` is reached during the check, `status` is `UNVERIFIED`. Up to
      `max(4 k, 256)` vectors are stored, or fewer if these would need more than 2 GiB.
    - `"arpack"`: SciPy's ARPACK, which keeps its vectors on the CPU. It may miss copies of a
      multiple eigenvalue, so `status` is `UNVERIFIED`.
    - `"power"`: subspace iteration with a block of `k + max(k, 10)` vectors and a Rayleigh–Ritz
      step. This is simple but slow: the convergence rate is the ratio of the first eigenvalue
      outside the block to the last one inside. Each column of a block counts as one product.

    The operator must be symmetric. You need not declare this, because `eigsh` checks it from the
    projections at no extra cost. For structured operators, eigenpairs are exact and need no
    products. Operators with at most 32 columns, or at most 2k, are converted to a dense matrix,
    with one product per column.

    Args:
        A: Symmetric operator of shape `[D, D]`.
        k: Number of pairs, from 1 to D.
        method: `"lanczos"`, `"arpack"` or `"power"`.
        which: `"largest"` or `"smallest"` algebraically, or the largest in `"magnitude"`. SciPy's
            names `"LA"`, `"SA"` and `"LM"` have the same meanings.
        tol: Largest allowed residual norm, relative to the largest absolute eigenvalue that was
            found; at least ten times the rounding error of the dtype. Well-separated eigenvalues
            are far more precise: their error is about the squared residual divided by the gap to
            the nearest eigenvalue. However, eigenvalues that differ by less than the tolerance,
            including those beyond the k-th, cannot be distinguished from each other, and
            eigenvalues below the tolerance cannot be distinguished from zero. Therefore, choose
            `tol` well below the ratio of the k-th eigenvalue to the first.
        max_matvecs: Largest number of products, which the last block of products may exceed.
            Default: `max(1000, 50 k)`, and `max(10_000, 1000 k)` for `"power"`.
        generator: Source of the random start, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the operator is not square or not symmetric, a product is not finite, k is
            out of range, a name is unknown, a numeric argument is below its minimum, or the
            generator is on a different device.

    Warns:
        RuntimeWarning: If not all pairs have converged. The result's `message` names the remedy.

    Reference:
        Wu, Simon. Thick-restart Lanczos method for large symmetric eigenvalue problems. SIMAX,
        2000. Lehoucq, Sorensen, Yang. ARPACK users' guide. SIAM, 1998. Saad. Numerical methods for
        large eigenvalue problems. SIAM, 2011, chapter 5.
    """
    n = check_square(A, "eigenpairs", generator)
    check_choice(method, METHODS, "method")
    if which in _UNSUPPORTED_SCIPY_NAMES:
        raise ValueError(f"`which` is {which!r}. {_UNSUPPORTED_SCIPY_NAMES[which]}")
    check_choice(which, ("largest", "smallest", "magnitude", *_SCIPY_NAMES), "which")
    end = _SCIPY_NAMES.get(which, which)
    if not 1 <= k <= n:
        raise ValueError(
            f"`k` is {k}. Pass a number from 1 to {n}, because {type(A).__name__} has shape "
            f"{A.shape}."
        )
    if not tol > 0:
        raise ValueError(
            f"`tol` is {tol}. Pass the largest relative residual to accept, a positive number."
        )
    if max_matvecs is None:
        max_matvecs = max(10_000, 1000 * k) if method == "power" else max(1000, 50 * k)
    whole(max_matvecs, "max_matvecs", minimum=k)
    closed_form = exact_eigh(A)
    if closed_form is not None:
        values, vectors = closed_form
        no_residuals = torch.zeros_like(values)
        values, vectors, residuals = select(values, vectors, no_residuals, k=k, end=end)
        return EigenPairs(
            values=values,
            vectors=vectors.to_dense(),
            residuals=residuals,
            num_matvecs=0,
            status=Status.EXACT,
            message="exact",
        )
    with Products(A, progress=progress, label=f"eigsh ({method})") as P:
        if n <= max(_SMALL, 2 * k) and max_matvecs >= n:
            result = dense_eigenpairs(P, k, end)
        else:
            result = METHODS[method](
                P, k, end, tol=tol, max_matvecs=max_matvecs, generator=generator
            )
    if not result.converged:
        warn(result.message, RuntimeWarning)
    return result
