"""Eigenpairs by Lanczos, ARPACK, subspace iteration, or from the operator multiplied out."""

import math

import numpy as np
import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_symmetric
from laplace_debias.linalg.eigen.krylov import KrylovBasis, order, ritz_pairs
from laplace_debias.linalg.eigen.lanczos import capacity, search
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status
from laplace_debias.operators.eigh import eigh

_BOUND_STEPS = 12
"""Lanczos steps that bound the spectrum for the shift of ARPACK and subspace iteration."""


def select(
    values: Tensor, vectors: Tensor, residuals: Tensor, k: int, which: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The k most wanted pairs with their residuals, by descending value."""
    chosen = best(values, k, which)
    return values[chosen], vectors[:, chosen], residuals[chosen]


def best(values: Tensor, k: int, which: str) -> Tensor:
    """Where the k most wanted eigenvalues are, by descending value."""
    wanted = order(values, which).argsort(descending=True, stable=True)[:k]
    return wanted[values[wanted].argsort(descending=True, stable=True)]


def dense_eigenpairs(products: Products, k: int, which: str) -> EigenPairs:
    """All eigenpairs from the operator multiplied out, of which the k most wanted."""
    A = products.operator
    matrix = torch.cat([columns for _, columns in products.columns()], dim=1)
    check_symmetric(A, (matrix - matrix.T).abs(), float(matrix.norm(dim=0).max()))
    values, vectors = eigh((matrix + matrix.T) / 2, "the operator")
    residuals = (matrix @ vectors - vectors * values).norm(dim=0)
    selected = select(values, vectors, residuals, k, which)
    return EigenPairs(*selected, products.count, Status.CONVERGED, "converged")


def lanczos_eigenpairs(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs by thick-restart Lanczos from a random start."""
    A, n, limit = products.operator, products.operator.shape[0], max_matvecs
    basis = KrylovBasis(A, products, n, capacity(n, k, A.dtype.itemsize), generator)
    if basis.capacity == n and 2 * n <= max_matvecs:
        # Where all columns fit, multiplying them out is the better way to end a long search.
        limit = n
    result = search(basis, products, k=k, which=which, tol=tol, max_matvecs=limit)
    if limit < max_matvecs and not result.was_verified:
        return dense_eigenpairs(products, k, which)
    status, message = Status.CONVERGED, "converged"
    if not result.has_converged:
        status = Status.MAX_ITER
        message = _unconverged(result.pairs.residuals[:k], result.goal, products.count)
    elif not result.was_verified:
        last = float(order(result.pairs.values[:k], which).min())
        beyond = {"largest": "above", "smallest": "below", "magnitude": "of magnitude above"}[which]
        status = Status.UNVERIFIED
        message = (
            f"converged, but `max_matvecs` = {max_matvecs} ended the search for further pairs: a "
            f"further copy of a multiple eigenvalue, or another one {beyond} "
            f"{-last if which == 'smallest' else last:.4g}, is not verified to be absent; raise it "
            "to be sure"
        )
    pairs, device = result.pairs, basis.vectors.device
    rotation = pairs.combinations[:, :k].to(basis.vectors)
    values, residuals = (part[:k].to(basis.vectors) for part in (pairs.values, pairs.residuals))
    selected = select(values, basis.vectors.T @ rotation, residuals.to(device), k, which)
    return EigenPairs(*selected, products.count, status, message)


def _unconverged(residuals: Tensor, goal: float, count: int) -> str:
    done = int((residuals <= goal).sum())
    return (
        f"{done} of {len(residuals)} eigenpairs converged in {count} products (greatest residual "
        f"{float(residuals.max()):.3g}, expected {goal:.3g}): raise `max_matvecs` or `tol`, or ask "
        "for fewer pairs"
    )


def arpack_eigenpairs(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs by SciPy's ARPACK."""
    # Slow to import, and few need it.
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

    def multiply(vector: np.ndarray) -> np.ndarray:
        column = torch.from_numpy(vector.ravel()).to(A.device, A.dtype)
        return (products(column) - shift * column).cpu().numpy()

    start = draw(A, 1, "gaussian", generator)[:, 0].cpu().numpy()
    status, message = (
        Status.UNVERIFIED,
        "converged; ARPACK may have missed copies of an eigenvalue",
    )
    try:
        _, found = arpack(
            SciPyOperator((n, n), matvec=multiply, dtype=start.dtype),
            k=k,
            which={"largest": "LA", "smallest": "SA", "magnitude": "LM"}[which],
            v0=start,
            ncv=num_vectors,
            maxiter=restarts,
            tol=tol,
        )
    except ArpackNoConvergence as error:
        found, status = error.eigenvectors, Status.MAX_ITER
        message = (
            f"{found.shape[1]} of {k} eigenpairs converged in {products.count} products, only "
            "these are given: raise `max_matvecs` or `tol`, or use method='lanczos'"
        )
    except ArpackError:
        # It refuses operators that map its start to zero, such as multiples of the identity.
        return lanczos_eigenpairs(products, k, which, tol, max_matvecs, generator)
    vectors = torch.from_numpy(np.ascontiguousarray(found)).to(A.device, A.dtype)
    images = products(vectors) if vectors.shape[1] else vectors
    values = (vectors * images).sum(dim=0)
    residuals = (images - vectors * values).norm(dim=0)
    selected = select(values, vectors, residuals, k, which)
    return EigenPairs(*selected, products.count, status, message)


def subspace_iteration(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs from products with a block, with a Rayleigh–Ritz step after each."""
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
        check_symmetric(A, (projection - projection.T).abs(), scale)
        values, rotation = eigh((projection + projection.T) / 2, "the projected operator")
        block, images = block @ rotation, images @ rotation
        residuals = (images - block * values).norm(dim=0)
        selected = select(values, block, residuals, k, which)
        goal = max(tol, rounding) * max(scale, float(values.abs().max()))
        if (selected[2] <= goal).all():
            return EigenPairs(*selected, products.count, Status.CONVERGED, "converged")
        if products.count + width > max_matvecs:
            message = _unconverged(selected[2], goal, products.count)
            return EigenPairs(*selected, products.count, Status.MAX_ITER, message)
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
