"""Operators that are a low-rank matrix plus a diagonal."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator, Symmetric
from laplace_debias.operators.dispatch import Scalar, add, scale, shift
from laplace_debias.operators.structures.diagonal import Diagonal
from laplace_debias.operators.structures.eigen_kronecker import Spectrum


@dataclass(eq=False, repr=False, init=False)
class LowRankPlusDiagonal(Symmetric):
    r"""The symmetric operator $U \mathrm{diag}(m) U^\top + \mathrm{diag}(d)$.

    Args:
        U: `[n, k]`, a tensor or an operator; its columns need not be orthonormal.
        magnitudes: m, `[k]`, which may be negative.
        diagonal: d, `[n]`, or one number for the whole diagonal.

    Raises:
        ValueError: If the shapes, dtypes or devices do not match, or the dtype is not a real
            floating-point dtype.
    """

    U: Float[Tensor, "n k"] | LinearOperator
    magnitudes: Float[Tensor, " k"]
    diagonal: Float[Tensor, " n"] | Float[Tensor, ""]

    def __init__(
        self,
        U: Tensor | LinearOperator,
        magnitudes: Tensor,
        diagonal: Float[Tensor, "*n"] | float,
    ) -> None:
        if not U.dtype.is_floating_point:
            raise ValueError(
                f"U must contain real floating-point numbers, got {U.dtype}. Convert U, the "
                "magnitudes and the diagonal."
            )
        if not isinstance(diagonal, Tensor):
            diagonal = torch.tensor(float(diagonal), dtype=U.dtype, device=U.device)
        if len(U.shape) != 2 or tuple(magnitudes.shape) != tuple(U.shape[1:]):
            raise ValueError(
                f"Magnitudes of shape {tuple(magnitudes.shape)} do not match U of shape "
                f"{tuple(U.shape)}. Pass magnitudes of shape [k] and U of shape [n, k]."
            )
        if diagonal.shape not in ((), (U.shape[0],)):
            raise ValueError(
                f"`diagonal` has shape {tuple(diagonal.shape)}. Pass one number, or a vector of "
                f"shape ({U.shape[0]},)."
            )
        tensors = (U, magnitudes, diagonal)
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise ValueError(
                "U, magnitudes and diagonal must have the same dtype and device. Convert them "
                "with `.to(...)`."
            )
        self.U = U
        self.magnitudes = magnitudes
        self.diagonal = diagonal

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, where n is the number of rows of U."""
        return self.U.shape[0], self.U.shape[0]

    @property
    def directions(self) -> Float[Tensor, "n k"]:
        """U as a tensor."""
        return self.U if isinstance(self.U, Tensor) else self.U.to_dense()

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the first term's eigenvalues and the diagonal's entries are all ≥ 0."""
        return bool((self.magnitudes >= 0).all() & (self.diagonal >= 0).all())

    @property
    def distinct_eigenvalues(self) -> Float[Tensor, " k_and_one"]:
        """The eigenvalues along the columns of U, and then the eigenvalue of all other directions.

        The columns of U must be orthonormal, and the diagonal one number.
        """
        if self.diagonal.ndim:
            raise ValueError(
                "The eigenvalues are known only if the diagonal is one number, but it is a vector. "
                "Use `linalg.eigsh`."
            )
        return torch.cat([self.magnitudes + self.diagonal, self.diagonal[None]])

    @property
    def multiplicities(self) -> Float[Tensor, " k_and_one"]:
        """The number of eigenvectors that share each of the `distinct_eigenvalues`."""
        counts = self.magnitudes.new_ones(len(self.magnitudes) + 1)
        counts[-1] = self.U.shape[0] - len(self.magnitudes)
        return counts

    def apply(self, function: Spectrum) -> "LowRankPlusDiagonal":
        """Apply a function to the eigenvalues, and keep the eigenvectors.

        The columns of U must be orthonormal, and the diagonal one number.
        """
        diagonal = function(self.diagonal)
        magnitudes = function(self.magnitudes + self.diagonal) - diagonal
        return LowRankPlusDiagonal(self.U, magnitudes, diagonal)

    def _matmat(self, matrix: Tensor) -> Tensor:
        coordinates = self.magnitudes[:, None] * (self.U.T @ matrix)
        return self.U @ coordinates + self.diagonal.reshape(-1, 1) * matrix


@add.register(LowRankPlusDiagonal, Diagonal, commutative=True)
def _(left: LowRankPlusDiagonal, right: Diagonal) -> LinearOperator:
    return LowRankPlusDiagonal(left.U, left.magnitudes, left.diagonal + right.values)


@scale.register
def _(operator: LowRankPlusDiagonal, scalar: Scalar) -> LinearOperator:
    # Restore the dtype, because the product of two 0-d tensors has the wider dtype of the two.
    diagonal = (scalar * operator.diagonal).to(operator.diagonal)
    return LowRankPlusDiagonal(operator.U, scalar * operator.magnitudes, diagonal)


@shift.register
def _(operator: LowRankPlusDiagonal, scalar: Scalar) -> LinearOperator | None:
    diagonal = (operator.diagonal + scalar).to(operator.diagonal)
    return LowRankPlusDiagonal(operator.U, operator.magnitudes, diagonal)
