"""Inverses and solutions of linear systems."""

from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Product, Scaled
from laplace_debias.operators.base import LinearOperator, check_operand, check_square
from laplace_debias.operators.dispatch import scale
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact.eigendecomposition import low_rank_eigh
from laplace_debias.operators.exact.functions import exact_function
from laplace_debias.operators.exact.known import NoClosedFormError, known, or_none, pass_on, squares
from laplace_debias.operators.structures.assume import Assumed, assume
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker
from laplace_debias.operators.structures.identity import Identity
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.permutation import Permutation
from laplace_debias.operators.structures.permuted import Permuted


def exact_inverse(operator: LinearOperator) -> LinearOperator | None:
    """The inverse of an operator `[n, n]`, in the same structure; None without a closed form.

    Raises:
        ValueError: If the operator is not square, or singular.
    """
    check_square(operator)
    return or_none(_inverse, operator)


def exact_solve(
    operator: LinearOperator, right: Float[Tensor, " n"] | Float[Tensor, "n k"]
) -> Float[Tensor, " n"] | Float[Tensor, "n k"] | None:
    """The solution X of A X = B, None without a closed form.

    Args:
        operator: A, `[n, n]`.
        right: B, `[n]` or `[n, k]`.

    Returns:
        X, of B's shape.

    Raises:
        ValueError: If A is not square, or singular, or B does not fit.
    """
    check_square(operator)
    check_operand(operator, right)
    solution = or_none(_solve, operator, right if right.ndim == 2 else right[:, None])
    return None if solution is None else solution.reshape(right.shape)


@singledispatch
def _inverse(operator: LinearOperator) -> LinearOperator:
    return known(exact_function(operator, _resolved_reciprocal))


@_inverse.register
def _(operator: Identity) -> LinearOperator:
    return operator


@_inverse.register
def _(operator: Diagonal) -> LinearOperator:
    # These eigenvalues are given, not computed: each is as precise as any.
    return Diagonal(_checked_reciprocal(operator.values))


@_inverse.register
def _(operator: EigenKronecker) -> LinearOperator:
    # Curvature plus a weak prior: as small as the prior, and as precise.
    added = operator.added
    is_damped = bool(added > 0) and bool((operator.magnitudes >= added).all())
    return operator.apply(_checked_reciprocal if is_damped else _resolved_reciprocal)


@_inverse.register
def _(operator: Dense) -> LinearOperator:
    eye = torch.eye(len(operator.matrix), dtype=operator.dtype, device=operator.device)
    inverse = torch.linalg.lu_solve(*_factorised(operator), eye)
    return Dense((inverse + inverse.T) / 2 if operator.is_symmetric else inverse)


@_inverse.register
def _(operator: Kronecker) -> LinearOperator:
    return Kronecker(*map(_inverse, squares(operator.factors)))


@_inverse.register
def _(operator: Product) -> LinearOperator:
    return Product(tuple(map(_inverse, squares(operator.factors[::-1]))))


@_inverse.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any]) -> LinearOperator:
    return operator.map(lambda _, block: _inverse(block))


@_inverse.register
def _(operator: LowRankPlusDiagonal) -> LinearOperator:
    U, magnitudes, diagonal = operator.U, operator.magnitudes, operator.diagonal
    # What is not negative cannot cancel the diagonal.
    is_positive = bool((magnitudes >= 0).all() & (diagonal > 0).all())
    reciprocal = _checked_reciprocal if is_positive else _resolved_reciprocal
    if diagonal.ndim == 0:
        return known(exact_function(operator, reciprocal))
    if bool((diagonal == 0).any()):
        # The formula divides by the diagonal, though the operator itself may be invertible.
        raise NoClosedFormError
    if bool((diagonal > 0).all()):
        # Woodbury between D^-½ and D^-½, where it is a function of eigenvalues: accurate however
        # far apart the two parts are.
        root = diagonal.rsqrt()[:, None]
        values, vectors = low_rank_eigh(operator, root)
        return LowRankPlusDiagonal(
            root * vectors, -values * reciprocal(1 + values), diagonal.reciprocal()
        )
    # Woodbury: (D + UMUᵀ)⁻¹ = D⁻¹ − D⁻¹U (I + MUᵀD⁻¹U)⁻¹M UᵀD⁻¹, whose core is symmetric.
    scaled = U / diagonal[:, None]
    eye = torch.eye(len(magnitudes), dtype=U.dtype, device=U.device)
    factors = _factorised(Dense(eye + magnitudes[:, None] * (U.T @ scaled)))
    core = torch.linalg.lu_solve(*factors, magnitudes.diag())
    values, vectors = eigh((core + core.T) / 2, "the core of Woodbury's formula")
    return LowRankPlusDiagonal(scaled @ vectors, -values, diagonal.reciprocal())


@_inverse.register
def _(operator: Permutation) -> LinearOperator:
    return operator.T


@_inverse.register
def _(operator: Scaled) -> LinearOperator:
    _checked_reciprocal(torch.as_tensor(operator.scalar, dtype=operator.dtype)[None])
    return scale(_inverse(operator.operator), 1 / operator.scalar)


@_inverse.register
def _(operator: Assumed) -> LinearOperator:
    return assume(_inverse(operator.operator), True, operator.positive_semidefinite)


@_inverse.register
def _(operator: Permuted) -> LinearOperator:
    return operator.replaced(_inverse(operator.operator))


@singledispatch
def _solve(operator: LinearOperator, right: Tensor) -> Tensor:
    return _inverse(operator) @ right


@_solve.register
def _(operator: Dense, right: Tensor) -> Tensor:
    return torch.linalg.lu_solve(*_factorised(operator), right)


@_solve.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], right: Tensor) -> Tensor:
    parts = zip(operator.blocks.values(), right.split(operator.sizes), strict=True)
    return torch.cat([_solve(block, part) for block, part in parts])


@_solve.register
def _(operator: Product, right: Tensor) -> Tensor:
    for factor in squares(operator.factors):
        right = _solve(factor, right)
    return right


pass_on(_solve, Assumed)


def _checked_reciprocal(values: Tensor) -> Tensor:
    if bool((values == 0).any()):
        raise ValueError(_singular("an eigenvalue is zero"))
    return values.reciprocal()


def _resolved_reciprocal(values: Tensor) -> Tensor:
    """The reciprocals of computed eigenvalues, which are known to rounding of the largest one.

    The condition allowed is that of a factorisation, see `_factorised`.
    """
    sizes = values.abs()
    if bool((sizes <= torch.finfo(values.dtype).eps * sizes.amax()).any()):
        ratio = float(sizes.amin() / sizes.amax())
        raise ValueError(
            _singular(f"to {values.dtype}: an eigenvalue is {ratio:.1e} times the largest")
        )
    return values.reciprocal()


def _factorised(operator: Dense) -> tuple[Tensor, Tensor]:
    """The LU factorisation of a dense operator that is invertible to working precision."""
    matrix = operator.matrix
    if not bool(matrix.isfinite().all()):
        raise ValueError("The operator holds NaN or Inf: look for them where it was built.")
    LU, pivots, info = torch.linalg.lu_factor_ex(matrix)
    if bool(info != 0):
        raise ValueError(_singular("a pivot of its factorisation is zero"))
    condition = torch.linalg.matrix_norm(matrix, 1) * _inverse_norm(LU, pivots)
    if not bool(condition < 1 / torch.finfo(matrix.dtype).eps):
        raise ValueError(_singular(f"to {matrix.dtype}: its condition is {condition:.1e}"))
    return LU, pivots


def _inverse_norm(LU: Tensor, pivots: Tensor) -> Tensor:
    """The 1-norm of the inverse, estimated from a few solutions.

    Reference:
        Hager (1984), Condition estimates.
    """
    n = len(LU)
    x = LU.new_full((n, 1), 1 / n)
    norm = LU.new_zeros(())
    for _ in range(5):
        y = torch.linalg.lu_solve(LU, pivots, x)
        norm = y.abs().sum()
        z = torch.linalg.lu_solve(LU, pivots, torch.where(y < 0, -1.0, 1.0).to(y), adjoint=True)
        steepest = z.abs().argmax()
        if not bool(z.abs()[steepest] > (z.T @ x)):
            break
        x = torch.zeros_like(x)
        x[steepest] = 1
    return norm


def _singular(reason: str) -> str:
    return (
        f"The operator is singular, {reason}: add a multiple of the identity, "
        "`A + c * Identity(n)`."
    )
