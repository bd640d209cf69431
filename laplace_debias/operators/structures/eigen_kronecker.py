"""Operators with Kronecker-structured eigenvectors and arbitrary eigenvalues."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.operators.base import LinearOperator, Symmetric
from laplace_debias.operators.dispatch import Scalar, add, multiply, same, scale, shift
from laplace_debias.operators.structures.directions import Directions, is_thin

Spectrum = Callable[[Tensor], Tensor]
"""A function that maps eigenvalues entry by entry, such as `torch.rsqrt`."""


@dataclass(eq=False, repr=False)
class EigenKronecker(Symmetric):
    r"""A symmetric operator whose eigenvectors are Kronecker products.

    $$(U_G \otimes U_A)\,\mathrm{diag}(\mathrm{vec}\,\Lambda)\,(U_G \otimes U_A)^\top$$

    It acts on matrices $V$ of shape `[d_out, d_in]`, flattened row-major. A product is
    $U_G[\Lambda \odot (U_G^\top V U_A)]U_A^\top$. K-FAC, EKFAC, their debiased forms, a bias block
    (`d_in = 1`) and a diagonal (no U) differ only in how the three parts are determined.

    If the tensors have a leading dimension g, the operator is block-diagonal with g such blocks,
    one for each group of a grouped convolution. All blocks are multiplied at once.

    A side can have a reduced rank ("thin"): U then has only r < d columns, and the last of r + 1
    magnitudes is shared by all directions orthogonal to them. In the formula, U is then replaced by
    the frame $F = [U, I - U U^\top]$, `[d, r + d]`, with $F F^\top = I$, and Λ repeats the last
    magnitude d times (`expanded_magnitudes`).

    Args:
        U_G: Orthonormal eigenvectors on the output side, as columns, `[*groups, d_out, r_G]`; None
            means the coordinate axes.
        U_A: Orthonormal eigenvectors on the input side, as columns, `[*groups, d_in, r_A]`, or
            None.
        magnitudes: Λ, the curvature along each direction, `[d_out, d_in]` or `[g, d_out, d_in]`;
            a thin side has r + 1 rows or columns.
        added: The multiple of the identity that is already contained in the magnitudes. If no
            magnitude is below it, it was added to a positive semi-definite operator, so even small
            magnitudes are precise.

    Raises:
        ValueError: If the shapes, dtypes or devices do not match, or the dtype is not a real
            floating-point dtype.
    """

    U_G: Float[Tensor, "*groups d_out r_G"] | None
    U_A: Float[Tensor, "*groups d_in r_A"] | None
    magnitudes: Float[Tensor, "*groups rows columns"]
    added: Scalar = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if self.magnitudes.ndim not in (2, 3) or not self.magnitudes.is_floating_point():
            raise ValueError(
                f"`magnitudes` has shape {tuple(self.magnitudes.shape)} and "
                f"{self.magnitudes.dtype}. Pass a matrix [d_out, d_in] of real floating-point "
                "numbers, or one for each group [g, d_out, d_in]."
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
    def output_directions(self) -> Directions:
        """The directions of the output side."""
        return Directions.from_columns_or_axes(self.U_G, self.magnitudes.shape[-2])

    @property
    def input_directions(self) -> Directions:
        """The directions of the input side."""
        return Directions.from_columns_or_axes(self.U_A, self.magnitudes.shape[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape `[*groups, d_out, d_in]` of the matrices that the operator acts on."""
        return (
            *self.magnitudes.shape[:-2],
            self.output_directions.size,
            self.input_directions.size,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, where n is `d_out · d_in` times the number of groups."""
        size = math.prod(self.sizes)
        return size, size

    @property
    def distinct_eigenvalues(self) -> Float[Tensor, "*groups rows columns"]:
        """The magnitudes. The last one of a thin side is shared by all orthogonal eigenvectors."""
        return self.magnitudes

    @property
    def multiplicities(self) -> Float[Tensor, "rows columns"]:
        """The number of eigenvectors that share each of the `distinct_eigenvalues`."""
        return torch.outer(
            self.output_directions.multiplicities(self.magnitudes),
            self.input_directions.multiplicities(self.magnitudes),
        )

    @property
    def expanded_magnitudes(self) -> Float[Tensor, "*groups rows columns"]:
        """The eigenvalues in the shape of the coordinates that `to_eigenbasis` returns."""
        rows = self.output_directions.repeat_last(self.magnitudes, -2)
        return self.input_directions.repeat_last(rows, -1)

    @property
    def eigenvalues(self) -> Float[Tensor, "*groups d_out d_in"]:
        """The eigenvalues, one for each eigenvector, with repetitions."""
        *_, d_out, d_in = self.sizes
        return self.expanded_magnitudes[..., :d_out, :d_in]

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether all eigenvalues are at least 0."""
        return bool((self.magnitudes >= 0).all())

    def _matmat(self, matrix: Tensor) -> Tensor:
        columns = matrix.T.unflatten(1, self.sizes)
        return (
            self.from_eigenbasis(self.expanded_magnitudes * self.to_eigenbasis(columns))
            .flatten(1)
            .T
        )

    def to_eigenbasis(
        self, matrices: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch rows columns"]:
        r"""Compute the coordinates of matrices along the eigenvectors, $U_G^\top V U_A$.

        Args:
            matrices: V, `[*batch, *groups, d_out, d_in]`.
        """
        columns = self.output_directions.rotate(matrices, -2)
        return self.input_directions.rotate(columns, -1)

    def from_eigenbasis(
        self, coordinates: Float[Tensor, "*batch rows columns"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""Compute the matrices with the given coordinates C, $U_G C U_A^\top$."""
        columns = self.output_directions.rotate_back(coordinates, -2)
        return self.input_directions.rotate_back(columns, -1)

    def keep_directions(
        self, side: int, order: Int[Tensor, "*groups r"], rank: int
    ) -> "EigenKronecker":
        """Keep only some eigenvectors of a factor; all others share the mean of their eigenvalues.

        Args:
            side: 0 for U_G, 1 for U_A; this U must not be None.
            order: For each group, the indices of all columns of U, beginning with those to keep.
            rank: Number of directions to keep; the others get the mean of their magnitudes.
        """
        U = (self.U_G, self.U_A)[side]
        assert U is not None
        # The magnitudes are `[*groups, rows, columns]`, with U_G along the rows and U_A along the
        # columns.
        dim = side - 2
        other_dim = -1 - side
        d, r = U.shape[-2:]
        # A thin side has one more magnitude, which all d - r orthogonal directions share. On any
        # other side, d = r, and `orthogonal` is empty.
        along, orthogonal = self.magnitudes.tensor_split([r], dim)
        along = torch.take_along_dim(along, order.unsqueeze(other_dim), dim)
        kept_magnitudes, dropped = along.tensor_split([rank], dim)
        remaining_trace = dropped.sum(dim, keepdim=True) + (d - r) * orthogonal.sum(
            dim, keepdim=True
        )
        magnitudes = torch.cat([kept_magnitudes, remaining_trace / (d - rank)], dim)
        # Keep the columns contiguous, as `eigh` returns them.
        kept_columns = torch.take_along_dim(U, order.unsqueeze(-2)[..., :rank], -1)
        kept_columns = kept_columns.mT.contiguous().mT
        if side == 0:
            return replace(self, U_G=kept_columns, magnitudes=magnitudes, added=0.0)
        return replace(self, U_A=kept_columns, magnitudes=magnitudes, added=0.0)

    def leading(self, rank: float) -> "EigenKronecker":
        """Keep only the leading eigenvectors of each factor, while preserving the trace.

        If a side would keep at least half of its directions, it keeps all of them.

        Args:
            rank: Number of directions to keep on each side; or, if it is below 1, the fraction of
                the trace that the kept directions must contribute in total.
        """
        block = self
        for side, U in enumerate((self.U_G, self.U_A)):
            if U is None:
                continue
            d, r = U.shape[-2:]
            count = int(rank)
            if rank < 1:
                # The trace along each direction of this side, summed over the other side.
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


def _combine_magnitudes(
    combine: Callable[[Tensor, Tensor], Tensor], left: EigenKronecker, right: EigenKronecker
) -> LinearOperator | None:
    """Combine the magnitudes of two operators if both have the same directions."""
    if left.magnitudes.shape != right.magnitudes.shape:
        return None
    if not (same(left.U_G, right.U_G) and same(left.U_A, right.U_A)):
        return None
    return EigenKronecker(left.U_G, left.U_A, combine(left.magnitudes, right.magnitudes))


add.register(EigenKronecker, EigenKronecker)(partial(_combine_magnitudes, torch.add))
multiply.register(EigenKronecker, EigenKronecker)(partial(_combine_magnitudes, torch.mul))


@scale.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator:
    return replace(operator, magnitudes=scalar * operator.magnitudes, added=scalar * operator.added)


@shift.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator | None:
    magnitudes = operator.magnitudes + scalar
    return EigenKronecker(operator.U_G, operator.U_A, magnitudes, added=operator.added + scalar)
