"""The two Kronecker factors of each block, G of a layer's output gradients and A of its inputs."""

from enum import IntEnum
from typing import NamedTuple

from laplace_debias.curvature.layer_rules import Block


class Side(IntEnum):
    """The side of a factor in `G ⊗ A`, which is also its index in pairs (G, A)."""

    G = 0
    A = 1


class FactorKey(NamedTuple):
    """One of the two factors of a block."""

    block: Block
    side: Side

    @property
    def size(self) -> int:
        """The number of rows and columns of the factor, d_out for G and d_in for A."""
        return self.block.shape[self.side]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices, or of the diagonal; `()` for A of a vector."""
        return self.block.factor_shapes[self.side]

    @property
    def is_diagonal(self) -> bool:
        """Whether only the diagonal of the factor is kept, as a vector."""
        return len(self.shape) == 1

    @property
    def is_streamed(self) -> bool:
        """Whether the factor is so much wider than the block's rank that no matrix is formed."""
        return self.block.is_streamed[self.side]

    @property
    def max_rows(self) -> int | None:
        """The number of rows above which the factor is compressed, or None if not streamed."""
        return self.block.most_rows if self.is_streamed else None

    def __str__(self) -> str:
        return f"factor {self.side.name} of {self.block.name}"


def factor_keys(block: Block) -> list[FactorKey]:
    """Return the keys of G and A of a block."""
    return [FactorKey(block, side) for side in Side]
