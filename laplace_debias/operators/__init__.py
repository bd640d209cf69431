"""Linear algebra that knows no network."""

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.structured import BlockDiagonal, EigenKronecker

__all__ = ["BlockDiagonal", "EigenKronecker", "LinearOperator"]
