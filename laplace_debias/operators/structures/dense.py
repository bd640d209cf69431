"""Dense matrices."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import Composed, LinearOperator
from laplace_debias.operators.dispatch import Scalar, add, multiply, scale, shift, submatrix
from laplace_debias.operators.structures.diagonal import Diagonal
from laplace_debias.system.checks import check_is


@dataclass(eq=False, repr=False)
class Dense(Composed):
    """A matrix that stores all of its entries.

    The operator counts as symmetric if the matrix is exactly symmetric; use `assume` to declare
    other properties. Products of dense matrices are lazy, because applying the two factors of
    `[n, k] @ [k, n]` is cheaper than computing their product.

    Args:
        matrix: The matrix, `[m, n]`.

    Raises:
        TypeError: If the matrix is not a tensor.
        ValueError: If the tensor is not a matrix of real floating-point numbers.
    """

    matrix: Float[Tensor, "m n"]

    def __post_init__(self) -> None:
        check_is(self.matrix, "the matrix of Dense", Tensor)
        if self.matrix.ndim != 2 or not self.matrix.is_floating_point():
            raise ValueError(
                "Dense needs a matrix of real floating-point numbers, but got shape "
                f"{tuple(self.matrix.shape)} and {self.matrix.dtype}. Convert the matrix, or use "
                "Diagonal for a vector."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether the matrix equals its transpose exactly."""
        return self.matrix.equal(self.matrix.T)

    @property
    def T(self) -> "Dense":  # noqa: N802
        """The transposed matrix."""
        return Dense(self.matrix.T)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.matrix @ matrix

    def to_dense(self) -> Float[Tensor, "m n"]:
        """Return a copy of the matrix, `[m, n]`."""
        return self.matrix.clone()


@add.register(Dense, Dense)
def _(left: Dense, right: Dense) -> LinearOperator:
    return Dense(left.matrix + right.matrix)


@add.register(Dense, Diagonal, commutative=True)
def _(left: Dense, right: Diagonal) -> LinearOperator:
    return Dense(left.matrix + right.values.diag())


@multiply.register(Dense, Diagonal)
def _(left: Dense, right: Diagonal) -> LinearOperator:
    return Dense(left.matrix * right.values)


@multiply.register(Diagonal, Dense)
def _(left: Diagonal, right: Dense) -> LinearOperator:
    return Dense(left.values[:, None] * right.matrix)


@scale.register
def _(operator: Dense, scalar: Scalar) -> LinearOperator:
    return Dense(scalar * operator.matrix)


@shift.register
def _(operator: Dense, scalar: Scalar) -> LinearOperator | None:
    matrix = operator.matrix
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return Dense(matrix + scalar * eye)


@submatrix.register
def _(operator: Dense, rows: Tensor, columns: Tensor) -> LinearOperator:
    return Dense(operator.matrix[rows][:, columns])
