"""Operators that wrap another operator: assumptions, sub-matrices and permutations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from laplace_debias.operators.base import Joined, LinearOperator, check_square
from laplace_debias.operators.dispatch import Scalar, add, multiply, same, scale, shift, submatrix
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.structures.dense import Dense
from laplace_debias.system.checks import check_is


@dataclass(eq=False, repr=False)
class Wrapper(Joined):
    """An operator that wraps another operator and, by default, has the same properties.

    A subclass defines `_matmat` and `T`.
    """

    operator: LinearOperator

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the wrapped operator."""
        return self.operator.shape

    @property
    def layout(self) -> ParameterLayout | None:
        """The layout of the wrapped operator."""
        return self.operator.layout


class SelfAdjoint(Wrapper):
    """A wrapper that is symmetric."""

    is_symmetric = True

    @property
    def T(self) -> "SelfAdjoint":  # noqa: N802
        """The operator itself."""
        return self


@dataclass(eq=False, repr=False)
class Assumed(SelfAdjoint):
    """An operator that is declared symmetric, because its structure cannot show it."""

    positive_semidefinite: bool

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the operator is assumed to be positive semi-definite."""
        return self.positive_semidefinite

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator @ matrix


def assume(
    operator: LinearOperator, symmetric: bool = False, positive_semidefinite: bool = False
) -> LinearOperator:
    """Declare properties of an operator without checking them.

    A dense matrix is replaced by its symmetric part.

    Args:
        operator: The operator, `[n, n]`.
        symmetric: Whether to declare that the operator equals its adjoint.
        positive_semidefinite: Whether to declare that the operator is symmetric and has no negative
            eigenvalue.

    Raises:
        TypeError: If the argument is not an operator.
        ValueError: If the operator is not square.

    Example:
        >>> import torch
        >>> from laplace_debias.operators import Dense, assume
        >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> assume(Dense(X.T @ X), positive_semidefinite=True).is_positive_semidefinite
        True
    """
    check_is(operator, "the operator of `assume`", LinearOperator)
    check_square(operator)
    if isinstance(operator, Dense) and (symmetric or positive_semidefinite):
        operator = Dense((operator.matrix + operator.matrix.T) / 2)
    semidefinite = positive_semidefinite or operator.is_positive_semidefinite
    has_them = operator.is_symmetric and operator.is_positive_semidefinite == semidefinite
    if has_them or not (symmetric or semidefinite):
        return operator
    return Assumed(operator, semidefinite)


@dataclass(eq=False, repr=False)
class SubMatrix(Wrapper):
    """Selected rows and columns of an operator.

    A product costs as much as one with the full operator.

    Args:
        operator: The operator, `[m, n]`.
        rows: Indices of rows, in any order, with or without repetitions.
        columns: Indices of columns.
    """

    rows: Int[Tensor, " rows"]
    columns: Int[Tensor, " columns"]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of selected rows and columns."""
        return len(self.rows), len(self.columns)

    @property
    def is_symmetric(self) -> bool:
        """Whether the sub-matrix is known to be symmetric."""
        return self.operator.is_symmetric and self.rows.equal(self.columns)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the sub-matrix is known to be positive semi-definite."""
        return self.operator.is_positive_semidefinite and self.rows.equal(self.columns)

    @property
    def layout(self) -> None:
        """Always None, because the selection can contain parts of parameters."""

    @property
    def T(self) -> "SubMatrix":  # noqa: N802
        """The sub-matrix of the adjoint."""
        return SubMatrix(self.operator.T, self.columns, self.rows)

    def _matmat(self, matrix: Tensor) -> Tensor:
        zeros = matrix.new_zeros(self.operator.shape[1], matrix.shape[1])
        return (self.operator @ zeros.index_add(0, self.columns, matrix))[self.rows]


@submatrix.register
def _(operator: LinearOperator, rows: Tensor, columns: Tensor) -> LinearOperator:
    return SubMatrix(operator, rows, columns)


@submatrix.register
def _(operator: SubMatrix, rows: Tensor, columns: Tensor) -> LinearOperator:
    return submatrix(operator.operator, operator.rows[rows], operator.columns[columns])


@dataclass(eq=False, repr=False)
class Permuted(Wrapper):
    r"""A square operator whose rows and columns are reordered, $P^\top A P$.

    P is defined by $(Pv)_i = v_{\text{order}_i}$. Unlike a product of three operators, this
    operator keeps the structure of A: multiples of the identity are added to A, and inverses, roots
    and other functions are computed from A.

    Args:
        operator: A, `[n, n]`.
        order: For each row of A, its index in this operator, `[n]`, which is a permutation of 0 …
            n−1. None if the order is unchanged.
        layout: How named parameters correspond to the rows and columns of this operator; None if
            they do not.

    Raises:
        ValueError: If A is not square, the order is not a permutation of its rows, or the layout
            has a different size.
    """

    order: Int[Tensor, " n"] | None = None
    layout: ParameterLayout | None = None

    def __post_init__(self) -> None:
        n = self.operator.shape[0]
        if self.operator.shape[1] != n:
            raise ValueError(
                f"Only a square operator can be permuted, but this one has shape "
                f"{self.operator.shape}. Pass a square operator."
            )
        if self.order is not None and not self.order.sort().values.equal(
            torch.arange(n, device=self.order.device)
        ):
            raise ValueError(
                f"`order` must contain every number from 0 to {n - 1} once. Pass a permutation."
            )
        if self.order is not None:
            self.order = self.order.long()
        if self.layout is not None and self.layout.size != n:
            raise ValueError(
                f"The layout has {self.layout.size} parameters, but the operator has {n} "
                "rows. Pass a layout with one parameter per row."
            )

    @property
    def T(self) -> "Permuted":  # noqa: N802
        """The adjoint, permuted like the operator."""
        return self.replaced(self.operator.T)

    def _matmat(self, matrix: Tensor) -> Tensor:
        if self.order is None:
            return self.operator @ matrix
        return self.permuted(self.operator @ matrix[self.order])

    def permuted(self, rows: Tensor) -> Tensor:
        """Reorder the rows of a tensor from the order of A to the order of this operator."""
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self.order, rows)

    def replaced(self, operator: LinearOperator) -> "Permuted":
        """Replace A by `operator`, and keep the order of the rows and columns."""
        return Permuted(operator, self.order, self.layout)


def _jointly(
    combine: Callable[[LinearOperator, LinearOperator], LinearOperator],
    left: Permuted,
    right: Permuted,
) -> LinearOperator | None:
    """Combine the operators if both have the same order and layout."""
    if not same(left.order, right.order) or left.layout != right.layout:
        return None
    return left.replaced(combine(left.operator, right.operator))


add.register(Permuted, Permuted)(partial(_jointly, add))
multiply.register(Permuted, Permuted)(partial(_jointly, multiply))


@scale.register
def _(operator: Permuted, scalar: Scalar) -> LinearOperator:
    return operator.replaced(scale(operator.operator, scalar))


@shift.register
def _(operator: Permuted, scalar: Scalar) -> LinearOperator | None:
    shifted = shift(operator.operator, scalar)
    return None if shifted is None else operator.replaced(shifted)
