"""The curvature of a single batch: sums of its factors and of its squared gradients."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.chunks import ChunkRunner
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factor_sums import FactorAccumulator
from laplace_debias.curvature.fits.magnitudes import SquaredGradients
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.network.outputs import DeferredChecks
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks

# The number of examples whose gradients are summed before they are squared.
_EXAMPLES_PER_SUM = 8


class SquaredSums(SquaredGradients):
    r"""An accumulator that squares sums of the gradients of several examples.

    With random signs or sampled labels, the gradients of different examples are independent and
    have mean zero, so their products vanish on average:

    $$\mathbb E\big(\textstyle\sum_n J_n\big)^2 = \sum_n\mathbb E\,J_n^2.$$

    A sum is a single matrix product and needs to be rotated only once, whereas each separate
    gradient would have to be rotated.

    Reference: the Gauss-Newton-Bartlett estimator of Liu et al. (2024), "Sophia: a scalable
    stochastic second-order optimizer for language model pre-training".
    """

    def measure(self, record: BlockRecord) -> Tensor:
        """Compute the squares for a chunk of examples."""
        block = record.block
        if block.is_vector or block.is_one_hot or record.num_positions == 1:
            # These gradients have few entries, or are outer products that can be rotated factor by
            # factor, so summing them first would save nothing.
            return super().measure(record)
        output_directions, input_directions = self._directions[block]
        total: Tensor | None = None
        for start in range(0, record.num_examples, _EXAMPLES_PER_SUM):
            examples = slice(start, start + _EXAMPLES_PER_SUM)
            J = _summed_gradients(record, examples)
            J = output_directions.rotate(input_directions.rotate(J, -1), -2)
            squares = J.square().sum(0)
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total


def _summed_gradients(
    record: BlockRecord, examples: slice
) -> Float[Tensor, "columns *groups d_out d_in"]:
    """Compute the gradient of the weight for each column, summed over the given examples."""
    block = record.block
    calls = [
        block.rule.weight_gradients(record.layer, block, x[examples], g[:, examples])
        for x, g in record.calls()
    ]
    return calls[0] if len(calls) == 1 else torch.stack(calls).sum(0)


class BatchSums(Accumulator):
    """The sums over one batch: its factors, and the squares along the directions.

    Attributes:
        factors: The accumulator of the factors.
        squares: The accumulator of the squares along the directions; None if no squares are needed.
    """

    needs_positions = True

    def __init__(self, context: FitContext) -> None:
        # A batch is summed in the dtype of the model, which may differ from the dtype of the
        # running sums.
        super().__init__(replace(context, factor_dtype=context.dtype))
        self.factors = FactorAccumulator(self.context)
        self.squares: SquaredGradients | None = None

    def begin(self) -> None:
        """Discard the sums of the last batch."""
        self.factors = FactorAccumulator(self.context)
        if self.squares is not None:
            self.squares.squares = {}

    @property
    def tables(self) -> Mapping[str, dict]:
        """Return nothing, because the sums of a batch are not saved."""
        return {}

    def measure(self, record: BlockRecord) -> list:
        """Compute the terms of a record for each of the sums."""
        return [sums.measure(record) for sums in self._sums]

    def add(self, block: Block, measured: list) -> None:
        """Add the terms of a block to each of the sums."""
        for sums, value in zip(self._sums, measured, strict=True):
            sums.add(block, value)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Create the sums of a block if they do not exist."""
        for sums in self._sums:
            sums.add_zero(block, num_examples, num_columns)

    def reduce(self) -> None:
        """Check that the sums are finite."""
        for sums in self._sums:
            sums.reduce()

    @property
    def _sums(self) -> list[Accumulator]:
        return [self.factors] if self.squares is None else [self.factors, self.squares]


class BatchMeasurements:
    """The network with which batches are measured; it has been checked on the first batch.

    Args:
        parameters: The Bayesian parameters and their blocks.
        context: The network, its loss and its blocks.

    Attributes:
        sums: The sums of the batch that was measured last.
    """

    def __init__(self, parameters: ParameterBlocks, context: FitContext) -> None:
        self.parameters = parameters
        self.context = context
        self.sums = BatchSums(context)
        self._runner = ChunkRunner(self.sums)

    def measure(self, batch: Batch) -> DataTotals:
        """Measure a batch into `sums`, and require that they are finite."""
        self.sums.begin()
        totals = DataTotals()
        checks = DeferredChecks()
        with checks.during_batch(None):
            self._runner.run(batch, totals)
        checks.read()
        self.sums.reduce()
        return totals
