"""Operators that wrap another one."""

from dataclasses import dataclass

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.structures.composed import Composed


@dataclass(frozen=True, eq=False, repr=False)
class Wrapper(Composed):
    """An operator that wraps another one and has its properties, unless a subclass overrides them.

    A subclass gives `_matmat` and `T`.

    Args:
        operator: The wrapped operator.
    """

    operator: LinearOperator

    @property
    def shape(self) -> tuple[int, int]:
        """That of the operator."""
        return self.operator.shape

    @property
    def is_symmetric(self) -> bool:
        """Whether the operator is."""
        return self.operator.is_symmetric

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the operator is."""
        return self.operator.is_positive_semidefinite

    @property
    def layout(self) -> ParameterLayout | None:
        """That of the operator."""
        return self.operator.layout
