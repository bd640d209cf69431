"""Bounds of eigenvalues."""

from laplace_debias.operators.algebra import Scaled, Sum
from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.dispatch import identity_multiple
from laplace_debias.operators.structures.diagonal import Diagonal


def least_eigenvalue_bound(operator: LinearOperator) -> float | None:
    """A lower bound of the eigenvalues of a symmetric operator `[n, n]`, or None if none is known.

    By Weyl's inequality the bounds of a sum's terms add up. An operator that claims to be positive
    semi-definite has the bound 0.

    Raises:
        ValueError: If the operator is not square.
    """
    check_square(operator)
    if isinstance(operator, Sum):
        bounds = [least_eigenvalue_bound(term) for term in operator.terms]
        known = [bound for bound in bounds if bound is not None]
        return sum(known) if len(known) == len(bounds) else None
    multiple = identity_multiple(operator)
    if multiple is not None:
        return float(multiple)
    if isinstance(operator, Diagonal):
        return float(operator.values.min())
    if isinstance(operator, Scaled) and operator.scalar >= 0:
        bound = least_eigenvalue_bound(operator.operator)
        return None if bound is None else float(operator.scalar) * bound
    return 0.0 if operator.is_positive_semidefinite else None
