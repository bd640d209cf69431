"""Log-determinants."""

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Product, Scaled
from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.eigh import eigvalsh
from laplace_debias.operators.exact.eigendecomposition import (
    eigenvalues,
    shown,
    whitened_eigenvalues,
)
from laplace_debias.operators.exact.known import known, or_none, pass_on, squares
from laplace_debias.operators.structures.assume import Assumed
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.permutation import Permutation
from laplace_debias.operators.structures.permuted import Permuted

# The sign and the logarithm of the absolute value of a determinant, both 0-d.
SignLog = tuple[Tensor, Tensor]


def exact_logdet(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """The logarithm of the determinant of an operator `[n, n]`, None without a closed form.

    Raises:
        ValueError: If the operator is not square, if it is symmetric and an eigenvalue is known not
            to be positive, or if the determinant is not.
    """
    check_square(operator)
    value = or_none(_symmetric, operator) if operator.is_symmetric else None
    if value is not None:
        return value
    found = or_none(_slogdet, operator)
    if found is None:
        return None
    sign, log = found
    if not bool(sign > 0):
        raise ValueError(
            f"The determinant is {'zero' if bool(sign == 0) else 'negative'} and has no logarithm: "
            "add a multiple of the identity, `A + c * Identity(n)`, that makes it positive."
        )
    return log


@singledispatch
def _symmetric(operator: LinearOperator) -> Tensor:
    """The log-determinant of a symmetric operator, which must be positive definite."""
    return _checked_log(known(eigenvalues(operator))).sum()


@_symmetric.register
def _(operator: Dense) -> Tensor:
    root, info = torch.linalg.cholesky_ex(operator.matrix)
    if bool(info != 0):
        # The factorisation stops at the first minor that is not positive.
        return _checked_log(eigvalsh(operator.matrix, "a dense operator")).sum()
    return 2 * root.diagonal().log().sum()


@_symmetric.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> Tensor:
    return torch.stack([known(exact_logdet(block)) for block in operator.blocks.values()]).sum()


@_symmetric.register
def _(operator: LowRankPlusDiagonal) -> Tensor:
    ratios = whitened_eigenvalues(operator)
    if ratios is None:
        return _checked_log(known(eigenvalues(operator))).sum()
    # The matrix determinant lemma: A and I + D^-½UMUᵀD^-½ are positive definite together.
    diagonal = operator.diagonal.expand(len(operator.U))
    return diagonal.log().sum() + _checked_log(1 + ratios).sum()


@_symmetric.register
def _(operator: Assumed) -> Tensor:
    return known(exact_logdet(shown(operator)))


@_symmetric.register
def _(operator: Permuted) -> Tensor:
    return known(exact_logdet(operator.operator))


@singledispatch
def _slogdet(operator: LinearOperator) -> SignLog:
    return _sign_log(known(eigenvalues(operator)))


@_slogdet.register
def _(operator: Dense) -> SignLog:
    sign, log = torch.linalg.slogdet(operator.matrix)
    return sign, log


@_slogdet.register
def _(operator: Kronecker) -> SignLog:
    n = operator.shape[0]
    powers = [n // factor.shape[0] for factor in squares(operator.factors)]
    found = zip(map(_slogdet, operator.factors), powers, strict=True)
    return _joined((sign**power, log * power) for (sign, log), power in found)


@_slogdet.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> SignLog:
    return _joined(_slogdet(block) for block in operator.blocks.values())


@_slogdet.register
def _(operator: LowRankPlusDiagonal) -> SignLog:
    ratios = whitened_eigenvalues(operator)
    if ratios is None:
        return _sign_log(known(eigenvalues(operator)))
    sign, log = _sign_log(1 + ratios)
    return sign, operator.diagonal.expand(len(operator.U)).log().sum() + log


@_slogdet.register
def _(operator: Permutation) -> SignLog:
    # Slow to import, and few need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    index = operator.index.cpu().numpy()
    n = len(index)
    graph = coo_array((np.ones(n), (np.arange(n), index)), shape=(n, n))
    cycles, _ = connected_components(graph)
    one = torch.ones((), dtype=operator.dtype, device=operator.device)
    return (-one if (n - cycles) % 2 else one), torch.zeros_like(one)


@_slogdet.register
def _(operator: Product) -> SignLog:
    return _joined(_slogdet(factor) for factor in squares(operator.factors))


@_slogdet.register
def _(operator: Scaled) -> SignLog:
    sign, log = _slogdet(operator.operator)
    scalar = torch.as_tensor(operator.scalar).to(log)
    n = operator.shape[0]
    return sign * scalar.sign() ** n, log + n * scalar.abs().log()


pass_on(_slogdet, Assumed, shown)
pass_on(_slogdet, Permuted)


def _sign_log(values: Tensor) -> SignLog:
    return values.sign().prod(), values.abs().log().sum()


def _joined(parts: Iterable[SignLog]) -> SignLog:
    signs, logs = zip(*parts, strict=True)
    return torch.stack(signs).prod(), torch.stack(logs).sum()


def _checked_log(values: Tensor) -> Tensor:
    if not bool((values > 0).all()):
        raise ValueError(
            f"The operator is not positive definite, its smallest eigenvalue is about "
            f"{values.min().item():.3g}: add a multiple of the identity, `A + c * Identity(n)`, "
            "that makes it so."
        )
    return values.log()
