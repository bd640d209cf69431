"""Closed forms of the trace, the diagonal and norms."""

from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.algebra import Scaled, Sum
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact.spectrum import (
    NoClosedFormError,
    all_square,
    eigenvalues,
    or_none,
)
from laplace_debias.operators.structures.block_diagonal import BlockDiagonal
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.operators.structures.diagonal import Diagonal, Identity
from laplace_debias.operators.structures.directions import Basis, ThinBasis
from laplace_debias.operators.structures.eigen_kronecker import EigenKronecker
from laplace_debias.operators.structures.kronecker import Kronecker
from laplace_debias.operators.structures.low_rank import LowRankPlusDiagonal
from laplace_debias.operators.structures.wrappers import Assumed, Permuted


def exact_trace(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """Compute the trace of an operator `[n, n]`, or return None if there is no closed form."""
    return or_none(_trace, operator)


def exact_diagonal(operator: LinearOperator) -> Float[Tensor, " n"] | None:
    """Compute the diagonal of an operator `[n, n]`, or return None if there is no closed form."""
    return or_none(_diagonal, operator)


def exact_frobenius_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """Compute the Frobenius norm of an operator, or return None if there is no closed form."""
    values = operator.matrix if isinstance(operator, Dense) else eigenvalues(operator)
    if values is None:
        return None
    # Compute in double precision, because the squares may be out of the range of single precision.
    return torch.linalg.vector_norm(values, dtype=torch.float64).to(values.dtype)


def exact_spectral_norm(operator: LinearOperator) -> Float[Tensor, ""] | None:
    """Compute an operator's largest singular value, or return None if there is no closed form."""
    values = operator.matrix if isinstance(operator, Dense) else eigenvalues(operator)
    if values is None:
        return None
    if values.numel() == 0:
        return values.new_zeros(())
    if isinstance(operator, Dense):
        return torch.linalg.matrix_norm(values, 2)
    return values.abs().amax()


def _trace(operator: LinearOperator) -> Tensor:
    """Compute the trace from the structure, or raise `NoClosedFormError`."""
    match operator:
        case EigenKronecker():
            return (operator.magnitudes * operator.multiplicities).sum()
        case BlockDiagonal():
            return torch.stack([_trace(block) for block in operator.blocks.values()]).sum()
        case Assumed() | Permuted():
            return _trace(operator.operator)
    return _diagonal(operator).sum()


def _diagonal(operator: LinearOperator) -> Tensor:
    """Compute the diagonal from the structure, or raise `NoClosedFormError`."""
    match operator:
        case Identity():
            return torch.ones(operator.n, dtype=operator.dtype, device=operator.device)
        case Diagonal():
            return operator.values.clone()
        case Dense():
            return operator.matrix.diagonal().clone()
        case EigenKronecker():
            entries = operator.expanded_magnitudes
            output_directions = operator.output_directions
            input_directions = operator.input_directions
            if isinstance(output_directions, Basis | ThinBasis):
                entries = output_directions.frame().square() @ entries
            if isinstance(input_directions, Basis | ThinBasis):
                entries = entries @ input_directions.frame().square().mT
            return entries.flatten().clone()
        case Kronecker():
            return reduce(torch.kron, map(_diagonal, all_square(operator.factors)))
        case BlockDiagonal():
            return torch.cat([_diagonal(block) for block in operator.blocks.values()])
        case LowRankPlusDiagonal():
            return operator.directions.square() @ operator.magnitudes + operator.diagonal
        case Sum():
            return reduce(torch.add, map(_diagonal, operator.terms))
        case Scaled():
            return operator.scalar * _diagonal(operator.operator)
        case Permuted():
            return operator.permuted(_diagonal(operator.operator))
        case Assumed():
            return _diagonal(operator.operator)
    raise NoClosedFormError
