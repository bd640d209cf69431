"""Extreme eigenpairs by thick-restart Lanczos."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laplace_debias.linalg.eigen.completeness import CompletenessCheck
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.eigen.ritz import RitzPairs, order, ritz_pairs
from laplace_debias.linalg.products import Products
from laplace_debias.operators.eigh import eigh

_BASIS_BYTES = 2**31


@dataclass(frozen=True)
class SearchResult:
    """Ritz pairs, the wanted first; whether they converged; whether the rest was searched.

    `goal` is what their residuals were to be at most.
    """

    pairs: RitzPairs
    goal: float
    has_converged: bool
    was_verified: bool


def capacity(n: int, k: int, bytes_per_entry: int) -> int:
    """How many vectors the basis of a search for k eigenpairs holds: many save products."""
    wanted = max(4 * k, 256)
    affordable = _BASIS_BYTES // (n * bytes_per_entry)
    return min(n, max(k + 20, 2 * k, min(wanted, affordable)))


def search(
    basis: KrylovBasis,
    products: Products,
    *,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    inside: Sequence[float] = (),
    verify: bool = True,
) -> SearchResult:
    r"""Expands a basis until its k most wanted Ritz pairs have converged.

    A single Krylov sequence finds one vector of each eigenspace. So once all pairs have converged,
    a random direction orthogonal to them starts another sequence in the same basis. If an
    eigenvalue among the wanted was missed, this sequence finds it, and the search goes on.
    Otherwise the sequence ends as soon as that is sure enough. This also guards the order of the
    pairs: pairs that converged to a loose tolerance need not be the most wanted ones.

    Args:
        basis: Where to begin: empty, or invariant with at least k rows.
        products: The products, counted.
        k: How many pairs.
        which: `"largest"`, `"smallest"` or `"magnitude"`.
        tol: Greatest residual norm, relative to the greatest |Ritz value|; not below rounding.
        max_matvecs: Where to give up, in products.
        inside: Numbers that are known to lie within the spectrum, or at most just outside.
        verify: Whether to look for missed copies.

    Returns:
        The Ritz pairs, whether they have converged, and whether it is sure that none was missed.
    """
    check: CompletenessCheck | None = None
    was_checked = False
    pairs: RitzPairs | None = None
    rounding = 10 * torch.finfo(basis.vectors.dtype).eps
    low, high = min(inside, default=math.inf), max(inside, default=-math.inf)
    while True:
        if basis.size >= k:
            pairs = ritz_pairs(basis, which)
            # The basis may have dropped the ends of the spectrum.
            low, high = min(low, float(pairs.values.min())), max(high, float(pairs.values.max()))
            scale = max(basis.scale, abs(low), abs(high))
            goal = max(tol, rounding) * scale
            has_converged = bool((pairs.residuals[:k] <= goal).all())
            if not has_converged or (check is not None and check.has_found(goal)):
                check = None
            aim = goal
            if verify and not was_checked:
                aim = max(rounding * scale, _resolving(pairs, k, which, goal))
            is_settled = bool((pairs.residuals[:k] <= aim).all())
            is_stuck = bool((pairs.pending_residuals[:k] <= aim).all())
            if not is_settled and is_stuck and products.count + k <= max_matvecs:
                basis.rotate(pairs.combinations[:, :k])
                basis.refresh()
                continue
            if has_converged and check is not None and check.has_missed_nothing(low, high, goal):
                return SearchResult(pairs, goal, has_converged=True, was_verified=True)
            is_complete = basis.size == basis.vectors.shape[1]
            if has_converged and check is None and (is_settled or is_complete):
                if is_complete or not verify:
                    return SearchResult(pairs, goal, has_converged=True, was_verified=is_complete)
                check, was_checked = CompletenessCheck(basis, pairs, k, which), True
                if not basis.add_random():
                    pairs = ritz_pairs(basis, which)
                    return SearchResult(pairs, goal, has_converged=True, was_verified=True)
            if products.count >= max_matvecs:
                return SearchResult(
                    ritz_pairs(basis, which), goal, has_converged, was_verified=False
                )
        if basis.size == basis.capacity:
            _make_room(basis, which, k, check.start if check else 0)
            if check is not None:
                check.has_restarted = True
            pairs = None
        _expand(basis, products, pairs, k, max_matvecs, check)


def _resolving(pairs: RitzPairs, k: int, which: str, goal: float) -> float:
    """What residuals should come to, at least `goal` / 10, so that a check is worth it.

    Where eigenvalues lie closer than residuals are small, the wanted are not yet those further out,
    so that the check finds others. It then costs more to go back than to have gone on.
    """
    ordered = order(pairs.values[:k], which)
    half = k // 2
    if half == k - 1:
        return goal
    spacing = float(ordered[half] - ordered[-1]) / (k - 1 - half)
    return max(goal / 10, min(goal, spacing))


def _make_room(basis: KrylovBasis, which: str, k: int, start: int) -> None:
    """Keeps the best Ritz vectors of all rows, or of those from `start` on: a thick restart."""
    values, combinations = eigh(basis.projected[start:, start:], "the projected operator")
    best = order(values, which).argsort(descending=True, stable=True)
    least = 1 if start else k
    basis.rotate(combinations[:, best[: (len(values) + least) // 2]], start)


def _expand(
    basis: KrylovBasis,
    products: Products,
    pairs: RitzPairs | None,
    k: int,
    max_matvecs: int,
    check: CompletenessCheck | None,
) -> None:
    """Follows one sequence for a few products: more, the longer it is to look at the basis."""
    length = basis.size - check.start if check else basis.size
    index = len(basis.coupling) - 1
    if check is None and pairs is not None and len(basis.coupling) > 1:
        # The sequence that the worst of the wanted pairs needs most.
        worst = int(pairs.residuals[:k].argmax())
        index = int((basis.coupling @ pairs.combinations[:, worst]).abs().argmax())
    for _ in range(1 + length // 10):
        if basis.size == basis.capacity or products.count >= max_matvecs:
            return
        if not len(basis.coupling):
            basis.add_random()
            index = 0
        has_grown = basis.expand(index)
        if check is not None:
            check.steps += 1
            check.is_exhausted = not has_grown
        if not has_grown:
            return
        index = len(basis.coupling) - 1
