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

    Factors are summed and decomposed in `factor_dtype`. `memory_bound` is the bytes that one
    chunk's output gradients may take, None as `granted` takes it. Sums over examples are summed
    over `ranks`, and passes over the data saved in `checkpoint`.
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
    """Sums over the examples of a pass: `nll` in nats, `num_outputs` how many numbers came out."""

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
