"""Diagonal matrices."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import Scalar, add, multiply, scale, shift
from laplace_debias.operators.structures.composed import Symmetric
from laplace_debias.system.checks import check_is


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Symmetric):
    """A diagonal matrix.

    Args:
        values: The diagonal, `[n]`.

    Raises:
        ValueError: If the values are not a vector.
    """

    values: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        check_is(self.values, "the values of Diagonal", Tensor)
        if self.values.ndim != 1 or not self.values.is_floating_point():
            raise ValueError(
                "A diagonal is a vector of real floating numbers, got shape "
                f"{tuple(self.values.shape)} and {self.values.dtype}: a matrix goes into Dense."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Both the number of values."""
        return len(self.values), len(self.values)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether no value is negative."""
        return bool((self.values >= 0).all())

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.values[:, None] * matrix


@add.register(Diagonal, Diagonal)
def _(left: Diagonal, right: Diagonal) -> LinearOperator:
    return Diagonal(left.values + right.values)


@multiply.register(Diagonal, Diagonal)
def _(left: Diagonal, right: Diagonal) -> LinearOperator:
    return Diagonal(left.values * right.values)


@scale.register
def _(operator: Diagonal, scalar: Scalar) -> LinearOperator:
    return Diagonal(scalar * operator.values)


@shift.register
def _(operator: Diagonal, scalar: Scalar) -> LinearOperator | None:
    return Diagonal(operator.values + scalar)
