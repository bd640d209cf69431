"""Extreme eigenpairs by thick-restart Lanczos, with a check that none was missed."""

import math
from dataclasses import dataclass

import torch

from laplace_debias.linalg.eigen.krylov import KrylovBasis, RitzPairs, order, ritz_pairs
from laplace_debias.linalg.products import Products
from laplace_debias.operators.eigh import eigh

_BASIS_BYTES = 2**31

_MISS = 1e-4
"""Probability that either bound of `has_missed_nothing` overlooks an eigenvalue."""

_OVERLAP = 0.1
"""How much of a missed eigenvector the vectors that are kept for a check may hide."""


class CompletenessCheck:
    """A Krylov sequence in the complement of the pairs found, to see whether any was missed."""

    def __init__(self, basis: KrylovBasis, pairs: RitzPairs, k: int, which: str) -> None:
        basis.rotate(pairs.combinations[:, : k + _num_kept(pairs, basis, k, which)])
        basis.park()
        self._basis, self._which = basis, which
        self._last = float(order(pairs.values[k - 1], which))
        self.start = basis.size
        self.steps = 0
        self.is_exhausted = False
        self.has_restarted = False

    def has_found(self, goal: float) -> bool:
        """Whether the sequence has come upon an eigenvalue beyond the last of the wanted."""
        values, _ = eigh(
            self._basis.projected[self.start :, self.start :], "the projected operator"
        )
        return bool((order(values, self._which) > self._last + goal).any())

    def has_missed_nothing(self, low: float, high: float, goal: float) -> bool:
        r"""Whether no eigenvalue of the complement lies beyond the wanted by more than `goal`.

        It is sure if the sequence has exhausted the operator, and else by either of two bounds,
        which fail with probability `_MISS` at most. Both compare the sequence's best value θ to the
        last of the wanted, a gap of δ with `goal` included; n is the number of columns.

        - A priori: from a random start, j steps leave the greatest eigenvalue of a positive
          semi-definite operator underestimated by more than a factor $1 - \varepsilon$ with
          probability at most $1.648 \sqrt n\, e^{-\sqrt\varepsilon (2j - 1)}$. Shifted to be
          positive, ε is δ over the distance of the last of the wanted from the spectrum's other
          end, `low` or `high`. It is quick where δ is large.
        - A posteriori: the start has an inner product of $\eta / \sqrt n$ with a missed
          eigenvector, η below `_MISS` with a probability below `_MISS`. The Ritz vector is a
          polynomial of the operator times the start, with its roots at the other Ritz values, so
          its inner product with an eigenvector beyond θ is greater still, by a factor of one over
          its own inner product s with the start. Its residual is then at least
          $\delta \eta / (s \sqrt n)$. It is quick where the sequence has converged. (After a
          restart, the start is no longer in the basis, and s taken to be 1.)

        A small residual alone proves nothing: at large n that of the start itself is small, however
        large the eigenvalues that it hardly sees.

        Reference:
            Kuczyński, Woźniakowski. Estimating the largest eigenvalue by the power and Lanczos
            algorithms with a random start. SIAM Journal on Matrix Analysis and Applications, 1992.
        """
        if self.is_exhausted:
            return True
        n = self._basis.vectors.shape[1]
        values, combinations = eigh(
            self._basis.projected[self.start :, self.start :], "the projected operator"
        )
        residuals = (self._basis.coupling[:, self.start :] @ combinations).norm(dim=0)
        overlaps = torch.ones_like(values) if self.has_restarted else combinations[0].abs()
        last = self._last + goal
        # What computed residuals can go down to.
        rounding = 10 * torch.finfo(values.dtype).eps * self._basis.scale

        def is_sure(gap: float, width: float, best: int) -> bool:
            if gap <= 0:
                return False
            epsilon = min(1.0, gap / width) if width > 0 else 1.0
            exponent = math.sqrt(epsilon) * (2 * self.steps - 1)
            if math.log(1.648 * n**0.5) - exponent <= math.log(_MISS):
                return True
            residual, overlap = float(residuals[best]), float(overlaps[best])
            return residual <= rounding or residual * overlap <= gap * _MISS / n**0.5

        above = (last - float(values[-1]), last - low, -1)
        below = (last + float(values[0]), last + high, 0)
        sides = {"largest": [above], "smallest": [below], "magnitude": [above, below]}[self._which]
        return all(is_sure(*side) for side in sides)


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
    verify: bool = True,
) -> SearchResult:
    r"""Expands a basis until its k most wanted Ritz pairs have converged.

    A single Krylov sequence finds one vector of each eigenspace. So once all pairs have converged,
    a random direction orthogonal to them starts another sequence in the same basis. If an
    eigenvalue among the wanted was missed, this sequence finds it, and the search goes on.
    Otherwise the sequence ends as soon as that is sure enough. This also guards the order of the
    pairs: pairs that converged to a loose tolerance need not be the most wanted ones.
    """
    check: CompletenessCheck | None = None
    was_checked = False
    pairs: RitzPairs | None = None
    rounding = 10 * torch.finfo(basis.vectors.dtype).eps
    low, high = math.inf, -math.inf
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
                basis.add_random()
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
    """The size that residuals should come to, at least `goal` / 10, so that a check is worth it.

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
