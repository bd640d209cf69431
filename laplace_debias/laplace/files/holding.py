"""Which blocks of a saved posterior a process reads and holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import WITH_FACTORS, CurvatureKind
from laplace_debias.curvature.fits.over_ranks import owners_by_cost
from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.laplace.files.header import Header
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.settings import FitSettings
from laplace_debias.operators import BlockDiagonal, LinearOperator
from laplace_debias.system.ranks import Ranks


@dataclass(frozen=True)
class Holding:
    """What a process holds of a posterior: all of it, or some blocks of a sharded one.

    Attributes:
        owners: The rank that holds each block, in the blocks' order; empty for all on each.
        rank: Which process this is.
        num_ranks: How many there are.
    """

    owners: Sequence[int] = ()
    rank: int = 0
    num_ranks: int = 1

    def is_here(self, index: int) -> bool:
        """Whether this process holds the block of a number; one that there is not counts as here.

        So what is superfluous in a file is read, and found out.
        """
        return index >= len(self.owners) or self.owners[index] == self.rank

    def of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A file's tensors without those of blocks that others hold."""
        if not self.owners:
            return tensors
        elsewhere = {f"{index}" for index in range(len(self.owners)) if not self.is_here(index)}
        return {n: tensor for n, tensor in tensors.items() if n.partition(".")[0] not in elsewhere}

    def joined(self, blocks: Mapping[str, LinearOperator]) -> BlockDiagonal:
        """The curvature, from all blocks; `Elsewhere` for those of other processes."""
        if not self.owners:
            return BlockDiagonal(blocks)
        return ShardedBlocks(blocks, rank=self.rank, num_ranks=self.num_ranks)


WHOLE = Holding()


def holding_of(header: Header, model: nn.Module, ranks: Ranks) -> Holding:
    """What a process holds of a saved posterior: the blocks that it would hold after a fit.

    Args:
        header: The posterior's header.
        model: The model without wrappers, which has the parameters that the header names.
        ranks: The processes that share out the blocks.

    Raises:
        ValueError: If the header's choices are out of range.
    """
    kind = CurvatureKind(header.curvature, header.rank)
    if ranks.size == 1 or kind.is_dense:
        return WHOLE
    sharing = header.sharing if header.curvature in WITH_FACTORS else "expand"
    settings = FitSettings(kind, FisherType(), torch.float64, header.joint, sharing, None)
    parameters = BayesianParameters.of(model, header.param_names, settings, None, header.calls)
    owners = owners_by_cost(parameters.blocks, ranks.size)
    return Holding([owners[block] for block in parameters.blocks], ranks.rank, ranks.size)
