"""Curvature blocks that several processes share out: each of them holds its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.network.same_vectors import check_same
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LinearOperator
from laplace_debias.operators.structures.composed import Symmetric
from laplace_debias.system.ranks import Ranks, current


@dataclass(frozen=True, eq=False, repr=False)
class Elsewhere(Symmetric):
    """A block that another process holds; here it has no entries, and cannot be multiplied.

    Args:
        none: An empty tensor of the block's dtype and device.
        size: The number of its rows.
        owner: The rank that holds it.
    """

    none: Tensor
    size: int
    owner: int

    is_positive_semidefinite = True

    @property
    def shape(self) -> tuple[int, int]:
        """Both the size."""
        return self.size, self.size

    def _matmat(self, matrix: Tensor) -> Tensor:
        raise RuntimeError(
            f"This block lies on rank {self.owner}: make the posterior whole by `la.gather()` on "
            "every rank, or fit with replicate=True."
        )


@dataclass(frozen=True, eq=False, repr=False)
class ShardedBlocks(BlockDiagonal[Any]):
    """Blocks along the diagonal, each held by one of several processes.

    All processes make the same products together: each multiplies its blocks, and one sum over the
    processes gives all rows to all.

    Args:
        blocks: As `BlockDiagonal` takes them, in the same order on all processes; `Elsewhere` for
            those of others.
        layout: As `BlockDiagonal` takes it.
        rank: Which process this is.
        num_ranks: How many share the blocks.
    """

    rank: int = 0
    num_ranks: int = 1

    def is_here(self, name: str) -> bool:
        """Whether this process holds a block."""
        return not isinstance(self.blocks[name], Elsewhere)

    @property
    def owners(self) -> dict[str, int]:
        """The rank that holds each block."""
        return {
            name: block.owner if isinstance(block, Elsewhere) else self.rank
            for name, block in self.blocks.items()
        }

    def ranks(self) -> Ranks:
        """The processes that hold the blocks.

        Raises:
            RuntimeError: If this call is not one of all of them.
        """
        ranks = current()
        if (ranks.rank, ranks.size) != (self.rank, self.num_ranks):
            raise RuntimeError(
                f"The posterior is shared out by block over {self.num_ranks} processes, and this "
                f"call is one of {ranks.size}: make it on all of them, outside of "
                "`laplace_debias.alone()`. For calls on one process make the posterior whole "
                "before, by `la.gather()` on all of them or by fitting with replicate=True."
            )
        return ranks

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors, in place; raises as `ranks`."""
        self.ranks().sum([tensor])
        return tensor

    def map(self, function: Callable[[str, Any], LinearOperator]) -> "ShardedBlocks":
        """Replace every block of this process by `function(name, block)`."""
        blocks = {
            name: function(name, block) if self.is_here(name) else block
            for name, block in self.blocks.items()
        }
        return replace(self, blocks=blocks)

    def _matmat(self, matrix: Tensor) -> Tensor:
        check_same(self.ranks(), matrix)
        parts = zip(self.blocks.items(), matrix.split(self.sizes), strict=True)
        rows = [b @ part if self.is_here(n) else torch.zeros_like(part) for (n, b), part in parts]
        return self.summed(torch.cat(rows))

    def gathered(self) -> BlockDiagonal[EigenKronecker]:
        """All blocks, on every process; raises as `ranks`."""
        ranks = self.ranks()
        own = {
            name: (block.U_G, block.U_A, block.magnitudes)
            for name, block in self.blocks.items()
            if self.is_here(name)
        }
        shared = ranks.share(own, self.owners)
        blocks = {name: EigenKronecker(*parts) for name, parts in shared.items()}  # type: ignore[arg-type]
        return BlockDiagonal(blocks, self.layout)
