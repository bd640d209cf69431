"""Approximate inverses, given as operators or as functions."""

from collections.abc import Callable

from torch import Tensor

from laplace_debias.operators.base import LinearOperator

Preconditioner = LinearOperator | Callable[[Tensor], Tensor]


def precondition(preconditioner: Preconditioner | None, residual: Tensor) -> Tensor:
    """The preconditioner times residuals; the residuals themselves without one.

    Raises:
        ValueError: If the shape or the dtype changes.
    """
    if preconditioner is None:
        return residual
    if isinstance(preconditioner, LinearOperator):
        result = preconditioner @ residual
    else:
        result = preconditioner(residual)
    if result.shape != residual.shape or result.dtype != residual.dtype:
        raise ValueError(
            f"The preconditioner maps {tuple(residual.shape)} {residual.dtype} to "
            f"{tuple(result.shape)} {result.dtype}: it must keep shape and dtype."
        )
    return result
