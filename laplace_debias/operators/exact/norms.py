"""Frobenius and spectral norm."""

from functools import reduce, singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact.eigendecomposition import eigenvalues, low_rank_eigh
from laplace_debias.operators.exact.known import NoClosedFormError, known, or_none, pass_on
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


def exact_frobenius_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The root of the sum of all squared entries, None without a closed form."""
    return or_none(_frobenius_norm, operator)


def exact_spectral_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The largest singular value of an operator `[m, n]`, None without a closed form."""
    return or_none(_spectral_norm, operator)


@singledispatch
def _frobenius_norm(operator: LinearOperator) -> Tensor:
    raise NoClosedFormError


@_frobenius_norm.register(Identity)
@_frobenius_norm.register(Permutation)
def _(operator: Identity | Permutation) -> Tensor:
    squared = torch.tensor(operator.shape[0], dtype=operator.dtype, device=operator.device)
    return squared.sqrt()


@_frobenius_norm.register
def _(operator: Diagonal) -> Tensor:
    return operator.values.norm()


@_frobenius_norm.register
def _(operator: Dense) -> Tensor:
    return operator.matrix.norm()


@_frobenius_norm.register
def _(operator: EigenKronecker) -> Tensor:
    return operator.magnitudes.norm()


@_frobenius_norm.register
def _(operator: Kronecker) -> Tensor:
    return reduce(torch.mul, map(_frobenius_norm, operator.factors))


@_frobenius_norm.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.stack([_frobenius_norm(block) for block in operator.blocks.values()]).norm()


@_frobenius_norm.register
def _(operator: LowRankPlusDiagonal) -> Tensor:
    U, magnitudes = operator.U, operator.magnitudes
    # ‖UMUᵀ + D‖² with R of U = QR in the place of U wherever UᵀU occurs.
    R = torch.linalg.qr(U, mode="r").R
    low_rank = ((R * magnitudes) @ R.T).square().sum()
    crossed = (operator.diagonal * (U.square() @ magnitudes)).sum()
    diagonal = operator.diagonal.expand(len(U)).square().sum()
    # Where the two parts cancel, rounding may leave less than nothing.
    return (low_rank + 2 * crossed + diagonal).clamp(min=0).sqrt()


@_frobenius_norm.register
def _(operator: Scaled) -> Tensor:
    return (operator.scalar * _frobenius_norm(operator.operator)).abs()


pass_on(_frobenius_norm, Assumed)
pass_on(_frobenius_norm, Permuted)


@singledispatch
def _spectral_norm(operator: LinearOperator) -> Tensor:
    return known(eigenvalues(operator)).abs().amax()


@_spectral_norm.register
def _(operator: Dense) -> Tensor:
    return torch.linalg.matrix_norm(operator.matrix, 2)


@_spectral_norm.register
def _(operator: Kronecker) -> Tensor:
    return reduce(torch.mul, map(_spectral_norm, operator.factors))


@_spectral_norm.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.stack([_spectral_norm(block) for block in operator.blocks.values()]).amax()


@_spectral_norm.register
def _(operator: LowRankPlusDiagonal) -> Tensor:
    if operator.diagonal.ndim != 0:
        raise NoClosedFormError
    values, vectors = low_rank_eigh(operator)
    norm = (values + operator.diagonal).abs().amax() if len(values) else operator.diagonal.abs()
    full = vectors.shape[0] == vectors.shape[1]
    return norm if full else torch.maximum(norm, operator.diagonal.abs())


@_spectral_norm.register
def _(operator: Permutation) -> Tensor:
    return torch.ones((), dtype=operator.dtype, device=operator.device)


@_spectral_norm.register
def _(operator: Scaled) -> Tensor:
    return (operator.scalar * _spectral_norm(operator.operator)).abs()


pass_on(_spectral_norm, Permuted)
