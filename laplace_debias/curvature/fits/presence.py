"""Presence: which examples take part in a layer, chunk by chunk of a pass over data."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factors import absent_examples
from laplace_debias.curvature.layer_rules import Site
from laplace_debias.curvature.layers.masks import Masks
from laplace_debias.curvature.layers.positions import PositionFinder, PresentPositions
from laplace_debias.curvature.layers.recorder import LayerCall
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.network.batch import Batch


class Presence:
    """A search for the positions and examples that take part in each layer.

    The search learns from the data which layers only some examples reach. A layer that a batch does
    not call is one. A batch may also call a layer for examples whose outputs do not depend on it:
    this shows where the first record of a layer has no gradient for some example.

    Args:
        context: The fit. Its tap knows the layers that only some examples reach, and the search
            adds others.
        layer_calls: The calls of the layers for one example.
        outputs: The outputs of this example.
    """

    def __init__(
        self, context: FitContext, layer_calls: Sequence[LayerCall], outputs: Tensor
    ) -> None:
        self.tap = context.tap
        self.positions = PositionFinder(
            context.network,
            context.blocks,
            context.cotangents,
            layer_calls=layer_calls,
            outputs=outputs,
        )
        # Whether all examples reach the layers of these blocks is not known yet.
        self.new_blocks = {block for block in context.blocks if not block.is_vector}

    def find_conditional_layers(self, batch: Batch) -> None:
        """Examine all layers: find those that some of these examples do not reach."""
        self.tap.conditional |= self.positions.sites_not_reached(batch.inputs, batch.targets)
        self.new_blocks.clear()

    def of_chunk(self, chunk: Batch, uncalled: Collection[Site] = ()) -> "ChunkPresence":
        """Find out who takes part among some examples.

        Args:
            chunk: The examples, on the device that the loader gave them on.
            uncalled: The sites of layers that some batch did not call, besides those that the
                context's tap knows.
        """
        return ChunkPresence(self, chunk, uncalled)


class ChunkPresence:
    """The positions and examples of a chunk that take part in each layer.

    Args:
        presence: The search, which learns from the records of the chunk.
        chunk: The examples, on the device that the loader gave them on.
        uncalled: The sites of layers that some batch did not call, besides those that the
            context's tap knows.
    """

    def __init__(self, presence: Presence, chunk: Batch, uncalled: Collection[Site]) -> None:
        self._presence = presence
        self._chunk = chunk
        self._uncalled = uncalled
        self._present = self._find()

    def _find(self) -> PresentPositions:
        conditional = self._presence.tap.conditional.union(self._uncalled)
        chunk = self._chunk
        return self._presence.positions.find(chunk.inputs, chunk.targets, conditional)

    def masks(self, record: BlockRecord) -> Masks | None:
        """Return the positions of a record's layer that take part; None for all."""
        new_blocks = self._presence.new_blocks
        # Without any gradient a record shows nothing: an adapter that is not trained yet has none.
        if record.block in new_blocks and _has_gradient(record):
            new_blocks.discard(record.block)
            if not _all_examples_have_gradients(record):
                self._presence.find_conditional_layers(self._chunk)
                self._present = self._find()
        return self._present.masks(record.block, len(record.inputs))

    def absent_weight(self, record: BlockRecord) -> Tensor | None:
        """Sum the weights of the examples without a position in a layer; None if there are none.

        Args:
            record: A record of the layer, with its masks.
        """
        if record.block.is_vector or not record.has_new_inputs:
            return None
        absent = absent_examples(record.layer, record.block, record.inputs, record.masks)
        if absent is None:
            return None
        weights = self._chunk.weights
        if weights is None:
            return absent.sum(dtype=torch.float64)
        return (weights.to(absent.device, torch.float64) * absent).sum()


def _has_gradient(record: BlockRecord) -> bool:
    return any(bool(gradients.any()) for gradients in record.output_gradients)


def _all_examples_have_gradients(record: BlockRecord) -> bool:
    by_call = [(g != 0).flatten(2).any(2).any(0) for g in record.output_gradients]
    return bool(torch.stack(by_call).any(0).all())
