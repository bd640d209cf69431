"""Trace, diagonal and norms."""

from functools import reduce, singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled, Sum
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact.spectrum import (
    NoClosedFormError,
    eigenvalues,
    or_none,
    pass_on,
    squares,
)
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal, Identity
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker, frame
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Assumed, Permuted


def exact_trace(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The trace of an operator `[n, n]`, None without a closed form."""
    return or_none(_trace, operator)


def exact_diagonal(operator: LinearOperator) -> Float[Tensor, " n"] | None:
    """The diagonal of an operator `[n, n]`, None without a closed form."""
    return or_none(_diagonal, operator)


def exact_frobenius_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The root of the sum of all squared entries, None without a closed form."""
    values = operator.matrix if isinstance(operator, Dense) else eigenvalues(operator)
    return None if values is None else values.norm()


def exact_spectral_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The largest singular value of an operator `[m, n]`, None without a closed form."""
    if isinstance(operator, Dense):
        return torch.linalg.matrix_norm(operator.matrix, 2)
    values = eigenvalues(operator)
    return None if values is None else values.abs().amax()


@singledispatch
def _trace(operator: LinearOperator) -> Tensor:
    return _diagonal(operator).sum()


@_trace.register
def _(operator: EigenKronecker) -> Tensor:
    return (operator.magnitudes * operator.multiplicities).sum()


@_trace.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.stack([_trace(block) for block in operator.blocks.values()]).sum()


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
    squares = operator.in_frame
    if operator.U_G is not None:
        squares = frame(operator.U_G).square() @ squares
    if operator.U_A is not None:
        squares = squares @ frame(operator.U_A).square().mT
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
def _(operator: Sum) -> Tensor:
    return reduce(torch.add, map(_diagonal, operator.terms))


@_diagonal.register
def _(operator: Scaled) -> Tensor:
    return operator.scalar * _diagonal(operator.operator)


@_diagonal.register
def _(operator: Permuted) -> Tensor:
    return operator.permuted(_diagonal(operator.operator))


pass_on(_diagonal, Assumed)
