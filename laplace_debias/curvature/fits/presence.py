"""Presence, that is, which examples of each chunk of a pass over data take part in a layer."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Site
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.positions import PositionFinder, PresentPositions
from laplace_debias.curvature.layers.records import BlockRecord


class Presence:
    """A search for the positions and examples that take part in each layer.

    An example takes part in a layer if its outputs depend on the layer, whichever other examples
    are in its chunk. It takes no part if its batch does not call the layer, or if its batch calls
    the layer for it, but a gate removes what the layer computes. An example with a gradient takes
    part. For the other examples, a generic cotangent decides; see `positions`.

    Args:
        context: The fit. Its tap knows layers that only some examples reach, and the search adds
            further layers.
        forward_pass: A forward pass of one example.
    """

    def __init__(self, context: FitContext, forward_pass: ForwardPass) -> None:
        self._context = context
        self._tap = context.tap
        self._positions = PositionFinder(
            context.network,
            context.blocks,
            context.cotangents,
            layer_calls=forward_pass.layer_calls,
            outputs=forward_pass.outputs,
        )

    def in_chunk(self, chunk: Batch, uncalled: Collection[Site] = ()) -> "ChunkPresence":
        """Find the positions and examples of a chunk that take part.

        Args:
            chunk: The examples, on the device on which the loader returned them.
            uncalled: The sites of layers that some batch did not call, besides the sites that the
                context's tap knows.
        """
        return ChunkPresence(self, chunk, uncalled)

    @cached_property
    def has_zero_matrix(self) -> bool:
        """Whether all entries of a Bayesian weight matrix are zero, as in an untrained adapter.

        Such a matrix removes the gradients of all examples in the layers below it.
        """
        for block in self._context.blocks:
            for name in block.parameters:
                parameter = self._context.network.get_parameter(name)
                if parameter.ndim > 1 and not parameter.any():
                    return True
        return False

    def find_positions(self, chunk: Batch, uncalled: Collection[Site]) -> PresentPositions:
        """Find the positions that take part; see `in_chunk` for the arguments."""
        conditional = self._tap.conditional.union(uncalled)
        return self._positions.find(chunk.inputs, chunk.targets, conditional)

    def find_conditional_layers(self, batch: Batch, sites: Collection[Site]) -> None:
        """Find the sites of layers that some of these examples do not reach, among given sites."""
        not_reached = self._positions.sites_not_reached(batch.inputs, batch.targets)
        self._tap.conditional.update(not_reached.intersection(sites))


class ChunkPresence:
    """The positions and examples of a chunk that take part in each layer.

    Args:
        presence: The search, to which the conditional layers that this chunk shows are added.
        chunk: The examples, on the device on which the loader returned them.
        uncalled: The sites of layers that some batch did not call, besides the sites that the
            context's tap knows.
    """

    def __init__(self, presence: Presence, chunk: Batch, uncalled: Collection[Site]) -> None:
        self._presence = presence
        self._chunk = chunk
        self._uncalled = uncalled
        self._present = presence.find_positions(chunk, uncalled)

    def find_missing_gradients(
        self, records: Sequence[BlockRecord], gated_layers: Collection[str]
    ) -> None:
        """Find the conditional layers, and the positions again, if a gradient vanishes.

        A gradient may vanish because of a gate, or by chance, as at a dead ReLU. A generic
        cotangent distinguishes the two. This takes another pass, which is made only if some example
        has no gradient in some gated layer.

        Args:
            records: The records of the first columns.
            gated_layers: The layers whose gradients may vanish for single examples.
        """
        unclear = [
            record
            for record in records
            if record.block.layer in gated_layers
            and not record.block.is_vector
            and record.block.layer not in self._present.examined_layers
        ]
        # Most examples have a gradient in the first column, which takes less time to read.
        if _have_gradients(unclear, slice(1)) or _have_gradients(unclear, slice(None)):
            return
        if self._presence.has_zero_matrix:
            # A layer without any gradient may be below the zero matrix. This is not a gate, and
            # another pass would not find a gradient either.
            unclear = [record for record in unclear if _has_gradient(record)]
            if _have_gradients(unclear, slice(None)):
                return
        sites = {record.block.site for record in unclear}
        self._presence.find_conditional_layers(self._chunk, sites)
        self._present = self._presence.find_positions(self._chunk, self._uncalled)

    def masked(self, record: BlockRecord) -> BlockRecord:
        """Return a record with the masks of the positions in its layer that take part."""
        return replace(record, masks=self._present.masks(record.block, len(record.inputs)))


def _has_gradient(record: BlockRecord) -> bool:
    """Whether some example has a gradient in the record."""
    return any(bool(gradients.any()) for gradients in record.output_gradients)


def _have_gradients(records: Sequence[BlockRecord], columns: slice) -> bool:
    """Whether every example has a gradient in each of the records, in some of the columns.

    On an accelerator, the host waits once for all records.
    """
    if not records:
        return True
    device = records[0].output_gradients[0].device
    norms_by_record = []
    for record in records:
        norms_by_call = []
        for gradients in record.output_gradients:
            # All dimensions except the dimension of the examples, [K, B, ...].
            dims = (0, *range(2, gradients.ndim))
            norms_by_call.append(torch.linalg.vector_norm(gradients[columns], dim=dims))
        norms_by_record.append(torch.stack(norms_by_call).amax(0).to(device))
    return bool((torch.stack(norms_by_record) > 0).all())
