"""Closed forms of eigenpairs, roots and functions of symmetric operators.

Public functions return None if an operator has no closed form. The recursive functions behind them
raise `NoClosedFormError` instead, so that a single block without a closed form ends the recursion.
"""

from collections.abc import Callable, Collection
from functools import reduce
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled, Sum
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import check_finite, identity_multiple
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal, Identity
from laplace_debias.operators.structures.directions import Basis, Directions, ThinBasis
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker, Spectrum
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Assumed, Permuted, assume
from laplace_debias.system.checks import check_no_autocast

Value = TypeVar("Value")


class NoClosedFormError(Exception):
    """Raised internally if an operator has no closed form."""


def or_none(
    function: Callable[..., Value], operator: LinearOperator, *arguments: Any
) -> Value | None:
    """Call a function of an operator, and return None if it raises `NoClosedFormError`.

    Raises:
        ValueError: If the operator contains NaN or Inf.
        RuntimeError: If autocast is enabled.
    """
    check_no_autocast(operator.device, operator.dtype)
    check_finite(operator)
    try:
        return function(operator, *arguments)
    except NoClosedFormError:
        return None


def all_square(operators: Collection[LinearOperator]) -> Collection[LinearOperator]:
    """Return the operators, or raise `NoClosedFormError` if one of them is not square."""
    if any(operator.shape[0] != operator.shape[1] for operator in operators):
        raise NoClosedFormError
    return operators


def exact_eigh(
    operator: LinearOperator,
) -> tuple[Float[Tensor, " n"], LinearOperator] | None:
    """Decompose a symmetric operator `[n, n]`, or return None if there is no closed form.

    The eigenvalues are in no particular order. The eigenvectors are the columns of an orthogonal
    operator. Only dense matrices and dense factors are decomposed numerically; the eigenvectors of
    a composed operator are again a composed operator.
    """
    return or_none(_eigh, operator)


def eigenvalues(operator: LinearOperator) -> Tensor | None:
    """Return all eigenvalues of a symmetric operator, unordered, or None without a closed form."""
    return or_none(all_eigenvalues, operator)


def exact_sqrt(operator: LinearOperator) -> LinearOperator | None:
    """Compute the positive semi-definite root R with R R = A, or return None without a closed form.

    Negative eigenvalues that are zero within rounding errors count as zero.

    Raises:
        ValueError: If the operator has a negative eigenvalue.
    """
    return or_none(apply_function, operator, _checked_sqrt)


def least_eigenvalue_bound(operator: LinearOperator) -> float | None:
    """Return a lower bound on a symmetric operator's eigenvalues, or None if none is known.

    By Weyl's inequality, the bound of a sum is the sum of its terms' bounds. If an operator is
    declared positive semi-definite, 0 is a bound.
    """
    if isinstance(operator, Sum):
        total = 0.0
        for term in operator.terms:
            bound = least_eigenvalue_bound(term)
            if bound is None:
                return None
            total += bound
        return total
    multiple = identity_multiple(operator)
    if multiple is not None:
        return float(multiple)
    if isinstance(operator, Diagonal):
        return float(operator.values.min())
    return 0.0 if operator.is_positive_semidefinite else None


def low_rank_eigh(
    operator: LowRankPlusDiagonal, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decompose the low-rank part U diag(m) Uᵀ, after scaling the rows of U by `weights`, `[n, 1]`.

    Returns:
        Eigenvalues `[r]` and eigenvectors `[n, r]`, with r = min(n, k).
    """
    U = operator.directions
    Q, R = torch.linalg.qr(U if weights is None else weights * U)
    values, vectors = eigh(R * operator.magnitudes @ R.T, "a low-rank operator")
    if bool((operator.magnitudes >= 0).all()):
        values = values.clamp(min=0)
    return values, Q @ vectors


def symmetric_matrix(operator: Dense) -> Tensor:
    """Return the operator's matrix, or raise `NoClosedFormError` if it is not symmetric."""
    if not operator.is_symmetric:
        raise NoClosedFormError
    return operator.matrix


def _eigh(operator: LinearOperator) -> tuple[Tensor, LinearOperator]:
    """Decompose an operator by its structure, or raise `NoClosedFormError`."""
    eigenvectors: LinearOperator
    match operator:
        case Identity():
            ones = torch.ones(operator.n, dtype=operator.dtype, device=operator.device)
            return ones, operator
        case Diagonal():
            return operator.values, Identity(operator.shape[0], operator.dtype, operator.device)
        case Dense():
            values, vectors = eigh(symmetric_matrix(operator), "a dense operator")
            return values.flip(0), Dense(vectors.flip(1))
        case EigenKronecker():
            return operator.eigenvalues.flatten(), _vectors(operator)
        case Kronecker():
            pairs = [_eigh(factor) for factor in operator.factors]
            values = reduce(torch.kron, [values for values, _ in pairs])
            return values, Kronecker(*(eigenvectors for _, eigenvectors in pairs))
        case BlockDiagonal():
            pairs = [_eigh(block) for block in operator.blocks.values()]
            bases = [eigenvectors for _, eigenvectors in pairs]
            eigenvectors = BlockDiagonal(dict(zip(operator.blocks, bases, strict=True)))
            return torch.cat([values for values, _ in pairs]), eigenvectors
        case Scaled():
            values, eigenvectors = _eigh(operator.operator)
            return operator.scalar * values, eigenvectors
        case Sum():
            return _eigh_of_sum(operator)
        case Permuted():
            values, eigenvectors = _eigh(operator.operator)
            if operator.order is None:
                return values, eigenvectors
            return values, eigenvectors[operator.order.argsort(), :]
        case Assumed():
            return _eigh(operator.operator)
    raise NoClosedFormError


def _eigh_of_sum(operator: Sum) -> tuple[Tensor, LinearOperator]:
    """Decompose a sum of the form A + c·I, whose eigenvalues are those of A, plus c."""
    multiples = [identity_multiple(term) for term in operator.terms]
    terms = [t for t, c in zip(operator.terms, multiples, strict=True) if c is None]
    if len(terms) != 1:
        raise NoClosedFormError
    values, eigenvectors = _eigh(terms[0])
    return values + sum(c for c in multiples if c is not None), eigenvectors


def _vectors(operator: EigenKronecker) -> LinearOperator:
    """Assemble the eigenvectors of all groups, after completing thin directions to a basis."""
    groups = operator.sizes[:-2]
    sides: list[Directions] = []
    for directions in (operator.output_directions, operator.input_directions):
        if isinstance(directions, ThinBasis):
            sides.append(Basis(directions.complete_basis()))
        else:
            sides.append(directions)

    def group_vectors(*group: int) -> LinearOperator:
        factors: list[LinearOperator] = []
        for directions in sides:
            if isinstance(directions, Basis):
                factors.append(Dense(directions.U[group]))
            else:
                factors.append(Identity(directions.size, operator.dtype, operator.device))
        return Kronecker(*factors)

    if not groups:
        return group_vectors()
    return BlockDiagonal({str(group): group_vectors(group) for group in range(groups[0])})


def all_eigenvalues(operator: LinearOperator) -> Tensor:
    """Compute all eigenvalues in no particular order, or raise `NoClosedFormError`."""
    match operator:
        case EigenKronecker():
            return operator.eigenvalues.flatten()
        case BlockDiagonal():
            return torch.cat([all_eigenvalues(block) for block in operator.blocks.values()])
        case LowRankPlusDiagonal():
            if operator.diagonal.ndim != 0:
                raise NoClosedFormError
            values, vectors = low_rank_eigh(operator)
            zeros = values.new_zeros(len(vectors) - len(values))
            return torch.cat([values, zeros]) + operator.diagonal
        case Assumed() | Permuted():
            return all_eigenvalues(operator.operator)
    return _eigh(operator)[0]


def apply_function(operator: LinearOperator, function: Spectrum) -> LinearOperator:
    """Apply a function to a symmetric operator's eigenvalues, and keep the eigenvectors.

    The function must act entry by entry, because it may be called separately for each block.
    """
    match operator:
        case Diagonal():
            return Diagonal(function(operator.values))
        case EigenKronecker():
            return operator.apply(function)
        case Dense():
            values, vectors = eigh(symmetric_matrix(operator), "a dense operator")
            matrix = vectors * function(values) @ vectors.T
            return Dense((matrix + matrix.T) / 2)
        case BlockDiagonal():
            return operator.map(lambda _, block: apply_function(block, function))
        case LowRankPlusDiagonal():
            if operator.diagonal.ndim != 0:
                raise NoClosedFormError
            values, vectors = low_rank_eigh(operator)
            if vectors.shape[1] == vectors.shape[0]:
                # The low-rank part spans the whole space, so the diagonal itself is not an
                # eigenvalue.
                values = function(values + operator.diagonal)
                return LowRankPlusDiagonal(vectors, values, torch.zeros_like(operator.diagonal))
            # Map all eigenvalues in one call, because the function may round values to zero that
            # are small relative to the largest one.
            values = function(torch.cat([values + operator.diagonal, operator.diagonal[None]]))
            return LowRankPlusDiagonal(vectors, values[:-1] - values[-1], values[-1])
        case Permuted():
            return operator.replaced(apply_function(operator.operator, function))
        case Assumed():
            return apply_function(operator.operator, function)
    values, eigenvectors = _eigh(operator)
    matrix_function = eigenvectors @ Diagonal(function(values)) @ eigenvectors.T
    return assume(matrix_function, symmetric=True)


def _checked_sqrt(values: Tensor) -> Tensor:
    """Compute the roots of eigenvalues, and raise an error if one is significantly negative."""
    if values.numel() == 0:
        return values
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    if bool((values < -rounding).any()):
        raise ValueError(
            "The operator has no root, because it is not positive semi-definite: it "
            f"has the eigenvalue {values.min().item():.3g}. Add a multiple of the "
            "identity, `A + c * Identity(n)`, that makes it positive semi-definite."
        )
    return values.clamp(min=0).sqrt()
