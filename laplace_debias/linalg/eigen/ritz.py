"""Ritz pairs: approximate eigenpairs in a Krylov basis."""

from dataclasses import dataclass

from torch import Tensor

from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.operators.eigh import eigh


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs in a basis, best first: values, combinations of rows, residuals.

    `pending_residuals` is the part of the residuals that expanding the basis can lessen.
    """

    values: Tensor
    combinations: Tensor
    residuals: Tensor
    pending_residuals: Tensor


def order(values: Tensor, which: str) -> Tensor:
    """How wanted eigenvalues are: the greatest first."""
    return {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]


def ritz_pairs(basis: KrylovBasis, which: str) -> RitzPairs:
    """The Ritz pairs of a basis, the most wanted first."""
    values, combinations = eigh(basis.projected, "the projected operator")
    best = order(values, which).argsort(descending=True, stable=True)
    values, combinations = values[best], combinations[:, best]
    return RitzPairs(values, combinations, *basis.residuals(combinations))
