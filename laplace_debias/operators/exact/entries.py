"""Trace and diagonal."""

from functools import reduce, singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Product, Scaled, Sum
from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.exact.known import NoClosedFormError, or_none, pass_on, squares
from laplace_debias.operators.structures.assume import Assumed
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker
from laplace_debias.operators.structures.identity import Identity
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.permutation import Permutation
from laplace_debias.operators.structures.permuted import Permuted


def exact_trace(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The trace of an operator `[n, n]`, None without a closed form.

    Raises:
        ValueError: If the operator is not square.
    """
    check_square(operator)
    return or_none(_trace, operator)


def exact_diagonal(operator: LinearOperator) -> Float[Tensor, " n"] | None:
    """The diagonal of an operator `[n, n]`, None without a closed form.

    Raises:
        ValueError: If the operator is not square.
    """
    check_square(operator)
    return or_none(_diagonal, operator)


@singledispatch
def _trace(operator: LinearOperator) -> Tensor:
    return _diagonal(operator).sum()


@_trace.register
def _(operator: EigenKronecker) -> Tensor:
    return operator.magnitudes.sum()


@_trace.register
def _(operator: Kronecker) -> Tensor:
    return reduce(torch.mul, map(_trace, squares(operator.factors)))


@_trace.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.stack([_trace(block) for block in operator.blocks.values()]).sum()


@_trace.register
def _(operator: Sum) -> Tensor:
    return torch.stack([_trace(term) for term in operator.terms]).sum()


@_trace.register
def _(operator: Scaled) -> Tensor:
    return operator.scalar * _trace(operator.operator)


pass_on(_trace, Assumed)
pass_on(_trace, Permuted)


@singledispatch
def _diagonal(operator: LinearOperator) -> Tensor:
    raise NoClosedFormError


@_diagonal.register
def _(operator: Identity) -> Tensor:
    return torch.ones(operator.n, dtype=operator.dtype, device=operator.device)


@_diagonal.register
def _(operator: Diagonal) -> Tensor:
    return operator.values.clone()


@_diagonal.register
def _(operator: Dense) -> Tensor:
    return operator.matrix.diagonal().clone()


@_diagonal.register
def _(operator: EigenKronecker) -> Tensor:
    squares = operator.magnitudes
    if operator.U_G is not None:
        squares = operator.U_G.square() @ squares
    if operator.U_A is not None:
        squares = squares @ operator.U_A.square().mT
    return squares.flatten().clone()


@_diagonal.register
def _(operator: Kronecker) -> Tensor:
    return reduce(torch.kron, map(_diagonal, squares(operator.factors)))


@_diagonal.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.cat([_diagonal(block) for block in operator.blocks.values()])


@_diagonal.register
def _(operator: LowRankPlusDiagonal) -> Tensor:
    return operator.U.square() @ operator.magnitudes + operator.diagonal


@_diagonal.register
def _(operator: Permutation) -> Tensor:
    axes = torch.arange(len(operator.index), device=operator.device)
    return (operator.index == axes).to(operator.dtype)


@_diagonal.register
def _(operator: Product) -> Tensor:
    match operator.factors:
        case (Dense(left), Dense(right)):
            return (left * right.T).sum(1)
    raise NoClosedFormError


@_diagonal.register
def _(operator: Sum) -> Tensor:
    return reduce(torch.add, map(_diagonal, operator.terms))


@_diagonal.register
def _(operator: Scaled) -> Tensor:
    return operator.scalar * _diagonal(operator.operator)


pass_on(_diagonal, Assumed)


@_diagonal.register
def _(operator: Permuted) -> Tensor:
    return operator.permuted(_diagonal(operator.operator))
