"""Eigenpairs from a Lanczos search, or from the operator multiplied out."""

import math

import torch
from torch import Tensor

from laplace_debias.linalg.checks import asymmetry_error, asymmetry_tolerance
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.eigen.lanczos import capacity, search
from laplace_debias.linalg.eigen.ritz import RitzPairs, order, ritz_pairs
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh

BOUND_STEPS = 12
"""Lanczos steps that bound the spectrum for the shift of subspace iteration."""


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
    check_symmetric(A, matrix, float(matrix.norm(dim=0).max()))
    values, vectors = eigh((matrix + matrix.T) / 2, "the operator")
    residuals = (matrix @ vectors - vectors * values).norm(dim=0)
    selected = select(values, vectors, residuals, k, which)
    return EigenPairs(*selected, products.count, Status.CONVERGED, "converged")


def check_symmetric(A: LinearOperator, projection: Tensor, scale: float) -> None:
    """Checks that a projection of the operator is symmetric.

    Raises:
        ValueError: Otherwise.
    """
    deviation = float((projection - projection.T).abs().max())
    if deviation > asymmetry_tolerance(A.dtype) * scale:
        raise asymmetry_error(A, deviation, scale)


def lanczos_eigenpairs(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs by thick-restart Lanczos from a random start."""
    A = products.operator
    size = capacity(A.shape[0], k, A.dtype.itemsize)
    basis = KrylovBasis(A, products, A.shape[0], size, generator)
    return searched_eigenpairs(basis, products, k, which, tol, max_matvecs)


def searched_eigenpairs(
    basis: KrylovBasis,
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    inside: tuple[float, ...] = (),
) -> EigenPairs:
    """Eigenpairs by thick-restart Lanczos from a basis that may hold some already."""
    n, limit = basis.vectors.shape[1], max_matvecs
    if basis.capacity == n and products.count + 2 * n <= max_matvecs:
        # Where all columns fit, multiplying them out is the better way to end a long search.
        limit = products.count + n
    result = search(basis, products, k=k, which=which, tol=tol, max_matvecs=limit, inside=inside)
    if limit < max_matvecs and not result.was_verified:
        return dense_eigenpairs(products, k, which)
    status, message = Status.CONVERGED, "converged"
    if not result.has_converged:
        status = Status.MAX_ITER
        message = _unconverged(result.pairs, k, result.goal, products.count)
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


def _unconverged(pairs: RitzPairs, k: int, goal: float, count: int) -> str:
    done = int((pairs.residuals[:k] <= goal).sum())
    return (
        f"{done} of {k} eigenpairs converged in {count} products (greatest residual "
        f"{float(pairs.residuals[:k].max()):.3g}, expected {goal:.3g}): raise `max_matvecs` or "
        "`tol`, or ask for fewer pairs"
    )


def far_end(products: Products, which: str, generator: torch.Generator | None) -> float:
    """A bound of the unwanted end of the spectrum: from there the wanted end is the largest."""
    A, n = products.operator, products.operator.shape[0]
    basis = KrylovBasis(A, products, n, min(n, BOUND_STEPS), generator)
    basis.add_random()
    for _ in range(basis.capacity):
        if not basis.expand(0):
            break
    unwanted = "smallest" if which == "largest" else "largest"
    pairs = ritz_pairs(basis, unwanted)
    end, error = float(pairs.values[0]), float(pairs.residuals[0])
    return end + math.copysign(error, 1 if unwanted == "largest" else -1)
