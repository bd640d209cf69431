"""Sets of orthonormal directions: coordinate axes, a basis, or fewer directions than dimensions."""

from abc import ABC, abstractmethod
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor


class Directions(ABC):
    r"""Orthonormal directions in d dimensions, which form one side of an `EigenKronecker`.

    Every direction has a magnitude, such as the curvature along it, and a vector has a coordinate
    along every direction. Thin directions have more coordinates and fewer magnitudes; see
    `ThinBasis`.

    Attributes:
        size: d, the dimension of the space.
        num_magnitudes: The number of magnitudes.
        num_coordinates: The number of coordinates of a vector.
        multiplicity: The number of orthogonal directions that share the last magnitude.
    """

    size: int
    num_magnitudes: int
    num_coordinates: int
    multiplicity: int = 1

    @staticmethod
    def from_columns(U: Float[Tensor, "*groups d r"]) -> "Basis | ThinBasis":
        """Make directions from the columns of a matrix."""
        if is_thin(U):
            return ThinBasis(U)
        return Basis(U)

    @staticmethod
    def from_columns_or_axes(U: Float[Tensor, "*groups d r"] | None, num_axes: int) -> "Directions":
        """Make directions from the columns of a matrix, or coordinate axes if the matrix is None.

        Args:
            U: The matrix, or None.
            num_axes: The number of coordinate axes.
        """
        if U is None:
            return Axes(num_axes)
        return Directions.from_columns(U)

    @abstractmethod
    def coordinates(self, rows: Float[Tensor, "*n d"]) -> Float[Tensor, "*n coordinates"]:
        """Compute the coordinates of rows `[*n, d]` or `[*n, groups, d]`."""

    @abstractmethod
    def coordinates_of_columns(
        self, columns: Float[Tensor, "*groups n d k"]
    ) -> Float[Tensor, "*groups n coordinates k"]:
        """Compute the coordinates of the columns of n matrices."""

    @abstractmethod
    def rotate(self, matrices: Tensor, dim: int) -> Tensor:
        """Replace one dimension of matrices `[*batch, *groups, i, j]` by coordinates.

        Args:
            matrices: The matrices.
            dim: -2 for the coordinates of their columns, -1 for the coordinates of their rows.
        """

    @abstractmethod
    def rotate_back(self, coordinates: Tensor, dim: int) -> Tensor:
        """Compute the matrices with the given coordinates; the inverse of `rotate`."""

    def repeat_last(self, magnitudes: Tensor, dim: int) -> Tensor:
        """Return one magnitude per coordinate, repeating the last one if it is shared."""
        return magnitudes

    def pool(self, squares: Float[Tensor, "*n coordinates"]) -> Float[Tensor, "*n magnitudes"]:
        """Average squared coordinates over directions that share a magnitude."""
        return squares

    def trace(self, magnitudes: Float[Tensor, "*n magnitudes"]) -> Float[Tensor, "*n"]:
        """Sum the magnitudes of all directions."""
        return magnitudes.sum(-1)

    def multiplicities(self, like: Tensor) -> Float[Tensor, " magnitudes"]:
        """Return the number of directions that share each magnitude."""
        return like.new_ones(self.num_magnitudes)


class Axes(Directions):
    """The coordinate axes.

    Args:
        size: The dimension of the space.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_magnitudes = size
        self.num_coordinates = size

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return rows

    def coordinates_of_columns(self, columns: Tensor) -> Tensor:
        """Return the columns unchanged."""
        return columns

    def rotate(self, matrices: Tensor, dim: int) -> Tensor:
        """Return the matrices unchanged."""
        return matrices

    def rotate_back(self, coordinates: Tensor, dim: int) -> Tensor:
        """Return the coordinates unchanged."""
        return coordinates


class Basis(Directions):
    """An orthonormal basis.

    Args:
        U: The basis vectors as columns, `[*groups, d, d]`.
    """

    def __init__(self, U: Float[Tensor, "*groups d d"]) -> None:
        self.U = U
        self.size = U.shape[-1]
        self.num_magnitudes = self.size
        self.num_coordinates = self.size

    def coordinates(self, rows: Tensor) -> Tensor:
        """Multiply the rows by U."""
        return _product_of_rows(rows, self.U)

    def coordinates_of_columns(self, columns: Tensor) -> Tensor:
        """Multiply the columns by the transpose of U."""
        return self.U.unsqueeze(-3).mT @ columns

    def rotate(self, matrices: Tensor, dim: int) -> Tensor:
        """Multiply the matrices by U from the right, or by the transpose of U from the left."""
        return _product_of_matrices(matrices, self.U, dim)

    def rotate_back(self, coordinates: Tensor, dim: int) -> Tensor:
        """Multiply the coordinates by the transpose of U from the right, or by U from the left."""
        return _product_of_matrices(coordinates, self.U.mT, dim)

    def frame(self) -> Float[Tensor, "*groups d d"]:
        """Return U, because a basis is its own frame."""
        return self.U


class ThinBasis(Directions):
    r"""A set of r < d orthonormal directions, which do not span the space.

    There are r + 1 magnitudes; the last one is shared by all directions orthogonal to U. A vector x
    has r + d coordinates: $U^\top x$, and then $x - U U^\top x$. They are its products with the
    frame $F = [U, I - U U^\top]$, for which $F F^\top = I$. The squares of the second part are
    accurate, whereas the difference $\|x\|^2 - \|U^\top x\|^2$ would suffer from cancellation.

    Args:
        U: The directions as columns, `[*groups, d, r]`.
    """

    def __init__(self, U: Float[Tensor, "*groups d r"]) -> None:
        self.U = U
        self.size, self.rank = U.shape[-2:]
        self.num_magnitudes = self.rank + 1
        self.num_coordinates = self.rank + self.size
        self.multiplicity = self.size - self.rank

    def split(
        self, rows: Float[Tensor, "*n d"]
    ) -> tuple[Float[Tensor, "*n r"], Float[Tensor, "*n d"]]:
        r"""Compute both parts of the coordinates, $U^\top x$ and $x - U U^\top x$."""
        along = _product_of_rows(rows, self.U)
        return along, _product_of_rows(along, self.U.mT).neg_().add_(rows)

    def coordinates(self, rows: Tensor) -> Tensor:
        """Compute both parts of the coordinates of rows, one after the other."""
        return torch.cat(self.split(rows), -1)

    def coordinates_of_columns(self, columns: Tensor) -> Tensor:
        """Compute both parts of the coordinates of columns, one below the other."""
        U = self.U.unsqueeze(-3)
        along = U.mT @ columns
        return torch.cat([along, (U @ along).neg_().add_(columns)], -2)

    def rotate(self, matrices: Tensor, dim: int) -> Tensor:
        """Compute both parts of the coordinates along one dimension."""
        along = _product_of_matrices(matrices, self.U, dim)
        return torch.cat([along, matrices - _product_of_matrices(along, self.U.mT, dim)], dim)

    def rotate_back(self, coordinates: Tensor, dim: int) -> Tensor:
        """Compute F C = U (C₁ − Uᵀ C₂) + C₂, where C₁ and C₂ are the two parts of C."""
        along, orthogonal = coordinates.tensor_split([self.rank], dim)
        along = along - _product_of_matrices(orthogonal, self.U, dim)
        return _product_of_matrices(along, self.U.mT, dim) + orthogonal

    def repeat_last(self, magnitudes: Tensor, dim: int) -> Tensor:
        """Repeat the last magnitude d times, along one dimension."""
        last = magnitudes.narrow(dim, -1, 1).repeat_interleave(self.size, dim)
        return torch.cat([magnitudes.narrow(dim, 0, self.rank), last], dim)

    def pool(self, squares: Tensor) -> Tensor:
        """Average the second part of the squares over the d − r orthogonal directions."""
        along, orthogonal = squares.split([self.rank, self.size], -1)
        return torch.cat([along, orthogonal.sum(-1, keepdim=True) / self.multiplicity], -1)

    def trace(self, magnitudes: Tensor) -> Tensor:
        """Sum the magnitudes; the last magnitude counts once for each direction that shares it."""
        return magnitudes[..., :-1].sum(-1) + self.multiplicity * magnitudes[..., -1]

    def multiplicities(self, like: Tensor) -> Tensor:
        """Count the directions that share each magnitude: 1, and d − r for the last magnitude."""
        counts = super().multiplicities(like)
        counts[-1] = self.multiplicity
        return counts

    def frame(self) -> Float[Tensor, "*groups d coordinates"]:
        """Compute the frame F."""
        complement = torch.eye(self.size).to(self.U) - self.U @ self.U.mT
        return torch.cat([self.U, complement], -1)

    def complete_basis(self) -> Float[Tensor, "*groups d d"]:
        """Complete the directions to an orthonormal basis."""
        Q = torch.linalg.qr(self.U, mode="complete").Q
        return torch.cat([self.U, Q[..., self.rank :]], -1)


def is_thin(U: Tensor | None) -> TypeGuard[Tensor]:
    """Whether U is a matrix with fewer columns (directions) than rows."""
    return U is not None and U.shape[-1] < U.shape[-2]


def _product_of_rows(rows: Tensor, U: Tensor) -> Tensor:
    """Multiply rows, `[*n, d]` or `[*n, groups, d]`, by U from the right."""
    return rows @ U if U.ndim == 2 else torch.einsum("...gd,gde->...ge", rows, U)


def _product_of_matrices(matrices: Tensor, U: Tensor, dim: int) -> Tensor:
    """Multiply matrices by U from the right (dim -1), or by Uᵀ from the left (dim -2)."""
    if U.ndim == 2:
        return matrices @ U if dim == -1 else U.mT @ matrices
    # Use `einsum` if there are several groups, because `@` would copy U for every matrix.
    if dim == -1:
        return torch.einsum("...gij,gjk->...gik", matrices, U)
    return torch.einsum("gij,...gjk->...gik", U.mT, matrices)
