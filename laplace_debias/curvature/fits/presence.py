"""Presence, that is, which examples of each chunk of a pass over data take part in a layer."""

from collections.abc import Collection
from dataclasses import replace

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Site
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.positions import PositionFinder, PresentPositions
from laplace_debias.curvature.layers.records import BlockRecord


class Presence:
    """A search for the positions and examples that take part in each layer.

    The search learns from the data which layers only some examples reach. A layer that a batch does
    not call is such a layer. A batch may also call a layer for examples whose outputs do not depend
    on the layer. The search detects this if the first record of a layer has no gradient for some
    example.

    Args:
        context: The fit. Its tap knows layers that only some examples reach, and the search adds
            further layers.
        forward_pass: A forward pass of one example.
    """

    def __init__(self, context: FitContext, forward_pass: ForwardPass) -> None:
        self._tap = context.tap
        self._positions = PositionFinder(
            context.network,
            context.blocks,
            context.cotangents,
            layer_calls=forward_pass.layer_calls,
            outputs=forward_pass.outputs,
        )
        # The blocks of layers for which it is not known yet whether all examples reach them.
        self._new_blocks = {block for block in context.blocks if not block.is_vector}

    def of_chunk(self, chunk: Batch, uncalled: Collection[Site] = ()) -> "ChunkPresence":
        """Find the positions and examples of a chunk that take part.

        Args:
            chunk: The examples, on the device on which the loader returned them.
            uncalled: The sites of layers that some batch did not call, besides the sites that the
                context's tap knows.
        """
        return ChunkPresence(self, chunk, uncalled)

    def find_positions(self, chunk: Batch, uncalled: Collection[Site]) -> PresentPositions:
        """Find the positions that take part; see `of_chunk` for the arguments."""
        conditional = self._tap.conditional.union(uncalled)
        return self._positions.find(chunk.inputs, chunk.targets, conditional)

    def find_conditional_layers(self, batch: Batch) -> None:
        """Examine all layers to find the layers that some of these examples do not reach."""
        self._tap.conditional |= self._positions.sites_not_reached(batch.inputs, batch.targets)
        self._new_blocks.clear()

    def learn_from(self, record: BlockRecord, chunk: Batch) -> bool:
        """Examine all layers if the first record of a layer lacks the gradients of some example.

        Returns:
            Whether all layers were examined, so that other positions may take part now.
        """
        # A record whose gradients are all zero, such as the record of an untrained adapter, shows
        # nothing.
        if record.block not in self._new_blocks or not _has_gradient(record):
            return False
        self._new_blocks.discard(record.block)
        if _all_examples_have_gradients(record):
            return False
        self.find_conditional_layers(chunk)
        return True


class ChunkPresence:
    """The positions and examples of a chunk that take part in each layer.

    Args:
        presence: The search, which learns from the records of the chunk.
        chunk: The examples, on the device on which the loader returned them.
        uncalled: The sites of layers that some batch did not call, besides the sites that the
            context's tap knows.
    """

    def __init__(self, presence: Presence, chunk: Batch, uncalled: Collection[Site]) -> None:
        self._presence = presence
        self._chunk = chunk
        self._uncalled = uncalled
        self._present = presence.find_positions(chunk, uncalled)

    def masked(self, record: BlockRecord) -> BlockRecord:
        """Return a record with the masks of the positions in its layer that take part."""
        if self._presence.learn_from(record, self._chunk):
            self._present = self._presence.find_positions(self._chunk, self._uncalled)
        return replace(record, masks=self._present.masks(record.block, len(record.inputs)))


def _has_gradient(record: BlockRecord) -> bool:
    return any(bool(gradients.any()) for gradients in record.output_gradients)


def _all_examples_have_gradients(record: BlockRecord) -> bool:
    by_call = [(g != 0).flatten(2).any(2).any(0) for g in record.output_gradients]
    return bool(torch.stack(by_call).any(0).all())
