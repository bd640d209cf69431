"""How closed forms that do not exist are told: by an exception inside, by None outside."""

from collections.abc import Callable, Collection
from functools import reduce, singledispatch
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


def pass_on(rule: Any, wrapper: type) -> None:
    """Register that a wrapper has the closed form of what it wraps."""
    rule.register(wrapper, lambda operator, *rest: rule(operator.operator, *rest))


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


@singledispatch
def _eigh(operator: LinearOperator) -> tuple[Tensor, LinearOperator]:
    raise NoClosedFormError


@_eigh.register
def _(operator: Identity) -> tuple[Tensor, LinearOperator]:
    return torch.ones(operator.n, dtype=operator.dtype, device=operator.device), operator


@_eigh.register
def _(operator: Diagonal) -> tuple[Tensor, LinearOperator]:
    return operator.values, Identity(len(operator.values), operator.dtype, operator.device)


@_eigh.register
def _(operator: Dense) -> tuple[Tensor, LinearOperator]:
    values, vectors = eigh(symmetric_matrix(operator), "a dense operator")
    return values.flip(0), Dense(vectors.flip(1))


@_eigh.register
def _(operator: EigenKronecker) -> tuple[Tensor, LinearOperator]:
    *groups, d_out, d_in = operator.sizes
    U_G, U_A = (completed(U) if is_thin(U) else U for U in (operator.U_G, operator.U_A))

    def vectors(at: tuple[int, ...]) -> Kronecker:
        left = Identity(d_out, operator.dtype, operator.device) if U_G is None else Dense(U_G[at])
        right = Identity(d_in, operator.dtype, operator.device) if U_A is None else Dense(U_A[at])
        return Kronecker(left, right)

    values = operator.eigenvalues.flatten()
    if not groups:
        return values, vectors(())
    return values, BlockDiagonal({str(index): vectors((index,)) for index in range(groups[0])})


@_eigh.register
def _(operator: Kronecker) -> tuple[Tensor, LinearOperator]:
    pairs = [_eigh(factor) for factor in operator.factors]
    values = reduce(torch.kron, [values for values, _ in pairs])
    return values, Kronecker(*(vectors for _, vectors in pairs))


@_eigh.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> tuple[Tensor, LinearOperator]:
    pairs = [_eigh(block) for block in operator.blocks.values()]
    vectors = {name: of_block for name, (_, of_block) in zip(operator.blocks, pairs, strict=True)}
    return torch.cat([values for values, _ in pairs]), BlockDiagonal(vectors)


@_eigh.register
def _(operator: Scaled) -> tuple[Tensor, LinearOperator]:
    values, vectors = _eigh(operator.operator)
    return operator.scalar * values, vectors


@_eigh.register
def _(operator: Sum) -> tuple[Tensor, LinearOperator]:
    # A and c if the sum is A + c·I.
    multiples = [identity_multiple(term) for term in operator.terms]
    rest = [t for t, c in zip(operator.terms, multiples, strict=True) if c is None]
    if len(rest) != 1:
        raise NoClosedFormError
    values, vectors = _eigh(rest[0])
    return values + sum(multiple for multiple in multiples if multiple is not None), vectors


@_eigh.register
def _(operator: Permuted) -> tuple[Tensor, LinearOperator]:
    values, vectors = _eigh(operator.operator)
    if operator.order is None:
        return values, vectors
    return values, vectors[operator.order.argsort(), :]


pass_on(_eigh, Assumed)


@singledispatch
def eigenvalues_of(operator: LinearOperator) -> Tensor:
    """All eigenvalues in any order."""
    return _eigh(operator)[0]


@eigenvalues_of.register
def _(operator: EigenKronecker) -> Tensor:
    return operator.eigenvalues.flatten()


@eigenvalues_of.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.cat([eigenvalues_of(block) for block in operator.blocks.values()])


@eigenvalues_of.register
def _(operator: LowRankPlusDiagonal) -> Tensor:
    if operator.diagonal.ndim != 0:
        raise NoClosedFormError
    values, vectors = low_rank_eigh(operator)
    return torch.cat([values, values.new_zeros(len(vectors) - len(values))]) + operator.diagonal


pass_on(eigenvalues_of, Assumed)
pass_on(eigenvalues_of, Permuted)


@singledispatch
def function_of(operator: LinearOperator, function: Spectrum) -> LinearOperator:
    """A function of a symmetric operator: the same eigenvectors, `function` of the eigenvalues.

    The function maps eigenvalues entry by entry, and may be called for each block.
    """
    values, vectors = _eigh(operator)
    return assume(vectors @ Diagonal(function(values)) @ vectors.T, symmetric=True)


@function_of.register
def _(operator: Diagonal, function: Spectrum) -> LinearOperator:
    return Diagonal(function(operator.values))


@function_of.register
def _(operator: EigenKronecker, function: Spectrum) -> LinearOperator:
    return operator.apply(function)


@function_of.register
def _(operator: Dense, function: Spectrum) -> LinearOperator:
    values, vectors = eigh(symmetric_matrix(operator), "a dense operator")
    matrix = vectors * function(values) @ vectors.T
    return Dense((matrix + matrix.T) / 2)


@function_of.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], function: Spectrum) -> LinearOperator:
    return operator.map(lambda _, block: function_of(block, function))


@function_of.register
def _(operator: LowRankPlusDiagonal, function: Spectrum) -> LinearOperator:
    if operator.diagonal.ndim != 0:
        raise NoClosedFormError
    values, vectors = low_rank_eigh(operator)
    # All eigenvalues at once: what a function takes for zero depends on the largest one.
    everywhere = function(torch.cat([values + operator.diagonal, operator.diagonal[None]]))
    rest = everywhere[-1]
    return LowRankPlusDiagonal(vectors, everywhere[:-1] - rest, rest)


@function_of.register
def _(operator: Permuted, function: Spectrum) -> LinearOperator:
    return operator.replaced(function_of(operator.operator, function))


pass_on(function_of, Assumed)


def _checked_sqrt(values: Tensor) -> Tensor:
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    if bool((values < -rounding).any()):
        raise ValueError(
            "Only a positive semi-definite operator has a root, this one has the eigenvalue "
            f"{values.min().item():.3g}: add a multiple of the identity, `A + c * Identity(n)`, "
            "that makes it one."
        )
    return values.clamp(min=0).sqrt()
