"""Operators in another order of their rows and columns."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import Scalar, add, multiply, scale, shift
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.parts import same
from laplace_debias.operators.structures.wrapper import Wrapper


@dataclass(frozen=True, eq=False, repr=False)
class Permuted(Wrapper):
    r"""A square operator whose rows and columns lie in another order, $P^\top A P$.

    With P = `Permutation(order)`. Unlike the product of the three it keeps the structure of A in
    everything that is done to it: multiples of the identity are added to A, and inverses, roots
    and other functions are those of A.

    Args:
        operator: A, `[n, n]`.
        order: Where row i of A lies, `[n]`: a permutation of 0 … n−1. None if nothing moves.
        layout: How named parameters lie in the rows and columns, if they do.

    Raises:
        ValueError: If A is not square, the order is not a permutation of its rows, or the layout
            is of another size.
    """

    order: Int[Tensor, " n"] | None = None
    layout: ParameterLayout | None = None

    def __post_init__(self) -> None:
        n = self.operator.shape[0]
        if self.operator.shape[1] != n:
            raise ValueError(
                f"Only a square operator can be permuted, got shape {self.operator.shape}."
            )
        if self.order is not None and not self.order.sort().values.equal(
            torch.arange(n, device=self.order.device)
        ):
            raise ValueError(f"`order` must hold every number from 0 to {n - 1} once.")
        if self.layout is not None and self.layout.size != n:
            raise ValueError(f"A layout of {self.layout.size} parameters does not fit {n} rows.")

    @property
    def T(self) -> "Permuted":  # noqa: N802
        """The adjoint in the same order."""
        return self.replaced(self.operator.T)

    def _matmat(self, matrix: Tensor) -> Tensor:
        if self.order is None:
            return self.operator @ matrix
        return self.permuted(self.operator @ matrix[self.order])

    def permuted(self, rows: Tensor) -> Tensor:
        """Rows of the operator, `[n, ...]`, in the order of this one."""
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self.order, rows)

    def replaced(self, operator: LinearOperator) -> "Permuted":
        """Another operator in the same order."""
        return Permuted(operator, self.order, self.layout)


def _same_order(left: Permuted, right: Permuted) -> bool:
    return same(left.order, right.order) and left.layout == right.layout


@add.register(Permuted, Permuted)
def _(left: Permuted, right: Permuted) -> LinearOperator | None:
    if not _same_order(left, right):
        return None
    return left.replaced(left.operator + right.operator)


@multiply.register(Permuted, Permuted)
def _(left: Permuted, right: Permuted) -> LinearOperator | None:
    if not _same_order(left, right):
        return None
    return left.replaced(left.operator @ right.operator)


@scale.register
def _(operator: Permuted, scalar: Scalar) -> LinearOperator:
    return operator.replaced(scale(operator.operator, scalar))


@shift.register
def _(operator: Permuted, scalar: Scalar) -> LinearOperator | None:
    shifted = shift(operator.operator, scalar)
    return None if shifted is None else operator.replaced(shifted)
