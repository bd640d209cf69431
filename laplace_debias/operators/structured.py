"""Operators whose structure makes their spectrum, inverse and roots exact."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator

Spectrum = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class EigenKronecker(LinearOperator):
    r"""Symmetric operator with Kronecker-structured directions and free magnitudes.

    $$(U_G \otimes U_A)\,\mathrm{diag}(\mathrm{vec}\,\Lambda)\,(U_G \otimes U_A)^\top$$

    on matrices $V$ of shape `[d_out, d_in]` flattened row-major, so that a product is
    $U_G[\Lambda \odot (U_G^\top V U_A)]U_A^\top$. K-FAC, EKFAC, their debiased forms and a bias
    block (`d_in = 1`) differ only in where the three parts come from.

    Args:
        U_G: Orthonormal eigenvectors on the output side, as columns, `[d_out, d_out]`.
        U_A: Orthonormal eigenvectors on the input side, as columns, `[d_in, d_in]`.
        magnitudes: Λ, the curvature along each direction, `[d_out, d_in]`.

    Raises:
        ValueError: If the shapes, dtypes or devices do not fit each other.
    """

    U_G: Float[Tensor, "d_out d_out"] | None
    U_A: Float[Tensor, "d_in d_in"] | None
    magnitudes: Float[Tensor, "d_out d_in"]

    def __post_init__(self) -> None:
        parts = [p for p in (self.U_G, self.U_A, self.magnitudes) if p is not None]
        expected = tuple(
            size if U is None else len(U)
            for U, size in zip((self.U_G, self.U_A), self.magnitudes.shape, strict=True)
        )
        if self.magnitudes.shape != expected:
            raise ValueError(
                f"Magnitudes of shape {tuple(self.magnitudes.shape)} do not fit directions of "
                f"sizes {expected}."
            )
        if len({(part.dtype, part.device) for part in parts}) > 1:
            raise ValueError("U_G, U_A and the magnitudes must share one dtype and one device.")

    @property
    def shape(self) -> tuple[int, int]:
        """Both `d_out · d_in`."""
        return self.magnitudes.numel(), self.magnitudes.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all three parts."""
        return self.magnitudes.dtype

    @property
    def device(self) -> torch.device:
        """The device of all three parts."""
        return self.magnitudes.device

    @property
    def T(self) -> "EigenKronecker":  # noqa: N802
        """The operator itself: it is symmetric."""
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        columns = matrix.T.unflatten(1, self.magnitudes.shape)
        return self.from_eigenbasis(self.magnitudes * self.to_eigenbasis(columns)).flatten(1).T

    def to_eigenbasis(
        self, matrices: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""Coordinates along the directions, $U_G^\top V U_A$."""
        rotated = matrices if self.U_G is None else self.U_G.T @ matrices
        return rotated if self.U_A is None else rotated @ self.U_A

    def from_eigenbasis(
        self, coordinates: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""The inverse of `to_eigenbasis`, $U_G C U_A^\top$."""
        rotated = coordinates if self.U_G is None else self.U_G @ coordinates
        return rotated if self.U_A is None else rotated @ self.U_A.T

    def apply(self, function: Spectrum) -> "EigenKronecker":
        """The operator's function: the same directions, `function` of the magnitudes."""
        return EigenKronecker(self.U_G, self.U_A, function(self.magnitudes))

    def to(self, *args: object, **kwargs: object) -> "EigenKronecker":
        """Convert dtype or device as `Tensor.to` does."""
        parts = (self.U_G, self.U_A, self.magnitudes)
        return EigenKronecker(*(p if p is None else p.to(*args, **kwargs) for p in parts))  # type: ignore


@dataclass(frozen=True, eq=False)
class BlockDiagonal(LinearOperator):
    """Named symmetric blocks along the diagonal, in order.

    Args:
        blocks: From a block's name to its operator; the order is the order along the diagonal.

    Raises:
        ValueError: If there is no block, or their dtypes or devices differ.
    """

    blocks: Mapping[str, EigenKronecker]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("A block-diagonal operator needs at least one block.")
        if len({(block.dtype, block.device) for block in self.blocks.values()}) > 1:
            raise ValueError("All blocks must share one dtype and one device.")

    @property
    def shape(self) -> tuple[int, int]:
        """Both the sum of the blocks' sizes."""
        return sum(self.sizes), sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of every block, in order."""
        return [block.shape[0] for block in self.blocks.values()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all blocks."""
        return next(iter(self.blocks.values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of all blocks."""
        return next(iter(self.blocks.values())).device

    @property
    def T(self) -> "BlockDiagonal":  # noqa: N802
        """The operator itself: its blocks are symmetric."""
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        parts = matrix.split(self.sizes)
        products = [block @ part for block, part in zip(self.blocks.values(), parts, strict=True)]
        return torch.cat(products)

    def map(self, function: Callable[[str, EigenKronecker], EigenKronecker]) -> "BlockDiagonal":
        """Replace every block by `function(name, block)`."""
        return BlockDiagonal({name: function(name, block) for name, block in self.blocks.items()})

    def to(self, *args: object, **kwargs: object) -> "BlockDiagonal":
        """Convert dtype or device as `Tensor.to` does."""
        return self.map(lambda _, block: block.to(*args, **kwargs))
