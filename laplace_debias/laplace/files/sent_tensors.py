"""Tensors of a sharded posterior, sent one by one to the process that writes its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.laplace.files.saved_blocks import SavedBlock
from laplace_debias.laplace.files.sealed import names_in_order
from laplace_debias.system.ranks import Ranks


@dataclass(frozen=True)
class SentTensors:
    """All tensors of a file, of which each process holds some.

    Attributes:
        tensors: By their names; on the meta device those that other processes hold.
        owners: The ranks of those that one process holds.
        ranks: The processes.
    """

    tensors: Mapping[str, Tensor]
    owners: Mapping[str, int]
    ranks: Ranks

    @classmethod
    def of(
        cls, curvature: ShardedBlocks, blocks: Sequence[SavedBlock], tensors: Mapping[str, Tensor]
    ) -> "SentTensors":
        """Those of a posterior.

        Args:
            curvature: Its curvature.
            blocks: What the file holds of each block.
            tensors: What the file holds of this process.

        Raises:
            RuntimeError: If not all processes that share the blocks take part.
        """
        everything, owners = dict(tensors), {}
        for index, (block, owner) in enumerate(zip(blocks, curvature.owners.values(), strict=True)):
            for part, shape in block.parts.items():
                name = f"{index}.{part}"
                owners[name] = owner
                if name not in everything:
                    everything[name] = torch.empty(shape, dtype=curvature.dtype, device="meta")
        return cls(everything, owners, curvature.ranks())

    def fetch(self, name: str) -> Tensor:
        """A tensor's values, where rank 0 does not hold them by a message; all ranks call it."""
        owner = self.owners.get(name, 0)
        if owner == 0:
            return self.tensors[name]
        own = {name: (self.tensors[name],)} if owner == self.ranks.rank else {}
        (values,) = self.ranks.share(own, {name: owner})[name]
        assert values is not None
        return values

    def of_block(self, index: int) -> dict[str, Tensor]:
        """The tensors of a block, by their names; values of others are on the meta device."""
        start = f"{index}."
        return {name: of for name, of in self.tensors.items() if name.startswith(start)}

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Take part on a process that writes nothing.

        Args:
            tensors: Those of one file.
        """
        for name in names_in_order(tensors):
            self.fetch(name)
