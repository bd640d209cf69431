"""Functions of symmetric operators: the same eigenvectors, functions of the eigenvalues."""

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from laplace_debias.operators.algebra import Scaled
from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.dispatch import identity_multiple, scale
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact.eigendecomposition import exact_eigh, low_rank_eigh, shown
from laplace_debias.operators.exact.entries import exact_trace, of_all
from laplace_debias.operators.structures.assume import Assumed, assume
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker, Spectrum
from laplace_debias.operators.structures.identity import Identity
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.permuted import Permuted


def exact_function(operator: LinearOperator, function: Spectrum) -> LinearOperator | None:
    """A function of a symmetric operator: the same eigenvectors, `function` of the eigenvalues.

    Args:
        operator: `[n, n]`.
        function: From eigenvalues to eigenvalues, entry by entry; it may be called for each block.

    Returns:
        A symmetric operator, `[n, n]`, None without a closed form.

    Raises:
        ValueError: If the operator is not square.
    """
    check_square(operator)
    return _function(operator, function) if operator.is_symmetric else None


def exact_sqrt(operator: LinearOperator) -> LinearOperator | None:
    """The symmetric positive semi-definite root R with R R = A, None without a closed form.

    Eigenvalues that are negative by no more than rounding count as zero.

    Raises:
        ValueError: If the operator is not square, or has a negative eigenvalue.
    """
    check_square(operator)
    return _sqrt(operator) if operator.is_symmetric else None


@singledispatch
def _function(operator: LinearOperator, function: Spectrum) -> LinearOperator | None:
    pairs = exact_eigh(operator)
    if pairs is None:
        return None
    product = pairs.vectors @ Diagonal(function(pairs.values)) @ pairs.vectors.T
    return assume(product, symmetric=True)


@_function.register
def _(operator: Diagonal, function: Spectrum) -> LinearOperator | None:
    return Diagonal(function(operator.values))


@_function.register
def _(operator: EigenKronecker, function: Spectrum) -> LinearOperator | None:
    return operator.apply(function)


@_function.register
def _(operator: Dense, function: Spectrum) -> LinearOperator | None:
    values, vectors = eigh(operator.matrix, "a dense operator")
    matrix = vectors * function(values) @ vectors.T
    return Dense((matrix + matrix.T) / 2)


@_function.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], function: Spectrum) -> LinearOperator | None:
    return blockwise(operator, lambda block: exact_function(block, function))


@_function.register
def _(operator: LowRankPlusDiagonal, function: Spectrum) -> LinearOperator | None:
    if operator.diagonal.ndim != 0:
        return None
    values, vectors = low_rank_eigh(operator)
    # All eigenvalues at once: what a function takes for zero depends on the largest one.
    everywhere = function(torch.cat([values + operator.diagonal, operator.diagonal[None]]))
    rest = everywhere[-1]
    return LowRankPlusDiagonal(vectors, everywhere[:-1] - rest, rest)


@_function.register
def _(operator: Scaled, function: Spectrum) -> LinearOperator | None:
    multiple = identity_multiple(operator)
    if multiple is None:
        return exact_function(operator.operator, lambda values: function(operator.scalar * values))
    one = torch.ones(1, dtype=operator.dtype, device=operator.device)
    return scale(operator.operator, function(multiple * one)[0])


@_function.register
def _(operator: Identity, function: Spectrum) -> LinearOperator | None:
    one = torch.ones(1, dtype=operator.dtype, device=operator.device)
    return scale(operator, function(one)[0])


@_function.register
def _(operator: Assumed, function: Spectrum) -> LinearOperator | None:
    return _function(shown(operator), function)


@_function.register
def _(operator: Permuted, function: Spectrum) -> LinearOperator | None:
    result = exact_function(operator.operator, function)
    return None if result is None else operator.replaced(result)


@singledispatch
def _sqrt(operator: LinearOperator) -> LinearOperator | None:
    return _function(operator, _checked_sqrt)


@_sqrt.register
def _(operator: Kronecker) -> LinearOperator | None:
    # Two negative factors make a positive product.
    traces = of_all(exact_trace, operator.factors)
    if traces is None:
        return None
    signs = [-1.0 if bool(trace < 0) else 1.0 for trace in traces]
    if signs.count(-1.0) % 2 == 1:
        raise ValueError(_no_root("a factor with negative trace"))
    roots = []
    for sign, factor in zip(signs, operator.factors, strict=True):
        root = exact_sqrt(scale(factor, sign))
        if root is None:
            return None
        roots.append(root)
    return Kronecker(*roots)


@_sqrt.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> LinearOperator | None:
    return blockwise(operator, exact_sqrt)


@_sqrt.register
def _(operator: Permuted) -> LinearOperator | None:
    root = exact_sqrt(operator.operator)
    return None if root is None else operator.replaced(root)


def blockwise(
    operator: BlockDiagonal[Any], function: Callable[[Any], LinearOperator | None]
) -> BlockDiagonal[Any] | None:
    """`function` of every block, None if it is None for one."""
    blocks = {}
    for name, block in operator.blocks.items():
        result = function(block)
        if result is None:
            return None
        blocks[name] = result
    return BlockDiagonal(blocks, operator.layout)


def _checked_sqrt(values: Tensor) -> Tensor:
    largest = values.abs().amax()
    rounding = len(values) * torch.finfo(values.dtype).eps * largest
    if bool((values < -rounding).any()):
        raise ValueError(_no_root(f"the eigenvalue {values.min().item():.3g}"))
    return values.clamp(min=0).sqrt()


def _no_root(reason: str) -> str:
    return (
        f"Only a positive semi-definite operator has a root, this one has {reason}: add a multiple "
        "of the identity, `A + c * Identity(n)`, that makes it one."
    )
