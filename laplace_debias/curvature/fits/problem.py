"""The problem whose curvature is taken, and the result of a fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.layers.backends import Stream
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Problem:
    """A network with its loss and blocks, and how its curvature is taken.

    Attributes:
        cotangents: Which cotangents at its outputs stand for the loss Hessian.
        blocks: The curvature blocks.
        stream: Where the blocks' inputs and output gradients come from.
        factor_dtype: In what factors are summed and decomposed.
        memory_bound: Bytes that one chunk's output gradients may take; None as `granted` takes it.
        ranks: The processes that share the data. What a fit sums over examples is summed over them.
        checkpoint: Where its passes over the data are saved, if they are.
    """

    cotangents: Cotangents
    blocks: Sequence[Block]
    stream: Stream
    factor_dtype: torch.dtype
    memory_bound: int | None
    ranks: Ranks = ALONE
    checkpoint: Checkpoint | None = None

    @property
    def network(self) -> nn.Module:
        """The `shadow` of the trained network that is run."""
        return self.stream.tap.network

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Bayesian parameters."""
        return self.network.get_parameter(self.blocks[0].parameters[0]).dtype

    @property
    def device(self) -> torch.device:
        """Where the Bayesian parameters are."""
        return self.network.get_parameter(self.blocks[0].parameters[0]).device

    def on(self, ranks: Ranks) -> "Problem":
        """The same on several processes, with the labels of `fisher="mc"` that rank 0 draws."""
        if ranks.size == 1:
            return self
        fisher = self.cotangents.fisher
        fisher = replace(fisher, seed=ranks.exchange(fisher.seed)[0])
        return replace(self, ranks=ranks, cotangents=replace(self.cotangents, fisher=fisher))


@dataclass(frozen=True)
class Seen:
    """Sums over the examples that a pass over data saw.

    Attributes:
        num_examples: How many examples.
        nll: Their summed loss; of a likelihood in nats.
        num_outputs: How many numbers the network gave for them all.
        weight: How many examples they stand for: the sum of their weights.
    """

    num_examples: int
    nll: float
    num_outputs: float
    weight: float

    def __add__(self, other: "Seen") -> "Seen":
        """The sums of two passes over different data."""
        return Seen(
            self.num_examples + other.num_examples,
            self.nll + other.nll,
            self.num_outputs + other.num_outputs,
            self.weight + other.weight,
        )


@dataclass(frozen=True)
class CurvatureFit:
    """Curvature of the mean loss, and the data that it came from."""

    curvature: BlockDiagonal
    seen: Seen
