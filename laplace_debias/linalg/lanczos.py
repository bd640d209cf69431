"""Extreme eigenpairs by thick-restart Lanczos, with a search for copies that it has missed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.linalg.krylov import KrylovBasis
from laplace_debias.linalg.products import Products

_MISS = 1e-4
"""Probability at most of overlooking an eigenvalue, see `_Check.has_missed_nothing`."""

_BASIS_BYTES = 2**31

_OVERLAP = 0.1
"""How much of a missed eigenvector the vectors that are kept for a check may hide."""


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs in a basis, best first: values, combinations of rows, residuals.

    `pending_residuals` is the part of the residuals that expanding the basis can lessen.
    """

    values: Tensor
    combinations: Tensor
    residuals: Tensor
    pending_residuals: Tensor


@dataclass(frozen=True)
class SearchResult:
    """Ritz pairs, the wanted first; whether they converged; whether copies were looked for.

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


def order(values: Tensor, which: str) -> Tensor:
    """How wanted eigenvalues are: the greatest first."""
    return {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]


def ritz_pairs(basis: KrylovBasis, which: str) -> RitzPairs:
    """The Ritz pairs of a basis, the most wanted first."""
    values, combinations = torch.linalg.eigh(basis.projected)
    best = order(values, which).argsort(descending=True, stable=True)
    values, combinations = values[best], combinations[:, best]
    return RitzPairs(values, combinations, *basis.residuals(combinations))


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

    A single Krylov sequence sees one vector of each eigenspace. So once all pairs have converged, a
    random direction orthogonal to them starts a sequence of its own in the same basis. If an
    eigenvalue among the wanted has been missed, it comes up there, and the search goes on; else the
    sequence ends as soon as that is sure enough.

    Args:
        basis: Where to begin: empty, or invariant with at least k rows.
        products: The books of products.
        k: How many pairs.
        which: `"largest"`, `"smallest"` or `"magnitude"`.
        tol: Greatest residual norm, relative to the greatest |Ritz value|; not below rounding.
        max_matvecs: Where to give up, in products.
        inside: Numbers that are known to lie within the spectrum, or at most just outside.
        verify: Whether to look for missed copies.

    Returns:
        The Ritz pairs, whether they have converged, and whether missed ones were looked for.
    """
    check: _Check | None = None
    pairs: RitzPairs | None = None
    rounding = 10 * torch.finfo(basis.vectors.dtype).eps
    low, high = min(inside, default=math.inf), max(inside, default=-math.inf)
    while True:
        if basis.size >= k:
            pairs = ritz_pairs(basis, which)
            # The basis may have dropped the ends of the spectrum.
            low, high = min(low, float(pairs.values.min())), max(high, float(pairs.values.max()))
            goal = max(tol, rounding) * max(basis.scale, abs(low), abs(high))
            has_converged = bool((pairs.residuals[:k] <= goal).all())
            if not has_converged or (check is not None and check.has_found(goal)):
                check = None
            is_stuck = bool((pairs.pending_residuals[:k] <= goal).all())
            if not has_converged and is_stuck and products.count + k <= max_matvecs:
                basis.rotate(pairs.combinations[:, :k])
                basis.refresh()
                continue
            if has_converged and check is not None and check.has_missed_nothing(low, high, goal):
                return SearchResult(pairs, goal, has_converged=True, was_verified=True)
            if has_converged and check is None:
                is_complete = basis.size == basis.vectors.shape[1]
                if is_complete or not verify:
                    return SearchResult(pairs, goal, has_converged=True, was_verified=is_complete)
                check = _Check(basis, pairs, k, which)
                if not basis.add_random():
                    pairs = ritz_pairs(basis, which)
                    return SearchResult(pairs, goal, has_converged=True, was_verified=True)
            if products.count >= max_matvecs:
                return SearchResult(
                    ritz_pairs(basis, which), goal, has_converged, was_verified=False
                )
        if basis.size == basis.capacity:
            _make_room(basis, which, k, check.start if check else 0)
            pairs = None
        _expand(basis, products, pairs, k, max_matvecs, check)


def _make_room(basis: KrylovBasis, which: str, k: int, start: int) -> None:
    """Keeps the best Ritz vectors of all rows, or of those from `start` on: a thick restart."""
    values, combinations = torch.linalg.eigh(basis.projected[start:, start:])
    best = order(values, which).argsort(descending=True, stable=True)
    least = 1 if start else k
    basis.rotate(combinations[:, best[: (len(values) + least) // 2]], start)


def _expand(
    basis: KrylovBasis,
    products: Products,
    pairs: RitzPairs | None,
    k: int,
    max_matvecs: int,
    check: "_Check | None",
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


def _num_kept(pairs: RitzPairs, basis: KrylovBasis, k: int, which: str) -> int:
    r"""How many pairs after the wanted may be kept apart from a check.

    They shorten it, as the rest of the spectrum lies further off. But a missed eigenvector must not
    hide in them: with one whose eigenvalue is among the wanted, a Ritz vector of value θ and
    residual r has an inner product of at most $r / |\lambda_k - \theta|$.
    """
    ordered = order(pairs.values, which)
    distance = (ordered[k - 1] - ordered[k:]).clamp(min=torch.finfo(torch.float64).tiny)
    overlaps = ((pairs.residuals[k:] / distance) ** 2).cumsum(dim=0).sqrt()
    return min(int((overlaps <= _OVERLAP).sum()), (basis.capacity - k) // 3)


class _Check:
    """A Krylov sequence in the complement of the pairs found, to see whether any was missed."""

    def __init__(self, basis: KrylovBasis, pairs: RitzPairs, k: int, which: str) -> None:
        basis.rotate(pairs.combinations[:, : k + _num_kept(pairs, basis, k, which)])
        basis.park()
        self._basis, self._which = basis, which
        self._last = float(order(pairs.values[k - 1], which))
        self.start = basis.size
        self.steps = 0
        self.is_exhausted = False

    def has_found(self, goal: float) -> bool:
        """Whether the sequence has come upon an eigenvalue beyond the last of the wanted."""
        values = torch.linalg.eigvalsh(self._basis.projected[self.start :, self.start :])
        return bool((order(values, self._which) > self._last + goal).any())

    def has_missed_nothing(self, low: float, high: float, goal: float) -> bool:
        r"""Whether no eigenvalue of the complement belongs to the most wanted.

        It is sure if the sequence has exhausted the operator, and if its best Ritz value has
        converged without coming among the wanted. Else by the bound of Kuczyński and Woźniakowski:
        from a random start, j steps leave the greatest eigenvalue of a positive semi-definite
        operator underestimated by more than a factor $1 - \varepsilon$ with probability at most
        $1.648 \sqrt n\, e^{-\sqrt\varepsilon (2j - 1)}$. Shifted to be positive, ε is the distance
        from the sequence's best value to the last of the wanted, over the distance of the latter
        from the spectrum's other end, `low` or `high`.

        Reference:
            Kuczyński, Woźniakowski. Estimating the largest eigenvalue by the power and Lanczos
            algorithms with a random start. SIAM Journal on Matrix Analysis and Applications, 1992.
        """
        if self.is_exhausted:
            return True
        if self._basis.size == self.start:
            return False
        values, combinations = torch.linalg.eigh(self._basis.projected[self.start :, self.start :])
        residuals = (self._basis.coupling[:, self.start :] @ combinations).norm(dim=0)
        if float(residuals[order(values, self._which).argmax()]) <= goal:
            return True
        last = self._last + goal
        above = (last - float(values.max()), last - low)
        below = (last + float(values.min()), last + high)
        sides = {"largest": [above], "smallest": [below], "magnitude": [above, below]}[self._which]
        n = self._basis.vectors.shape[1]
        exponent = min(
            math.sqrt(max(0.0, gap / width)) if width > 0 else 0.0 for gap, width in sides
        ) * (2 * self.steps - 1)
        return math.log(1.648 * n**0.5) - exponent <= math.log(_MISS)
