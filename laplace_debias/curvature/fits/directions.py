"""Directions: the eigenbases of Kronecker factors, as far as the data determine them."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.degenerate import average_degenerate, numerical_rank
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.structures.directions import Directions

_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


class Eigenpairs(NamedTuple):
    """The directions of a Kronecker factor, and its curvature along them.

    Eigenvectors are columns in descending order of the eigenvalues; None means the coordinate axes.
    Thin directions (r < d) do not span the null space. There are then r + 1 eigenvalues, of which
    the last is the mean eigenvalue of the remaining directions.
    """

    eigenvalues: Float[Tensor, "*groups values"]
    U: Float[Tensor, "*groups d r"] | None

    @property
    def directions(self) -> Directions:
        """The directions as an object that computes coordinates."""
        return Directions.from_columns_or_axes(self.U, self.eigenvalues.shape[-1])

    def to(self, dtype: torch.dtype) -> "Eigenpairs":
        """Convert the directions and the eigenvalues to another dtype."""
        U = None if self.U is None else self.U.to(dtype)
        return Eigenpairs(self.eigenvalues.to(dtype), U)


class Eigenbasis(NamedTuple):
    """The directions of a block, and the curvature of its factors G and A along them."""

    G: Eigenpairs
    A: Eigenpairs

    def to(self, dtype: torch.dtype) -> "Eigenbasis":
        """Convert the directions and the eigenvalues to another dtype."""
        return Eigenbasis(self.G.to(dtype), self.A.to(dtype))

    def pooled(
        self, measured: Float[Tensor, "*groups rows columns"], dtype: torch.dtype
    ) -> Float[Tensor, "*groups rows columns"]:
        """Average magnitudes over directions whose eigenvalues nearly coincide.

        The data do not determine which basis of their eigenspace an eigendecomposition returns.

        Args:
            measured: Curvature along each pair of directions of G and A.
            dtype: The dtype in which the factors were computed. Its rounding determines which
                eigenvalues coincide.
        """
        # Eigenvalues of the block are products of the eigenvalues of G and A.
        largest_G = self.G.eigenvalues.amax(-1, keepdim=True)
        largest_A = self.A.eigenvalues.amax(-1, keepdim=True)
        if self.G.U is not None:
            eigenvalues = self.G.eigenvalues * largest_A
            multiplicity = self.G.directions.multiplicity
            measured = average_degenerate(measured, eigenvalues, dtype, multiplicity)
        if self.A.U is not None:
            eigenvalues = self.A.eigenvalues * largest_G
            multiplicity = self.A.directions.multiplicity
            measured = average_degenerate(measured.mT, eigenvalues, dtype, multiplicity).mT
        # A file stores magnitudes contiguously, and the rounding of sums of products depends on the
        # layout in memory. With the same layout, a posterior and its copy from a file give
        # bit-identical results.
        return measured.contiguous()


def outer(
    curvature_G: Float[Tensor, "*groups d_out"], curvature_A: Float[Tensor, "*groups d_in"]
) -> Float[Tensor, "*groups d_out d_in"]:
    """Compute all products of two factors' curvatures, group by group."""
    return curvature_G.unsqueeze(-1) * curvature_A.unsqueeze(-2)


def descending_eigenpairs(factor: Factor, description: str = "the factor") -> Eigenpairs:
    """Compute the eigenpairs of a factor; see `descending_eigenpairs_of_each`."""
    return descending_eigenpairs_of_each([factor], description)[0]


def descending_eigenpairs_of_each(factors: Sequence[Factor], description: str) -> list[Eigenpairs]:
    """Compute the eigenpairs of several factors of one shape together.

    The result depends on the form of the factors:

    - Matrices yield all eigenpairs, in descending order of the eigenvalues.
    - Rows (`GramFactor`) yield the same, computed from the rows: first the eigenvectors that span
      the rows, then a basis of the null space.
    - Wide rows yield thin directions: only the eigenvectors that span the rows, and one more
      eigenvalue, the mean over the remaining directions.
    - Diagonals yield their entries, in their order, along the coordinate axes.

    The sign of an eigenvector is LAPACK's choice, but samples depend on it. Therefore, every
    eigenvector is given a positive product with one fixed vector, so that samples are the same on
    all machines.
    """
    if isinstance(factors[0], GramFactor):
        gram_factors = cast("Sequence[GramFactor]", factors)
        columns = torch.stack([factor.rows for factor in gram_factors]).movedim(1, -1)
        if factors[0].has_thin_directions:
            return _thin_eigenpairs(gram_factors, columns, description)
        return list(map(Eigenpairs, *complete_eigenpairs(columns, description)))
    matrices = cast("list[Tensor]", list(factors))
    if matrices[0].ndim == 1:
        return [Eigenpairs(diagonal, None) for diagonal in matrices]
    # A single matrix is decomposed without `stack`, which would copy it.
    stacked = torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)
    values, vectors = eigh(stacked, description)
    # Negative values are rounding errors, and are replaced by zero.
    values = values.flip(-1).clamp_min(0)
    return list(map(Eigenpairs, values, _fix_signs(vectors.flip(-1))))


def complete_eigenpairs(
    columns: Float[Tensor, "*batch d n"], description: str
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d d"]]:
    """Compute all eigenpairs of `columns columnsᵀ` for n ≤ d columns, in descending order.

    The pairs of the null space come last.
    """
    d, n = columns.shape[-2:]
    Q, R = torch.linalg.qr(columns, mode="complete")
    R = R[..., :n, :]
    values, vectors = eigh(R @ R.mT, description)
    values = values.flip(-1).clamp_min(0)
    directions = (Q[..., :n] @ vectors).flip(-1)
    # Each eigenvector is contiguous in memory, as in the results of torch.
    U = torch.cat([directions.mT, Q[..., n:].mT], -2).mT
    return F.pad(values, (0, d - n)), _fix_signs(U)


def _thin_eigenpairs(
    factors: Sequence[GramFactor], columns: Float[Tensor, "factors d n"], description: str
) -> list[Eigenpairs]:
    """Compute the eigenpairs that span the rows, and the mean eigenvalue of the other directions.

    `columns` are the rows of the factors, transposed.
    """
    d = columns.shape[-2]
    Q, R = torch.linalg.qr(columns)
    values, vectors = eigh(R @ R.mT, description)
    values = values.flip(-1).clamp_min(0)
    directions = (Q @ vectors).flip(-1)
    pairs: list[Eigenpairs] = []
    for factor, factor_values, U in zip(factors, values, directions, strict=True):
        rank = max(1, numerical_rank(factor_values))
        eigenvalues = F.pad(factor_values[:rank], (0, 1))
        eigenvalues[-1] = factor.residual_trace / (d - rank)
        pairs.append(Eigenpairs(eigenvalues, _fix_signs(U[:, :rank].mT.contiguous().mT)))
    return pairs


def _fix_signs(vectors: Float[Tensor, "*groups d r"]) -> Float[Tensor, "*groups d r"]:
    """Flip eigenvectors in place so that each has a positive product with a fixed vector."""
    # The entries follow no pattern that eigenvectors may have. A vector of ones, for example, is
    # orthogonal to every [1, -1], whose sign would then depend on rounding.
    size = vectors.shape[-2]
    numbers = torch.arange(1, size + 1, dtype=vectors.dtype, device=vectors.device)
    products = (numbers * _GOLDEN_RATIO).frac() @ vectors
    return vectors.mul_(torch.where(products < 0, -1.0, 1.0).to(vectors).unsqueeze(-2))
