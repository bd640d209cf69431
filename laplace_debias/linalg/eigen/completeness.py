"""A check that a Lanczos search has missed no eigenvalue."""

import math

import torch

from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.eigen.ritz import RitzPairs, order
from laplace_debias.operators.eigh import eigh, eigvalsh

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
        values = eigvalsh(
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
        if self._basis.size == self.start:
            return False
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
