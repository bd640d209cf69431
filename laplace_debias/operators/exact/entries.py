"""Trace and diagonal."""

from collections.abc import Callable
from functools import reduce, singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Product, Scaled, Sum
from laplace_debias.operators.base import LinearOperator, check_square
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
    return _trace(operator)


def exact_diagonal(operator: LinearOperator) -> Float[Tensor, " n"] | None:
    """The diagonal of an operator `[n, n]`, None without a closed form.

    Raises:
        ValueError: If the operator is not square.
    """
    check_square(operator)
    return _diagonal(operator)


def of_all(
    function: Callable[[Any], Tensor | None], operators: Any, square: bool = False
) -> list[Tensor] | None:
    """`function` of every operator, None if it is None for one, or one is not square if it must."""
    if square and any(operator.shape[0] != operator.shape[1] for operator in operators):
        return None
    values = []
    for operator in operators:
        value = function(operator)
        if value is None:
            return None
        values.append(value)
    return values


@singledispatch
def _trace(operator: LinearOperator) -> Tensor | None:
    diagonal = _diagonal(operator)
    return None if diagonal is None else diagonal.sum()


@_trace.register
def _(operator: EigenKronecker) -> Tensor | None:
    return operator.magnitudes.sum()


@_trace.register
def _(operator: Kronecker) -> Tensor | None:
    traces = of_all(_trace, operator.factors, square=True)
    return None if traces is None else reduce(torch.mul, traces)


@_trace.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor | None:
    traces = of_all(_trace, operator.blocks.values())
    return None if traces is None else torch.stack(traces).sum()


@_trace.register
def _(operator: Sum) -> Tensor | None:
    traces = of_all(_trace, operator.terms)
    return None if traces is None else torch.stack(traces).sum()


@_trace.register
def _(operator: Scaled) -> Tensor | None:
    trace = _trace(operator.operator)
    return None if trace is None else operator.scalar * trace


@_trace.register
def _(operator: Assumed) -> Tensor | None:
    return _trace(operator.operator)


@_trace.register
def _(operator: Permuted) -> Tensor | None:
    return _trace(operator.operator)


@singledispatch
def _diagonal(operator: LinearOperator) -> Tensor | None:
    return None


@_diagonal.register
def _(operator: Identity) -> Tensor | None:
    return torch.ones(operator.n, dtype=operator.dtype, device=operator.device)


@_diagonal.register
def _(operator: Diagonal) -> Tensor | None:
    return operator.values.clone()


@_diagonal.register
def _(operator: Dense) -> Tensor | None:
    return operator.matrix.diagonal().clone()


@_diagonal.register
def _(operator: EigenKronecker) -> Tensor | None:
    squares = operator.magnitudes
    if operator.U_G is not None:
        squares = operator.U_G.square() @ squares
    if operator.U_A is not None:
        squares = squares @ operator.U_A.square().mT
    return squares.flatten().clone()


@_diagonal.register
def _(operator: Kronecker) -> Tensor | None:
    diagonals = of_all(_diagonal, operator.factors, square=True)
    return None if diagonals is None else reduce(torch.kron, diagonals)


@_diagonal.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor | None:
    diagonals = of_all(_diagonal, operator.blocks.values())
    return None if diagonals is None else torch.cat(diagonals)


@_diagonal.register
def _(operator: LowRankPlusDiagonal) -> Tensor | None:
    return operator.U.square() @ operator.magnitudes + operator.diagonal


@_diagonal.register
def _(operator: Permutation) -> Tensor | None:
    axes = torch.arange(len(operator.index), device=operator.device)
    return (operator.index == axes).to(operator.dtype)


@_diagonal.register
def _(operator: Product) -> Tensor | None:
    if len(operator.factors) != 2:
        return None
    left, right = operator.factors
    if not (isinstance(left, Dense) and isinstance(right, Dense)):
        return None
    return (left.matrix * right.matrix.T).sum(1)


@_diagonal.register
def _(operator: Sum) -> Tensor | None:
    diagonals = of_all(_diagonal, operator.terms)
    return None if diagonals is None else reduce(torch.add, diagonals)


@_diagonal.register
def _(operator: Scaled) -> Tensor | None:
    diagonal = _diagonal(operator.operator)
    return None if diagonal is None else operator.scalar * diagonal


@_diagonal.register
def _(operator: Assumed) -> Tensor | None:
    return _diagonal(operator.operator)


@_diagonal.register
def _(operator: Permuted) -> Tensor | None:
    diagonal = _diagonal(operator.operator)
    return None if diagonal is None else operator.permuted(diagonal)
