"""Sub-matrices."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import submatrix
from laplace_debias.operators.structures.wrapper import Wrapper


@dataclass(frozen=True, eq=False, repr=False)
class SubMatrix(Wrapper):
    """Rows and columns of an operator; a product costs one of the whole.

    Args:
        operator: The operator, `[m, n]`.
        rows: Indices of rows, in any order, with or without repetitions.
        columns: Indices of columns.
    """

    rows: Int[Tensor, " rows"]
    columns: Int[Tensor, " columns"]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of indices."""
        return len(self.rows), len(self.columns)

    @property
    def is_symmetric(self) -> bool:
        """True if the operator is, and rows and columns are the same."""
        return self.operator.is_symmetric and self.rows.equal(self.columns)

    @property
    def is_positive_semidefinite(self) -> bool:
        """True if the operator is, and rows and columns are the same."""
        return self.operator.is_positive_semidefinite and self.rows.equal(self.columns)

    @property
    def layout(self) -> None:
        """None: parameters lie in it in parts, if at all."""

    @property
    def T(self) -> "SubMatrix":  # noqa: N802
        """The sub-matrix of the adjoint."""
        return SubMatrix(self.operator.T, self.columns, self.rows)

    def _matmat(self, matrix: Tensor) -> Tensor:
        whole = matrix.new_zeros(self.operator.shape[1], matrix.shape[1])
        return (self.operator @ whole.index_add(0, self.columns, matrix))[self.rows]


@submatrix.register
def _(operator: LinearOperator, rows: Tensor, columns: Tensor) -> LinearOperator:
    return SubMatrix(operator, rows, columns)


@submatrix.register
def _(operator: SubMatrix, rows: Tensor, columns: Tensor) -> LinearOperator:
    return submatrix(operator.operator, operator.rows[rows], operator.columns[columns])
