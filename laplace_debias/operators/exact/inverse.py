"""Closed forms of inverses and log-determinants."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import scale
from laplace_debias.operators.exact.spectrum import (
    NoClosedFormError,
    all_eigenvalues,
    all_square,
    apply_function,
    low_rank_eigh,
    or_none,
    symmetric_matrix,
)
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal, Identity
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Assumed, Permuted, assume


def exact_inverse(operator: LinearOperator) -> LinearOperator | None:
    """Invert an operator `[n, n]`, keeping its structure, or return None without a closed form.

    Raises:
        ValueError: If the operator is singular.
    """
    return or_none(_inverse, operator)


def exact_logdet(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """Compute the log-determinant of a symmetric operator, or return None if it has no closed form.

    Raises:
        ValueError: If an eigenvalue is not positive.
    """
    return or_none(_logdet, operator)


def _inverse(operator: LinearOperator) -> LinearOperator:
    """Invert an operator by its structure, or raise `NoClosedFormError`.

    An eigenvalue counts as zero if it is below the rounding error of the largest one, except in
    structures whose small eigenvalues are as precise as their large ones.
    """
    match operator:
        case Identity():
            return operator
        case Diagonal():
            # The entries of a diagonal are its eigenvalues, so even the smallest ones are precise.
            return Diagonal(_reciprocal_of_nonzero(operator.values))
        case EigenKronecker():
            # If a small prior precision was added to the curvature, the smallest eigenvalues are
            # about as large and as precise as the prior precision.
            added = operator.added
            is_damped = bool(added > 0) and bool((operator.magnitudes >= added).all())
            if is_damped:
                return operator.apply(_reciprocal_of_nonzero)
            return operator.apply(_reciprocal_above_rounding)
        case Dense():
            return _inverse_of_matrix(operator)
        case Kronecker():
            return Kronecker(*map(_inverse, all_square(operator.factors)))
        case BlockDiagonal():
            return operator.map(lambda _, block: _inverse(block))
        case LowRankPlusDiagonal():
            return _inverse_of_low_rank(operator)
        case Scaled():
            # This rejects the scalar zero.
            _reciprocal_of_nonzero(torch.as_tensor(operator.scalar, dtype=operator.dtype)[None])
            return scale(_inverse(operator.operator), 1 / operator.scalar)
        case Assumed():
            return assume(
                _inverse(operator.operator),
                symmetric=True,
                positive_semidefinite=operator.positive_semidefinite,
            )
        case Permuted():
            return operator.replaced(_inverse(operator.operator))
    return apply_function(operator, _reciprocal_above_rounding)


def _inverse_of_matrix(operator: Dense) -> LinearOperator:
    """Invert a matrix by its LU factorisation; its condition number must be below 1 / eps."""
    matrix = operator.matrix
    if not len(matrix):
        return operator
    LU, pivots, info = torch.linalg.lu_factor_ex(matrix)
    if bool(info != 0):
        raise ValueError(_singular("because a pivot of its factorisation is zero"))
    inverse = torch.linalg.lu_solve(LU, pivots, torch.eye(len(matrix)).to(matrix))
    condition = torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(inverse, 1)
    if not bool(condition < 1 / torch.finfo(matrix.dtype).eps):
        raise ValueError(
            _singular(f"in {matrix.dtype}, because its condition number is {condition:.1e}")
        )
    return Dense((inverse + inverse.T) / 2 if operator.is_symmetric else inverse)


def _inverse_of_low_rank(operator: LowRankPlusDiagonal) -> LinearOperator:
    """Invert U diag(m) Uᵀ + D, or raise `NoClosedFormError` if an entry of D is not positive.

    If D is a multiple of the identity, it can have any sign.
    """
    magnitudes = operator.magnitudes
    diagonal = operator.diagonal
    has_positive_diagonal = bool((diagonal > 0).all())
    reciprocal = _reciprocal_above_rounding
    if has_positive_diagonal and bool((magnitudes >= 0).all()):
        # The eigenvalues are sums in which nothing cancels, so even small ones are precise.
        reciprocal = _reciprocal_of_nonzero
    if diagonal.ndim == 0:
        return apply_function(operator, reciprocal)
    if not has_positive_diagonal:
        raise NoClosedFormError
    # Apply the Woodbury identity to D^-½ A D^-½, for which it is a function of the eigenvalues.
    # This is accurate even if the scales of the two parts are very different.
    root = diagonal.rsqrt()[:, None]
    values, vectors = low_rank_eigh(operator, root)
    return LowRankPlusDiagonal(
        root * vectors, -values * reciprocal(1 + values), diagonal.reciprocal()
    )


def _logdet(operator: LinearOperator) -> Tensor:
    """Compute the log-determinant from the structure, or raise `NoClosedFormError`."""
    match operator:
        case Dense():
            root, info = torch.linalg.cholesky_ex(symmetric_matrix(operator))
            # `info` is 0 unless the factorisation stopped at a minor that is not positive.
            if bool(info == 0):
                return 2 * root.diagonal().log().sum()
        case BlockDiagonal():
            return torch.stack([_logdet(block) for block in operator.blocks.values()]).sum()
        case LowRankPlusDiagonal(diagonal=diagonal) if bool((diagonal > 0).all()):
            # Use the matrix determinant lemma. A is positive definite if and only if I +
            # D^-½UMUᵀD^-½ is.
            ratios, _ = low_rank_eigh(operator, diagonal.reshape(-1, 1).rsqrt())
            return diagonal.expand(operator.shape[0]).log().sum() + _checked_log(1 + ratios).sum()
        case Assumed() | Permuted():
            return _logdet(operator.operator)
    return _checked_log(all_eigenvalues(operator)).sum()


def _checked_log(values: Tensor) -> Tensor:
    """Compute the logarithms of eigenvalues, and raise an error if one is not positive."""
    if not bool((values > 0).all()):
        raise ValueError(
            "The operator is not positive definite, because its smallest eigenvalue is about "
            f"{values.min().item():.3g}. Add a multiple of the identity, `A + c * Identity(n)`, "
            "that makes it positive definite."
        )
    return values.log()


def _reciprocal_of_nonzero(values: Tensor) -> Tensor:
    """Invert eigenvalues that are all precise, so that only an exact zero is singular."""
    if bool((values == 0).any()):
        raise ValueError(_singular("because an eigenvalue is zero"))
    return values.reciprocal()


def _reciprocal_above_rounding(values: Tensor) -> Tensor:
    """Invert eigenvalues that are only as precise as the rounding error of the largest one.

    The largest allowed condition number is the same as for a dense matrix.
    """
    if values.numel() == 0:
        return values
    sizes = values.abs()
    largest = float(sizes.amax())
    if largest == 0:
        raise ValueError(_singular("because all of its eigenvalues are zero"))
    if bool((sizes <= torch.finfo(values.dtype).eps * largest).any()):
        ratio = float(sizes.amin()) / largest
        raise ValueError(
            _singular(f"in {values.dtype}, because an eigenvalue is {ratio:.1e} times the largest")
        )
    return values.reciprocal()


def _singular(reason: str) -> str:
    return (
        f"The operator is singular {reason}. Add a multiple of the identity, `A + c * Identity(n)`."
    )
