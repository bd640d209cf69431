"""Extreme eigenpairs of a symmetric operator: Lanczos, ARPACK, subspace iteration."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.eigen.lanczos import RitzPairs, capacity, order, ritz_pairs, search
from laplace_debias.linalg.estimators.probes import draw
from laplace_debias.linalg.products import (
    Products,
    asymmetry_error,
    asymmetry_tolerance,
    check_at_least,
    check_choice,
    check_finite,
    check_generator,
    check_square,
)
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import exact_eigh

METHODS = ("lanczos", "arpack", "power")
WHICH = ("largest", "smallest", "magnitude")
_SMALL = 32
"""Operators of at most so many columns are multiplied out."""

_BOUND_STEPS = 12
"""Lanczos steps that bound the spectrum for the shift of subspace iteration."""


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """Eigenpairs of a symmetric operator; unpacks as `values, vectors`.

    Args:
        values: Eigenvalues, descending, `[k]`; from ARPACK fewer where it did not converge.
        vectors: Orthonormal eigenvectors as columns, `[D, k]`.
        residuals: A bound of ‖A v − λ v‖ for each pair, `[k]`: some eigenvalue is at most so far
            from λ.
        num_matvecs: How many products it took.
        converged: Whether all residuals came below the tolerance.
        status: What happened; where something is amiss or was not verified, what to do.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "D k"]
    residuals: Float[Tensor, " k"]
    num_matvecs: int
    converged: bool
    status: str

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))


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
      `max_matvecs` ends that search, `status` says so. Holds up to `max(4 k, 256)` vectors, fewer
      beyond 2 GiB.
    - `"arpack"`: SciPy's, whose vectors live on the CPU; then checked and completed as above.
    - `"power"`: subspace iteration with a block of `k + max(k, 10)` vectors and a Rayleigh–Ritz
      step. Simple and slow: its rate is the ratio of the eigenvalues after and before the block's
      end. Counts products by the block.

    The operator must be symmetric. That is not assumed from a claim but noticed, at no cost, from
    the projections. A structured operator's eigenpairs are exact (no products). Those of one of at
    most 32, or 2k, columns come from `to_dense` (as many products as columns).

    Args:
        A: Symmetric operator of shape `[D, D]`.
        k: How many pairs, 1 … D.
        method: `"lanczos"`, `"arpack"` or `"power"`.
        which: `"largest"` or `"smallest"` algebraically, or the largest in `"magnitude"`.
        tol: Greatest residual norm, relative to the largest |eigenvalue| found; at least ten times
            the dtype's rounding. An eigenvalue whose gap to the others is wide compared to that is
            far more precise: its error is about the residual's square over the gap. Eigenvalues
            closer than the tolerance to each other, or to those beyond the k-th, are not told
            apart, nor are those below it told from zero: choose it well below the k-th eigenvalue
            over the first.
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
        RuntimeWarning: Not all pairs have converged; the result's `status` names the remedy.

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
        best = _best(closed_form.values, k, which)
        values, vectors = closed_form.values[best], closed_form.vectors[:, best].to_dense()
        return EigenPairs(values, vectors, torch.zeros_like(values), 0, True, "exact")
    with Products(A, progress=progress, label=f"eigsh ({method})") as P:
        if n <= max(_SMALL, 2 * k) and max_matvecs >= n:
            result = _dense(P, k, which)
        elif method == "power":
            result = _subspace_iteration(P, k, which, tol, max_matvecs, generator)
        elif method == "arpack":
            result = _arpack(P, k, which, tol, max_matvecs, generator)
        else:
            result = _lanczos(P, k, which, tol, max_matvecs, generator)
    if not result.converged:
        warnings.warn(result.status, RuntimeWarning, stacklevel=2)
    return result


def _select(
    values: Tensor, vectors: Tensor, residuals: Tensor, k: int, which: str
) -> tuple[Tensor, Tensor, Tensor]:
    best = _best(values, k, which)
    return values[best], vectors[:, best], residuals[best]


def _best(values: Tensor, k: int, which: str) -> Tensor:
    """Where the k most wanted eigenvalues are, by descending value."""
    best = order(values, which).argsort(descending=True, stable=True)[:k]
    return best[values[best].argsort(descending=True, stable=True)]


def _dense(products: Products, k: int, which: str) -> EigenPairs:
    A = products.operator
    matrix = torch.cat([columns for _, columns in products.columns()], dim=1)
    _check_symmetric(A, matrix, float(matrix.norm(dim=0).max()))
    values, vectors = eigh((matrix + matrix.T) / 2, "the operator")
    residuals = (matrix @ vectors - vectors * values).norm(dim=0)
    return EigenPairs(
        *_select(values, vectors, residuals, k, which), products.count, True, "converged"
    )


def _check_symmetric(A: LinearOperator, projection: Tensor, scale: float) -> None:
    deviation = float((projection - projection.T).abs().max())
    if deviation > asymmetry_tolerance(A.dtype) * scale:
        raise asymmetry_error(A, deviation, scale)


def _lanczos(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    A = products.operator
    size = capacity(A.shape[0], k, A.dtype.itemsize)
    basis = KrylovBasis(A, products, A.shape[0], size, generator)
    return _search(basis, products, k, which, tol, max_matvecs)


def _search(
    basis: KrylovBasis,
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    inside: tuple[float, ...] = (),
) -> EigenPairs:
    n, limit = basis.vectors.shape[1], max_matvecs
    if basis.capacity == n and products.count + 2 * n <= max_matvecs:
        # Where all columns fit, multiplying them out is the better way to end a long search.
        limit = products.count + n
    result = search(basis, products, k=k, which=which, tol=tol, max_matvecs=limit, inside=inside)
    if limit < max_matvecs and not result.was_verified:
        return _dense(products, k, which)
    status = "converged"
    if not result.has_converged:
        status = _unconverged(result.pairs, k, result.goal, products.count)
    elif not result.was_verified:
        last = float(order(result.pairs.values[:k], which).min())
        beyond = {"largest": "above", "smallest": "below", "magnitude": "of magnitude above"}[which]
        status = (
            f"converged, but `max_matvecs` = {max_matvecs} ended the search for what they may have "
            f"missed, a further copy of a multiple eigenvalue or another one {beyond} "
            f"{-last if which == 'smallest' else last:.4g}: that there is none is not verified; "
            "raise it to be sure"
        )
    pairs, device = result.pairs, basis.vectors.device
    rotation = pairs.combinations[:, :k].to(basis.vectors)
    values, residuals = (part[:k].to(basis.vectors) for part in (pairs.values, pairs.residuals))
    selected = _select(values, basis.vectors.T @ rotation, residuals.to(device), k, which)
    return EigenPairs(*selected, products.count, result.has_converged, status)


def _unconverged(pairs: RitzPairs, k: int, goal: float, count: int) -> str:
    done = int((pairs.residuals[:k] <= goal).sum())
    return (
        f"{done} of {k} eigenpairs converged in {count} products (greatest residual "
        f"{float(pairs.residuals[:k].max()):.3g}, expected {goal:.3g}): raise `max_matvecs` or "
        "`tol`, or ask for fewer pairs"
    )


def _arpack(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    # SciPy's sparse module takes longer to import than the rest of this package.
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence
    from scipy.sparse.linalg import LinearOperator as SciPyOperator
    from scipy.sparse.linalg import eigsh as arpack

    A, n = products.operator, products.operator.shape[0]
    num_vectors = min(n, max(2 * k + 1, k + 40))
    restarts = (max_matvecs - _BOUND_STEPS - num_vectors) // (num_vectors - k)
    if restarts < 1:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs}; expected at least "
            f"{_BOUND_STEPS + 2 * num_vectors - k}: ARPACK holds {num_vectors} vectors for {k} "
            "pairs. Raise it, or use method='lanczos'."
        )
    # ARPACK's tolerance is relative to each eigenvalue, so that those near zero never converge.
    # Shifted by the unwanted end of the spectrum, the wanted ones are the largest.
    shift = 0.0 if which == "magnitude" else _far_end(products, which, generator)
    scale = 0.0

    def multiply(vector: np.ndarray) -> np.ndarray:
        nonlocal scale
        column = torch.from_numpy(vector.ravel()).to(A.device, A.dtype)
        product = products(column)
        scale = max(scale, float(product.norm() / column.norm()))
        return (product - shift * column).cpu().numpy()

    start = draw(A, 1, "gaussian", generator)[:, 0].cpu().numpy()
    try:
        _, vectors = arpack(
            SciPyOperator((n, n), matvec=multiply, dtype=start.dtype),
            k=k,
            which={"largest": "LA", "smallest": "SA", "magnitude": "LM"}[which],
            v0=start,
            ncv=num_vectors,
            maxiter=restarts,
            tol=tol,
        )
    except ArpackNoConvergence as error:
        found = torch.from_numpy(np.ascontiguousarray(error.eigenvectors)).to(A.device, A.dtype)
        return _partial(products, found, k, which)
    except ArpackError:
        # It refuses operators that map its start to zero, such as multiples of the identity.
        return _lanczos(products, k, which, tol, max_matvecs, generator)
    found = torch.linalg.qr(torch.from_numpy(vectors.copy()).to(A.device, A.dtype)).Q
    basis = KrylovBasis(A, products, n, capacity(n, k, A.dtype.itemsize), generator)
    basis.seed(found.T, products(found).T, scale)
    return _search(basis, products, k, which, tol, max_matvecs, (shift,))


def _partial(products: Products, vectors: Tensor, k: int, which: str) -> EigenPairs:
    """What ARPACK had when it gave up."""
    count = vectors.shape[1]
    status = (
        f"{count} of {k} eigenpairs converged in {products.count} products, only these are given: "
        "raise `max_matvecs` or `tol`, or use method='lanczos', which holds more vectors"
    )
    images = products(vectors) if count else vectors
    values = (vectors * images).sum(dim=0)
    residuals = (images - vectors * values).norm(dim=0)
    selected = _select(values, vectors, residuals, count, which)
    return EigenPairs(*selected, products.count, False, status)


def _subspace_iteration(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    A, n = products.operator, products.operator.shape[0]
    width = min(n, k + max(k, 10))
    if max_matvecs < width + _BOUND_STEPS:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs}; expected at least {width + _BOUND_STEPS}: the block "
            f"has {width} vectors for {k} pairs. Raise it, or use method='lanczos'."
        )
    shift = 0.0 if which == "magnitude" else _far_end(products, which, generator)
    block = torch.linalg.qr(draw(A, width, "gaussian", generator)).Q
    rounding = 10 * torch.finfo(A.dtype).eps
    # The block may hold none of the largest eigenvalues, to which the tolerance is relative.
    scale = abs(shift)
    while True:
        images = products(block)
        projection = block.T @ images
        scale = max(scale, float(images.norm(dim=0).max()))
        _check_symmetric(A, projection, scale)
        values, rotation = eigh((projection + projection.T) / 2, "the projected operator")
        block, images = block @ rotation, images @ rotation
        residuals = (images - block * values).norm(dim=0)
        selected = _select(values, block, residuals, k, which)
        goal = max(tol, rounding) * max(scale, float(values.abs().max()))
        if (selected[2] <= goal).all():
            return EigenPairs(*selected, products.count, True, "converged")
        if products.count + width > max_matvecs:
            done = int((selected[2] <= goal).sum())
            status = (
                f"{done} of {k} eigenpairs converged in {products.count} products (greatest "
                f"residual {float(selected[2].max()):.3g}, expected {goal:.3g}): raise "
                "`max_matvecs` or `tol`, or use method='lanczos', which converges faster"
            )
            return EigenPairs(*selected, products.count, False, status)
        block = torch.linalg.qr(images - shift * block).Q


def _far_end(products: Products, which: str, generator: torch.Generator | None) -> float:
    """A bound of the unwanted end of the spectrum: from there the wanted end is the largest."""
    A, n = products.operator, products.operator.shape[0]
    basis = KrylovBasis(A, products, n, min(n, _BOUND_STEPS), generator)
    basis.add_random()
    for _ in range(basis.capacity):
        if not basis.expand(0):
            break
    unwanted = "smallest" if which == "largest" else "largest"
    pairs = ritz_pairs(basis, unwanted)
    end, error = float(pairs.values[0]), float(pairs.residuals[0])
    return end + math.copysign(error, 1 if unwanted == "largest" else -1)
