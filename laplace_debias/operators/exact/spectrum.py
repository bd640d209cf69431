"""How closed forms that do not exist are told: by an exception inside, by None outside."""

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
from laplace_debias.operators.structures.eigen_kronecker import (
    EigenKronecker,
    Spectrum,
    completed,
    is_thin,
)
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Assumed, Permuted, assume

Value = TypeVar("Value")


class NoClosedFormError(Exception):
    """There is no closed form."""


def or_none(
    function: Callable[..., Value], operator: LinearOperator, *arguments: Any
) -> Value | None:
    """The value that the function returns, None if it finds no closed form."""
    check_finite(operator)
    try:
        return function(operator, *arguments)
    except NoClosedFormError:
        return None


def squares(operators: Collection[LinearOperator]) -> Collection[LinearOperator]:
    """The operators, if all are square; else there is no closed form."""
    if any(operator.shape[0] != operator.shape[1] for operator in operators):
        raise NoClosedFormError
    return operators


def exact_eigh(
    operator: LinearOperator,
) -> tuple[Float[Tensor, " n"], LinearOperator] | None:
    """All eigenpairs of a symmetric operator `[n, n]` in any order, None without a closed form.

    The eigenvectors are the columns of an orthogonal operator. Dense matrices and dense factors are
    decomposed; the vectors of a composed operator stay composed.
    """
    return or_none(_eigh, operator)


def eigenvalues(operator: LinearOperator) -> Tensor | None:
    """All eigenvalues of a symmetric operator in any order, None without a closed form."""
    return or_none(eigenvalues_of, operator)


def exact_sqrt(operator: LinearOperator) -> LinearOperator | None:
    """The symmetric positive semi-definite root R with R R = A, None without a closed form.

    Eigenvalues that are negative by no more than rounding count as zero.

    Raises:
        ValueError: If the operator has a negative eigenvalue.
    """
    return or_none(function_of, operator, _checked_sqrt)


def least_eigenvalue_bound(operator: LinearOperator) -> float | None:
    """A lower bound of the eigenvalues of a symmetric operator `[n, n]`, or None if none is known.

    By Weyl's inequality the bounds of a sum's terms add up. An operator that claims to be positive
    semi-definite has the bound 0.
    """
    if isinstance(operator, Sum):
        bounds = [least_eigenvalue_bound(term) for term in operator.terms]
        return None if None in bounds else sum(bound for bound in bounds if bound is not None)
    multiple = identity_multiple(operator)
    if multiple is not None:
        return float(multiple)
    if isinstance(operator, Diagonal):
        return float(operator.values.min())
    return 0.0 if operator.is_positive_semidefinite else None


def low_rank_eigh(
    operator: LowRankPlusDiagonal, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The low-rank part's eigenvalues and vectors, r = min(n, k); `weights` scale U's rows."""
    Q, R = torch.linalg.qr(operator.U if weights is None else weights * operator.U)
    values, vectors = eigh(R * operator.magnitudes @ R.T, "a low-rank operator")
    if bool((operator.magnitudes >= 0).all()):
        values = values.clamp(min=0)
    return values, Q @ vectors


def symmetric_matrix(operator: Dense) -> Tensor:
    """The matrix, which has real eigenvalues; else there is no closed form."""
    if not operator.is_symmetric:
        raise NoClosedFormError
    return operator.matrix


def _eigh(operator: LinearOperator) -> tuple[Tensor, LinearOperator]:
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
            return values, Kronecker(*(of_factor for _, of_factor in pairs))
        case BlockDiagonal():
            pairs = [_eigh(block) for block in operator.blocks.values()]
            of_blocks = dict(zip(operator.blocks, [of for _, of in pairs], strict=True))
            return torch.cat([values for values, _ in pairs]), BlockDiagonal(of_blocks)
        case Scaled():
            values, of_one = _eigh(operator.operator)
            return operator.scalar * values, of_one
        case Sum():
            # A and c if the sum is A + c·I.
            multiples = [identity_multiple(term) for term in operator.terms]
            rest = [t for t, c in zip(operator.terms, multiples, strict=True) if c is None]
            if len(rest) == 1:
                values, of_one = _eigh(rest[0])
                return values + sum(c for c in multiples if c is not None), of_one
        case Permuted():
            values, of_one = _eigh(operator.operator)
            return values, of_one if operator.order is None else of_one[operator.order.argsort(), :]
        case Assumed():
            return _eigh(operator.operator)
    raise NoClosedFormError


def _vectors(operator: EigenKronecker) -> LinearOperator:
    """The eigenvectors of all groups, those that thin directions leave too."""
    *groups, d_out, d_in = operator.sizes
    of_groups: dict[str, LinearOperator] = {}
    for at in [(index,) for index in range(groups[0])] if groups else [()]:
        sides: list[LinearOperator] = []
        for U, size in ((operator.U_G, d_out), (operator.U_A, d_in)):
            if U is None:
                sides.append(Identity(size, operator.dtype, operator.device))
            else:
                sides.append(Dense((completed(U) if is_thin(U) else U)[at]))
        of_groups[str(len(of_groups))] = Kronecker(*sides)
    return BlockDiagonal(of_groups) if groups else of_groups["0"]


def eigenvalues_of(operator: LinearOperator) -> Tensor:
    """All eigenvalues in any order."""
    match operator:
        case EigenKronecker():
            return operator.eigenvalues.flatten()
        case BlockDiagonal():
            return torch.cat([eigenvalues_of(block) for block in operator.blocks.values()])
        case LowRankPlusDiagonal():
            if operator.diagonal.ndim != 0:
                raise NoClosedFormError
            values, vectors = low_rank_eigh(operator)
            rest = values.new_zeros(len(vectors) - len(values))
            return torch.cat([values, rest]) + operator.diagonal
        case Assumed() | Permuted():
            return eigenvalues_of(operator.operator)
    return _eigh(operator)[0]


def function_of(operator: LinearOperator, function: Spectrum) -> LinearOperator:
    """A function of a symmetric operator: the same eigenvectors, `function` of the eigenvalues.

    The function maps eigenvalues entry by entry, and may be called for each block.
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
            return operator.map(lambda _, block: function_of(block, function))
        case LowRankPlusDiagonal():
            if operator.diagonal.ndim != 0:
                raise NoClosedFormError
            values, vectors = low_rank_eigh(operator)
            # All eigenvalues at once: what a function takes for zero depends on the largest one.
            values = function(torch.cat([values + operator.diagonal, operator.diagonal[None]]))
            return LowRankPlusDiagonal(vectors, values[:-1] - values[-1], values[-1])
        case Permuted():
            return operator.replaced(function_of(operator.operator, function))
        case Assumed():
            return function_of(operator.operator, function)
    values, of_all = _eigh(operator)
    return assume(of_all @ Diagonal(function(values)) @ of_all.T, symmetric=True)


def _checked_sqrt(values: Tensor) -> Tensor:
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    if bool((values < -rounding).any()):
        raise ValueError(
            "Only a positive semi-definite operator has a root, this one has the eigenvalue "
            f"{values.min().item():.3g}: add a multiple of the identity, `A + c * Identity(n)`, "
            "that makes it one."
        )
    return values.clamp(min=0).sqrt()
