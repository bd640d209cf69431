"""Kronecker-structured directions with free magnitudes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.operators.base import LinearOperator, Symmetric
from laplace_debias.operators.dispatch import Scalar, add, multiply, same, scale, shift

Spectrum = Callable[[Tensor], Tensor]
"""A function of eigenvalues, entry by entry, such as `torch.rsqrt`."""


@dataclass(eq=False, repr=False)
class EigenKronecker(Symmetric):
    r"""A symmetric operator whose eigenvectors are Kronecker products.

    $$(U_G \otimes U_A)\,\mathrm{diag}(\mathrm{vec}\,\Lambda)\,(U_G \otimes U_A)^\top$$

    on matrices $V$ of shape `[d_out, d_in]` flattened row-major, so that a product is
    $U_G[\Lambda \odot (U_G^\top V U_A)]U_A^\top$. K-FAC, EKFAC, their debiased forms, a bias
    block (`d_in = 1`) and a diagonal (no U) differ only in where the three parts come from.

    With a leading dimension, it is the block-diagonal operator of g such matrices, one for each
    group of a grouped convolution. They are multiplied all at once.

    A side may have a reduced rank ("thin"): U has r < d columns, and the last of r + 1 magnitudes
    belongs to all directions orthogonal to them. Then U in the formula is the frame
    $F = [U, I - U U^\top]$, `[d, r + d]`, with $F F^\top = I$, and Λ repeats the last magnitude d
    times (`in_frame`).

    Args:
        U_G: Orthonormal eigenvectors on the output side, as columns, `[*groups, d_out, r_G]`; None
            means the identity, whose directions are the coordinate axes.
        U_A: Orthonormal eigenvectors on the input side, as columns, `[*groups, d_in, r_A]`, or
            None.
        magnitudes: Λ, the curvature along each direction, `[d_out, d_in]` or `[g, d_out, d_in]`;
            a thin side has r + 1 rows or columns.
        added: The multiple of the identity that the magnitudes contain. If no magnitude is below
            it, it was added to a positive semi-definite operator, and small magnitudes are precise.
        trace_A: The trace of A (one per group) if the operator is a Kronecker product $G \otimes A$
            of positive semi-definite factors, which determines their scales; None if it is not, or
            if the scales are not known.
        share_A: With `trace_A`, the fraction of the examples that A is the mean over: K-FAC leaves
            out the examples that have no position in a layer. Products do not depend on this
            fraction.

    Raises:
        ValueError: If the shapes, dtypes or devices do not match.
    """

    U_G: Float[Tensor, "*groups d_out r_G"] | None
    U_A: Float[Tensor, "*groups d_in r_A"] | None
    magnitudes: Float[Tensor, "*groups rows columns"]
    added: Scalar = field(default=0.0, compare=False)
    trace_A: Float[Tensor, " *groups"] | None = field(default=None, compare=False)
    share_A: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        if self.magnitudes.ndim not in (2, 3):
            raise ValueError(
                f"`magnitudes` has shape {tuple(self.magnitudes.shape)}. Pass a matrix [d_out, "
                "d_in], or one for each group [g, d_out, d_in]."
            )
        *groups, rows, columns = self.magnitudes.shape
        for name, U, size in (("U_G", self.U_G, rows), ("U_A", self.U_A, columns)):
            expected = (*groups, size, size)
            if U is None:
                continue
            is_thinner = is_thin(U) and U.shape == (*groups, U.shape[-2], size - 1)
            if U.shape != expected and not is_thinner:
                raise ValueError(
                    f"Magnitudes of shape {tuple(self.magnitudes.shape)} do not match "
                    f"eigenvectors of shape {tuple(U.shape)}. Pass {name} of shape {expected}, "
                    f"or a thin {name} with {size - 1} columns."
                )
            if U.dtype != self.magnitudes.dtype or U.device != self.magnitudes.device:
                raise ValueError(
                    "U_G, U_A and the magnitudes must have the same dtype and device. Convert "
                    "them with `.to(...)`."
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape `[*groups, d_out, d_in]` of the matrices that the operator multiplies."""
        *groups, rows, columns = self.magnitudes.shape
        rows = rows if self.U_G is None else self.U_G.shape[-2]
        return (*groups, rows, columns if self.U_A is None else self.U_A.shape[-2])

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, where n is `d_out · d_in` times the number of groups."""
        size = math.prod(self.sizes)
        return size, size

    @property
    def distinct_eigenvalues(self) -> Float[Tensor, "*groups rows columns"]:
        """The magnitudes; all eigenvectors outside the span of a thin side share one."""
        return self.magnitudes

    @property
    def multiplicities(self) -> Float[Tensor, "rows columns"]:
        """The number of eigenvectors that share each of the `distinct_eigenvalues`."""
        return torch.outer(*self._side_multiplicities)

    @property
    def _side_multiplicities(self) -> tuple[Float[Tensor, " rows"], Float[Tensor, " columns"]]:
        """Number of directions of each side that share a row, and a column, of magnitudes."""
        counts = []
        for U, size in zip((self.U_G, self.U_A), self.magnitudes.shape[-2:], strict=True):
            side_counts = torch.ones(size, dtype=self.dtype, device=self.device)
            if is_thin(U):
                side_counts[-1] = U.shape[-2] - U.shape[-1]
            counts.append(side_counts)
        return counts[0], counts[1]

    @property
    def factor_eigenvalues(
        self,
    ) -> tuple[Float[Tensor, "*groups rows"], Float[Tensor, "*groups columns"]]:
        """The eigenvalues of G and of A; their products are the operator's eigenvalues.

        Raises:
            ValueError: If `trace_A` is None.
        """
        if self.trace_A is None:
            raise ValueError(
                "The scales of the operator's factors are unknown. Construct the "
                "operator with `trace_A=`."
            )
        counts_G, counts_A = self._side_multiplicities
        rows = self.magnitudes @ counts_A
        columns = self.magnitudes.mT @ counts_G
        trace_A = self.trace_A.unsqueeze(-1)
        trace_G = (rows @ counts_G).unsqueeze(-1) / trace_A
        return (rows / trace_A).nan_to_num(0.0), (columns / trace_G).nan_to_num(0.0)

    @property
    def in_frame(self) -> Float[Tensor, "*groups rows columns"]:
        """The eigenvalues, in the same shape as the result of `to_eigenbasis`."""
        values = self.magnitudes
        for dim, U in ((-2, self.U_G), (-1, self.U_A)):
            if is_thin(U):
                last = values.narrow(dim, -1, 1).repeat_interleave(U.shape[-2], dim)
                values = torch.cat([values.narrow(dim, 0, U.shape[-1]), last], dim)
        return values

    @property
    def eigenvalues(self) -> Float[Tensor, "*groups d_out d_in"]:
        """The eigenvalues, with multiplicity: one for each eigenvector."""
        *_, d_out, d_in = self.sizes
        return self.in_frame[..., :d_out, :d_in]

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether all eigenvalues are at least 0."""
        return bool((self.magnitudes >= 0).all())

    def _matmat(self, matrix: Tensor) -> Tensor:
        columns = matrix.T.unflatten(1, self.sizes)
        return self.from_eigenbasis(self.in_frame * self.to_eigenbasis(columns)).flatten(1).T

    def to_eigenbasis(
        self, matrices: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch rows columns"]:
        r"""Compute coordinates along the eigenvectors, $U_G^\top V U_A$.

        Args:
            matrices: V, `[*batch, *groups, d_out, d_in]`.
        """
        for side, U in ((-2, self.U_G), (-1, self.U_A)):
            if U is not None:
                along = _along(matrices, U, side)
                if is_thin(U):
                    along = torch.cat([along, matrices - _along(along, U.mT, side)], side)
                matrices = along
        return matrices

    def from_eigenbasis(
        self, coordinates: Float[Tensor, "*batch rows columns"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""Map coordinates back from the eigenbasis: compute $U_G C U_A^\top$."""
        for side, U in ((-2, self.U_G), (-1, self.U_A)):
            if U is None:
                continue
            along, orthogonal = coordinates.tensor_split([U.shape[-1]], side)
            if is_thin(U):
                # F C = U (C₁ - Uᵀ C₂) + C₂, with C₁ along the directions, C₂ orthogonal to them.
                along = along - _along(orthogonal, U, side)
                coordinates = _along(along, U.mT, side) + orthogonal
            else:
                coordinates = _along(along, U.mT, side)
        return coordinates

    def keep_directions(
        self, side: int, order: Int[Tensor, "*groups r"], rank: int
    ) -> "EigenKronecker":
        """Drop some eigenvectors of a factor, and give them the mean of their eigenvalues.

        Args:
            side: 0 for U_G, 1 for U_A, which is not None.
            order: Indices of the directions, the ones to keep first.
            rank: Number of directions to keep; the others get the mean of their magnitudes.
        """
        U = (self.U_G, self.U_A)[side]
        assert U is not None
        dim = side - 2
        d, r = U.shape[-2:]
        along, orthogonal = self.magnitudes.tensor_split([r], dim)
        along = torch.take_along_dim(along, order.unsqueeze(-1 - side), dim)
        kept_magnitudes, dropped = along.tensor_split([rank], dim)
        pool = dropped.sum(dim, keepdim=True) + (d - r) * orthogonal.sum(dim, keepdim=True)
        magnitudes = torch.cat([kept_magnitudes, pool / (d - rank)], dim)
        U = torch.take_along_dim(U, order.unsqueeze(-2)[..., :rank], -1).mT.contiguous().mT
        if side == 0:
            return replace(self, U_G=U, magnitudes=magnitudes, added=0.0)
        return replace(self, U_A=U, magnitudes=magnitudes, added=0.0)

    def leading(self, rank: float) -> "EigenKronecker":
        """Keep only the leading eigenvectors of each factor, and preserve the trace.

        A side that would keep half of its directions or more keeps all.

        Args:
            rank: Number of directions to keep on each side; below 1, the fraction of the trace that
                they must have together.
        """
        block = self
        for side, U in enumerate((self.U_G, self.U_A)):
            if U is None:
                continue
            d, r = U.shape[-2:]
            count = int(rank)
            if rank < 1:
                traces = (self.magnitudes * self.multiplicities).sum(-1 - side)
                is_enough = traces[..., :r].cumsum(-1) >= rank * traces.sum(-1, keepdim=True)
                count = int((~is_enough).sum(-1).amax()) + 1
            if count < r and 2 * count < d:
                order = torch.arange(r, device=U.device).expand(*U.shape[:-2], -1)
                block = block.keep_directions(side, order, count)
        return block

    def apply(self, function: Spectrum) -> "EigenKronecker":
        """Apply a function to the eigenvalues, and keep the eigenvectors."""
        return EigenKronecker(self.U_G, self.U_A, function(self.magnitudes))


def is_thin(U: Tensor | None) -> TypeGuard[Tensor]:
    """Whether U has fewer columns (directions) than rows."""
    return U is not None and U.shape[-1] < U.shape[-2]


def coordinates(rows: Float[Tensor, "*n d"], U: Tensor | None) -> Float[Tensor, "*n columns"]:
    r"""Compute the coordinates of rows along the columns of U; None returns the rows.

    A thin U gives the `r + d` coordinates in its frame: those along U, and then $x - U U^\top x$.
    Squares of the latter are accurate, while a difference of squares would cancel.
    """
    if not is_thin(U):
        return rows if U is None else _rotated(rows, U)
    return torch.cat(in_parts(rows, U), -1)


def in_parts(
    rows: Float[Tensor, "*n d"], U: Float[Tensor, "*groups d r"]
) -> tuple[Float[Tensor, "*n r"], Float[Tensor, "*n d"]]:
    """Compute coordinates along thin directions, Uᵀx, and the orthogonal remainder, x − U Uᵀx."""
    along = _rotated(rows, U)
    return along, _rotated(along, U.mT).neg_().add_(rows)


def frame(U: Float[Tensor, "*groups d r"]) -> Float[Tensor, "*groups d columns"]:
    """Return the frame of thin directions, `[*groups, d, r + d]`; a full basis stays."""
    if not is_thin(U):
        return U
    return torch.cat([U, torch.eye(U.shape[-2]).to(U) - U @ U.mT], -1)


def completed(U: Float[Tensor, "*groups d r"]) -> Float[Tensor, "*groups d d"]:
    """Complete orthonormal directions to an orthonormal basis."""
    return torch.cat([U, torch.linalg.qr(U, mode="complete").Q[..., U.shape[-1] :]], -1)


def _rotated(rows: Tensor, U: Tensor) -> Tensor:
    """Multiply rows, `[*n, d]` or `[*n, groups, d]`, by U from the right."""
    return rows @ U if U.ndim == 2 else torch.einsum("...gd,gde->...ge", rows, U)


def _along(matrices: Tensor, U: Tensor, side: int) -> Tensor:
    """Multiply matrices by U from the right (side -1), or by Uᵀ from the left (side -2)."""
    if U.ndim == 2:
        return matrices @ U if side == -1 else U.mT @ matrices
    # With several groups `@` would copy U for every matrix.
    if side == -1:
        return torch.einsum("...gij,gjk->...gik", matrices, U)
    return torch.einsum("gij,...gjk->...gik", U.mT, matrices)


def _combined(
    combine: Callable[[Tensor, Tensor], Tensor], left: EigenKronecker, right: EigenKronecker
) -> LinearOperator | None:
    """Combine the magnitudes of two operators if both have the same directions."""
    if left.magnitudes.shape != right.magnitudes.shape:
        return None
    if not (same(left.U_G, right.U_G) and same(left.U_A, right.U_A)):
        return None
    return EigenKronecker(left.U_G, left.U_A, combine(left.magnitudes, right.magnitudes))


add.register(EigenKronecker, EigenKronecker)(partial(_combined, torch.add))
multiply.register(EigenKronecker, EigenKronecker)(partial(_combined, torch.mul))


@scale.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator:
    return replace(operator, magnitudes=scalar * operator.magnitudes, added=scalar * operator.added)


@shift.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator | None:
    magnitudes = operator.magnitudes + scalar
    return EigenKronecker(operator.U_G, operator.U_A, magnitudes, added=operator.added + scalar)
