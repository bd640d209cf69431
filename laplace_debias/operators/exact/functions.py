"""Functions of symmetric operators: the same eigenvectors, functions of the eigenvalues."""

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from laplace_debias.operators.algebra import Scaled
from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.dispatch import identity_multiple, scale
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact.eigendecomposition import exact_eigh, low_rank_eigh, shown
from laplace_debias.operators.exact.entries import exact_trace
from laplace_debias.operators.exact.known import NoClosedFormError, known, or_none, pass_on
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
    return or_none(_function, operator, function) if operator.is_symmetric else None


def exact_sqrt(operator: LinearOperator) -> LinearOperator | None:
    """The symmetric positive semi-definite root R with R R = A, None without a closed form.

    Eigenvalues that are negative by no more than rounding count as zero.

    Raises:
        ValueError: If the operator is not square, or has a negative eigenvalue.
    """
    check_square(operator)
    return or_none(_sqrt, operator) if operator.is_symmetric else None


@singledispatch
def _function(operator: LinearOperator, function: Spectrum) -> LinearOperator:
    values, vectors = known(exact_eigh(operator))
    return assume(vectors @ Diagonal(function(values)) @ vectors.T, symmetric=True)


@_function.register
def _(operator: Diagonal, function: Spectrum) -> LinearOperator:
    return Diagonal(function(operator.values))


@_function.register
def _(operator: EigenKronecker, function: Spectrum) -> LinearOperator:
    return operator.apply(function)


@_function.register
def _(operator: Dense, function: Spectrum) -> LinearOperator:
    values, vectors = eigh(operator.matrix, "a dense operator")
    matrix = vectors * function(values) @ vectors.T
    return Dense((matrix + matrix.T) / 2)


@_function.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], function: Spectrum) -> LinearOperator:
    return operator.map(lambda _, block: known(exact_function(block, function)))


@_function.register
def _(operator: LowRankPlusDiagonal, function: Spectrum) -> LinearOperator:
    if operator.diagonal.ndim != 0:
        raise NoClosedFormError
    values, vectors = low_rank_eigh(operator)
    # All eigenvalues at once: what a function takes for zero depends on the largest one.
    everywhere = function(torch.cat([values + operator.diagonal, operator.diagonal[None]]))
    rest = everywhere[-1]
    return LowRankPlusDiagonal(vectors, everywhere[:-1] - rest, rest)


@_function.register
def _(operator: Scaled, function: Spectrum) -> LinearOperator:
    multiple = identity_multiple(operator)
    if multiple is None:
        of_multiple = exact_function(operator.operator, lambda x: function(operator.scalar * x))
        return known(of_multiple)
    one = torch.ones(1, dtype=operator.dtype, device=operator.device)
    return scale(operator.operator, function(multiple * one)[0])


@_function.register
def _(operator: Identity, function: Spectrum) -> LinearOperator:
    one = torch.ones(1, dtype=operator.dtype, device=operator.device)
    return scale(operator, function(one)[0])


pass_on(_function, Assumed, shown)


@_function.register
def _(operator: Permuted, function: Spectrum) -> LinearOperator:
    return operator.replaced(known(exact_function(operator.operator, function)))


@singledispatch
def _sqrt(operator: LinearOperator) -> LinearOperator:
    return _function(operator, _checked_sqrt)


@_sqrt.register
def _(operator: Kronecker) -> LinearOperator:
    # Two negative factors make a positive product.
    traces = [known(exact_trace(factor)) for factor in operator.factors]
    signs = [-1.0 if bool(trace < 0) else 1.0 for trace in traces]
    if signs.count(-1.0) % 2 == 1:
        raise ValueError(_no_root("a factor with negative trace"))
    signed = map(scale, operator.factors, signs)
    return Kronecker(*(known(exact_sqrt(factor)) for factor in signed))


@_sqrt.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> LinearOperator:
    return operator.map(lambda _, block: known(exact_sqrt(block)))


@_sqrt.register
def _(operator: Permuted) -> LinearOperator:
    return operator.replaced(known(exact_sqrt(operator.operator)))


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
