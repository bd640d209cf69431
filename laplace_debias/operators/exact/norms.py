"""Frobenius and spectral norm."""

from functools import reduce, singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact.eigendecomposition import eigenvalues, low_rank_eigh
from laplace_debias.operators.exact.entries import of_all
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
    return _frobenius_norm(operator)


def exact_spectral_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The largest singular value of an operator `[m, n]`, None without a closed form."""
    return _spectral_norm(operator)


@singledispatch
def _frobenius_norm(operator: LinearOperator) -> Tensor | None:
    return None


@_frobenius_norm.register(Identity)
@_frobenius_norm.register(Permutation)
def _(operator: Identity | Permutation) -> Tensor | None:
    squared = torch.tensor(operator.shape[0], dtype=operator.dtype, device=operator.device)
    return squared.sqrt()


@_frobenius_norm.register
def _(operator: Diagonal) -> Tensor | None:
    return operator.values.norm()


@_frobenius_norm.register
def _(operator: Dense) -> Tensor | None:
    return operator.matrix.norm()


@_frobenius_norm.register
def _(operator: EigenKronecker) -> Tensor | None:
    return operator.magnitudes.norm()


@_frobenius_norm.register
def _(operator: Kronecker) -> Tensor | None:
    norms = of_all(_frobenius_norm, operator.factors)
    return None if norms is None else reduce(torch.mul, norms)


@_frobenius_norm.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor | None:
    norms = of_all(_frobenius_norm, operator.blocks.values())
    return None if norms is None else torch.stack(norms).norm()


@_frobenius_norm.register
def _(operator: LowRankPlusDiagonal) -> Tensor | None:
    U, magnitudes = operator.U, operator.magnitudes
    # ‖UMUᵀ + D‖² with R of U = QR in the place of U wherever UᵀU occurs.
    R = torch.linalg.qr(U, mode="r").R
    low_rank = ((R * magnitudes) @ R.T).square().sum()
    crossed = (operator.diagonal * (U.square() @ magnitudes)).sum()
    diagonal = operator.diagonal.expand(len(U)).square().sum()
    # Where the two parts cancel, rounding may leave less than nothing.
    return (low_rank + 2 * crossed + diagonal).clamp(min=0).sqrt()


@_frobenius_norm.register
def _(operator: Scaled) -> Tensor | None:
    norm = _frobenius_norm(operator.operator)
    return None if norm is None else (operator.scalar * norm).abs()


@_frobenius_norm.register
def _(operator: Assumed) -> Tensor | None:
    return _frobenius_norm(operator.operator)


@_frobenius_norm.register
def _(operator: Permuted) -> Tensor | None:
    return _frobenius_norm(operator.operator)


@singledispatch
def _spectral_norm(operator: LinearOperator) -> Tensor | None:
    values = eigenvalues(operator)
    return None if values is None else values.abs().amax()


@_spectral_norm.register
def _(operator: Dense) -> Tensor | None:
    return torch.linalg.matrix_norm(operator.matrix, 2)


@_spectral_norm.register
def _(operator: Kronecker) -> Tensor | None:
    norms = of_all(exact_spectral_norm, operator.factors)
    return None if norms is None else reduce(torch.mul, norms)


@_spectral_norm.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor | None:
    norms = of_all(exact_spectral_norm, operator.blocks.values())
    return None if norms is None else torch.stack(norms).amax()


@_spectral_norm.register
def _(operator: LowRankPlusDiagonal) -> Tensor | None:
    if operator.diagonal.ndim != 0:
        return None
    values, vectors = low_rank_eigh(operator)
    norm = (values + operator.diagonal).abs().amax() if len(values) else operator.diagonal.abs()
    full = vectors.shape[0] == vectors.shape[1]
    return norm if full else torch.maximum(norm, operator.diagonal.abs())


@_spectral_norm.register
def _(operator: Permutation) -> Tensor | None:
    return torch.ones((), dtype=operator.dtype, device=operator.device)


@_spectral_norm.register
def _(operator: Scaled) -> Tensor | None:
    norm = exact_spectral_norm(operator.operator)
    return None if norm is None else (operator.scalar * norm).abs()


@_spectral_norm.register
def _(operator: Permuted) -> Tensor | None:
    return exact_spectral_norm(operator.operator)
