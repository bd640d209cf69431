"""The context of a fit of the curvature, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.backends import Backend
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.ranks import ALONE, Ranks


@dataclass(frozen=True)
class FitContext:
    """A network with its loss and blocks, and the settings for computing its curvature.

    Attributes:
        cotangents: The loss, which yields the vectors at the outputs that are backpropagated.
        blocks: The curvature blocks, in the order of the posterior.
        backend: The backend that runs the network forward and back, BackPACK or the layer tap.
        factor_dtype: The dtype in which factors are summed and decomposed.
        memory_bound: The limit on the bytes of one chunk's output gradients. None selects the
            default of `checked_memory_bound`.
        ranks: The processes that share the data.
        checkpoint: The checkpoint that saves the passes over the data; None if they are not saved.
        example: The inputs of one example of the data.
        num_outputs: The number of outputs of an example; None if it is unknown.
        num_examples: The number of examples that the fit reads; None if it is unknown.
    """

    cotangents: Cotangents
    blocks: Sequence[Block]
    backend: Backend
    factor_dtype: torch.dtype
    memory_bound: int | None
    ranks: Ranks = ALONE
    checkpoint: Checkpoint | None = None
    example: Inputs | None = None
    num_outputs: int | None = None
    num_examples: int | None = None

    @cached_property
    def tap(self) -> Tap:
        """The layer tap of the network."""
        return self.backend if isinstance(self.backend, Tap) else self.backend.tap

    @property
    def network(self) -> nn.Module:
        """The working copy of the trained network."""
        return self.tap.network

    def for_output(self, output: int, num_outputs: int) -> "FitContext":
        """Return the context of a fit to one output, which uses only one entry of the loss Hessian.

        Args:
            output: The index of the output among an example's flattened outputs.
            num_outputs: The number of outputs that every example must have.
        """
        return replace(self, cotangents=self.cotangents.for_output(output, num_outputs))

    @cached_property
    def _first_parameter(self) -> nn.Parameter:
        return self.network.get_parameter(self.blocks[0].parameters[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Bayesian parameters."""
        return self._first_parameter.dtype

    @property
    def device(self) -> torch.device:
        """The device of the Bayesian parameters."""
        return self._first_parameter.device


@dataclass(frozen=True, eq=False)
class FactorScales:
    r"""The scales of a block's factors G and A, which the product $G \otimes A$ does not determine.

    An update needs the scales to recover the factors, to which it adds the factors of new data.

    Attributes:
        trace_A: The trace of A, one per group.
        share_A: The total weight of the examples over which A is a mean, as a fraction of the
            weight of all examples: K-FAC leaves out the examples that have no position in a layer,
            and weights the others as the loss does.
    """

    trace_A: Float[Tensor, " *groups"]
    share_A: float = 1.0

    def to(self, device: torch.device) -> "FactorScales":
        """Move the trace to a device."""
        return replace(self, trace_A=self.trace_A.to(device))


@dataclass(frozen=True)
class CurvatureFit:
    """The fitted curvature of the mean loss, and the totals of its data.

    Attributes:
        curvature: The curvature, block by block.
        totals: The totals of the data.
        factor_scales: The scales of K-FAC's factors, by the block's name; empty for a curvature
            that is not a product of factors, or if the scales are not known.
        report: A report of the fitting scheme; None if the scheme makes no report.
    """

    curvature: BlockDiagonal
    totals: DataTotals
    factor_scales: Mapping[str, FactorScales] = field(default_factory=dict)
    report: Any = None
