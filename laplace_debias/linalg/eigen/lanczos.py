"""Extreme eigenpairs by thick-restart Lanczos, and a check that no eigenpair was missed."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.linalg.eigen.krylov import KrylovBasis, RitzPairs, order, ritz_pairs
from laplace_debias.linalg.products import Products
from laplace_debias.operators.eigh import eigh

_BASIS_BYTES = 2**31

_MISS = 1e-4
"""The probability with which each bound of `has_missed_nothing` may overlook an eigenvalue."""

_OVERLAP = 0.1
"""The largest overlap that vectors kept apart during a check may have with a missed eigenvector."""


class CompletenessCheck:
    """A Krylov sequence in the complement of the converged pairs, which detects missed pairs.

    The constructor reduces the basis to the converged pairs. `search` then expands the sequence,
    from a random start, and keeps these attributes up to date.

    Attributes:
        start: Index of the sequence's first row in the basis; the converged pairs are the rows
            before it.
        steps: Number of products by which the sequence was expanded.
        is_exhausted: Whether the sequence spans an invariant subspace, so it cannot grow further.
        has_restarted: Whether the sequence was reduced to its best Ritz vectors.
    """

    def __init__(self, basis: KrylovBasis, pairs: RitzPairs, k: int, end: str) -> None:
        num_kept_apart = k + _num_kept(pairs, basis, k, end)
        basis.rotate(pairs.combinations[:, :num_kept_apart])
        basis.park()
        self._basis = basis
        self._end = end
        # The sort key (see `order`) of the last requested eigenvalue.
        self._last_key = float(order(pairs.values[k - 1], end))
        self.start = basis.size
        self.steps = 0
        self.is_exhausted = False
        self.has_restarted = False

    def has_found(self, goal: float) -> bool:
        """Whether the sequence contains a Ritz value beyond the last requested eigenvalue."""
        values, _ = _decompose(self._basis, self.start)
        return bool((order(values, self._end) > self._last_key + goal).any())

    def has_missed_nothing(self, low: float, high: float, goal: float) -> bool:
        r"""Whether no eigenvalue of the complement exceeds the requested ones by more than `goal`.

        This is certain if the sequence has exhausted the operator. Otherwise, it follows from
        either of two bounds, each of which fails with a probability of at most `_MISS`. In both, n
        is the number of columns, and δ is `goal` plus the gap between the last requested eigenvalue
        and the sequence's best value θ.

        - A priori: after j steps from a random start, the largest eigenvalue of a positive
          semi-definite operator is underestimated by more than a factor $1 - \varepsilon$ with a
          probability of at most $1.648 \sqrt n\, e^{-\sqrt\varepsilon (2j - 1)}$. The operator is
          shifted to be positive, so ε is δ divided by the distance of the last requested eigenvalue
          from the other end of the spectrum, `low` or `high`. If δ is large, a few steps are enough
          to satisfy this bound.
        - A posteriori: the start has an inner product of $\eta / \sqrt n$ with a missed
          eigenvector, where η is below `_MISS` with a probability below `_MISS`. The Ritz vector is
          a polynomial of the operator times the start, and the roots of the polynomial are the
          other Ritz values. So the Ritz vector's inner product with an eigenvector beyond θ exceeds
          the start's inner product with this eigenvector by a factor of at least $1 / s$, where s
          is the inner product of the Ritz vector and the start. The residual of the Ritz vector is
          then at least $\delta \eta / (s \sqrt n)$. This bound is satisfied soon after the sequence
          has converged. (After a restart, the start is no longer in the basis, so s is replaced by
          1.)

        A small residual by itself proves nothing: if n is large, even the start can have a small
        residual, although it is nearly orthogonal to eigenvectors of large eigenvalues.

        Reference:
            Kuczyński, Woźniakowski. Estimating the largest eigenvalue by the power and Lanczos
            algorithms with a random start. SIAM Journal on Matrix Analysis and Applications, 1992.
        """
        if self.is_exhausted:
            return True
        n = self._basis.vectors.shape[1]
        values, combinations = _decompose(self._basis, self.start)
        residuals = (self._basis.coupling[:, self.start :] @ combinations).norm(dim=0)
        overlaps = combinations[0].abs()
        if self.has_restarted:
            overlaps = torch.ones_like(values)
        limit = self._last_key + goal
        # Computed residuals do not fall below this value, because of rounding errors.
        rounding = 10 * torch.finfo(values.dtype).eps * self._basis.scale

        def is_sure(gap: float, width: float, best: int) -> bool:
            """Whether a missed eigenvalue is sufficiently improbable on one side of the spectrum.

            `gap` is δ, `width` the distance to the other end of the spectrum, and `best` the index
            of θ.
            """
            if gap <= 0:
                return False
            epsilon = 1.0
            if width > 0:
                epsilon = min(1.0, gap / width)
            exponent = math.sqrt(epsilon) * (2 * self.steps - 1)
            if math.log(1.648 * n**0.5) - exponent <= math.log(_MISS):
                return True
            residual = float(residuals[best])
            overlap = float(overlaps[best])
            return residual <= rounding or residual * overlap <= gap * _MISS / n**0.5

        # For "magnitude", eigenvalues can be missed on both sides: above `limit` and below
        # `-limit`.
        if self._end != "smallest" and not is_sure(
            gap=limit - float(values[-1]), width=limit - low, best=-1
        ):
            return False
        return self._end == "largest" or is_sure(
            gap=limit + float(values[0]), width=limit + high, best=0
        )


def _decompose(basis: KrylovBasis, start: int) -> tuple[Tensor, Tensor]:
    """Decompose the projected operator on the rows from `start` on, in ascending order."""
    return eigh(basis.projected[start:, start:], "the projected operator")


def _num_kept(pairs: RitzPairs, basis: KrylovBasis, k: int, end: str) -> int:
    r"""Return how many pairs after the requested ones can also be kept apart during a check.

    Keeping these pairs apart shortens the check, because the remaining eigenvalues are then further
    away. However, their vectors must not contain parts of a missed eigenvector. A Ritz vector of
    value θ and residual r has an inner product of at most $r / |\lambda_k - \theta|$ with a missed
    eigenvector whose eigenvalue is among the requested ones.
    """
    ordered = order(pairs.values, end)
    distance = (ordered[k - 1] - ordered[k:]).clamp(min=torch.finfo(torch.float64).tiny)
    overlaps = ((pairs.residuals[k:] / distance) ** 2).cumsum(dim=0).sqrt()
    return min(int((overlaps <= _OVERLAP).sum()), (basis.capacity - k) // 3)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for eigenpairs.

    Attributes:
        pairs: The Ritz pairs, the requested pairs first.
        goal: The residual norm up to which a pair counts as converged.
        has_converged: Whether the requested pairs have converged.
        was_verified: Whether the check that no pair was missed was completed.
    """

    pairs: RitzPairs
    goal: float
    has_converged: bool
    was_verified: bool


def capacity(n: int, k: int, bytes_per_entry: int) -> int:
    """Choose the basis size for a search for k eigenpairs; a larger basis saves products."""
    useful = max(4 * k, 256)
    affordable = _BASIS_BYTES // (n * bytes_per_entry)
    return min(n, max(k + 20, 2 * k, min(useful, affordable)))


def search(
    basis: KrylovBasis,
    products: Products,
    *,
    k: int,
    end: str,
    tol: float,
    max_matvecs: int,
    verify: bool = True,
) -> SearchResult:
    r"""Expand a basis until its k Ritz pairs at an end of the spectrum have converged.

    A single Krylov sequence contains only one vector of each eigenspace. Therefore, once all pairs
    have converged, another sequence is started in the same basis, from a random direction
    orthogonal to them. If a requested eigenvalue was missed, it appears in this sequence, and the
    search continues. Otherwise, the sequence ends as soon as this is certain enough. The check also
    ensures that the pairs are the outermost ones, which is not guaranteed if the tolerance is
    loose.

    Every round decomposes the projected operator, drops a check that has found a missed eigenvalue,
    refreshes the basis if its residuals are stuck, begins a check or returns the result, and
    expands the basis otherwise.

    Args:
        basis: The basis, which is expanded in place.
        products: The products with the operator, which count them.
        k: Number of pairs.
        end: `"largest"`, `"smallest"` or `"magnitude"`.
        tol: Largest residual of a converged pair, relative to the largest absolute eigenvalue.
        max_matvecs: Number of products at which the search ends.
        verify: Whether to check that no pair was missed.
    """
    rounding = 10 * torch.finfo(basis.vectors.dtype).eps
    low = math.inf
    high = -math.inf
    check: CompletenessCheck | None = None
    was_checked = False
    while basis.size < k:
        _expand(basis, products, None, None, k=k, max_matvecs=max_matvecs)
    while True:
        pairs = ritz_pairs(basis, end)
        residuals = pairs.residuals[:k]
        # Remember the earlier extremes, because a restart may drop the ends of the spectrum.
        low = min(low, float(pairs.values.min()))
        high = max(high, float(pairs.values.max()))
        scale = max(basis.scale, abs(low), abs(high))
        goal = max(tol, rounding) * scale
        has_converged = bool((residuals <= goal).all())
        if not has_converged or (check is not None and check.has_found(goal)):
            check = None

        # Begin the first check when the residuals are below `aim`, which can be stricter than the
        # goal.
        aim = goal
        if verify and not was_checked:
            aim = max(rounding * scale, _resolving_residual(pairs, k, end, goal))
        is_settled = bool((residuals <= aim).all())
        is_stuck = bool((pairs.pending_residuals[:k] <= aim).all())
        # Expanding the basis reduces only the pending part of the residuals. If the parked part is
        # too large, recompute the residuals.
        if not is_settled and is_stuck and products.count + k <= max_matvecs:
            basis.rotate(pairs.combinations[:, :k])
            basis.refresh()
            continue

        if check is not None:
            if check.has_missed_nothing(low, high, goal):
                return SearchResult(pairs, goal, has_converged=True, was_verified=True)
        elif has_converged:
            is_complete = basis.size == basis.vectors.shape[1]
            if is_complete or not verify:
                return SearchResult(pairs, goal, has_converged=True, was_verified=is_complete)
            if is_settled:
                check = CompletenessCheck(basis, pairs, k, end)
                was_checked = True
        if products.count >= max_matvecs:
            return SearchResult(ritz_pairs(basis, end), goal, has_converged, was_verified=False)

        if basis.size < basis.capacity:
            _expand(basis, products, pairs, check, k=k, max_matvecs=max_matvecs)
        else:
            # A restart changes the rows, so the pairs computed before it cannot be used in
            # `_expand`.
            _make_room(basis, end, k, check)
            _expand(basis, products, None, check, k=k, max_matvecs=max_matvecs)


def _resolving_residual(pairs: RitzPairs, k: int, end: str, goal: float) -> float:
    """Return the residual norm, at least `goal` / 10, below which a check is worthwhile.

    If the gaps between eigenvalues are smaller than the residuals, the pairs may not be the
    outermost ones yet, so the check would find others. Resuming the search then costs more than
    expanding the basis further before the check.
    """
    ordered = order(pairs.values[:k], end)
    # The gaps are averaged over the last half of the pairs, which converge last.
    half = k // 2
    if half == k - 1:
        return goal
    spacing = float(ordered[half] - ordered[-1]) / (k - 1 - half)
    return max(goal / 10, min(goal, spacing))


def _make_room(basis: KrylovBasis, end: str, k: int, check: CompletenessCheck | None) -> None:
    """Do a thick restart, which keeps the best Ritz vectors of the current sequence."""
    start = 0
    least = k
    if check is not None:
        check.has_restarted = True
        start = check.start
        least = 1
    values, combinations = _decompose(basis, start)
    best = order(values, end).argsort(descending=True, stable=True)
    basis.rotate(combinations[:, best[: (len(values) + least) // 2]], start)


def _expand(
    basis: KrylovBasis,
    products: Products,
    pairs: RitzPairs | None,
    check: CompletenessCheck | None,
    *,
    k: int,
    max_matvecs: int,
) -> None:
    """Expand one sequence by a few products, or by more if decomposing the basis takes longer.

    The sequence is that of the check, if there is one. Otherwise, `pairs` determines the sequence;
    it is the last one if `pairs` is None.
    """
    length = basis.size
    if check is not None:
        length = basis.size - check.start
    index = len(basis.coupling) - 1
    if check is None and pairs is not None and len(basis.coupling) > 1:
        # Expand the sequence that contributes most to the residual of the least accurate requested
        # pair.
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
