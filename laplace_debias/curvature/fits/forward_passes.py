"""Passes that run the network only forward, to sum the input factors A."""

from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factor_sums import SideSums
from laplace_debias.curvature.fits.factors import input_factors, input_weight
from laplace_debias.curvature.fits.presence import Presence
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import move
from laplace_debias.curvature.network.outputs import check_outputs


class ForwardPasses:
    """A network that is run only forward, batch by batch, to sum the factors A.

    Without gradients, a pass does not show which examples a gate removes. The first batch is
    therefore searched for conditional layers. If a gate removes only examples of later batches,
    these examples count in A until a backward pass with the same context finds the layer.

    Args:
        context: The network and its blocks.
    """

    def __init__(self, context: FitContext) -> None:
        self._context = context
        self._blocks = [block for block in context.blocks if not block.is_vector]
        self._tap = Tap(context.network, self._blocks)
        self._presence: Presence | None = None

    def __call__(self, batch: Batch, sums: SideSums, totals: DataTotals) -> Tensor:
        """Compute the outputs for a batch.

        The layers' inputs are added to the sums of A, and the weights of the examples that have a
        position in a layer to the totals.
        """
        context = self._context
        tap = self._tap
        forward_pass = tap.forward(move(batch.inputs, context.device, None), graph=False)
        check_outputs(forward_pass.outputs)
        if self._presence is None:
            self._presence = Presence(context, forward_pass)
            sites = {block.site for block in self._blocks}
            self._presence.find_conditional_layers(batch, sites)
        presence = self._presence.in_chunk(batch, tap.conditional)
        input_weights = context.cotangents.input_weights(forward_pass.outputs, batch.targets)
        for block in self._blocks:
            inputs = [call.x for call in forward_pass.layer_calls if call.layer == block.layer]
            if not inputs:
                sums.add_zero(block)
                totals.add_input_weight(block, 0.0)
                continue
            layer = tap.network.get_submodule(block.layer)
            record = presence.masked(BlockRecord(block, layer, inputs, input_weights=input_weights))
            for A in input_factors(
                layer, block, inputs, record.masks, input_weights, sums.keeps_rows(block)
            ):
                sums.add(block, A)
            totals.add_input_weight(block, input_weight(record))
        return forward_pass.outputs
