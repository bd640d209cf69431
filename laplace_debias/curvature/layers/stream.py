"""A batch's curvature, measured block by block as a backward pass reaches the layers.

Two backends produce the same stream: BackPACK for plain sequential networks, the layer tap for any
forward pass. Whatever is measured of a block is handed over and freed before the next one.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block, Site
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs

Measured = TypeVar("Measured")
# From a layer, its block and the layer's uses (and which positions take part, where not all do) to
# what is wanted of the block.
Measure = Callable[..., Measured]
Consume = Callable[[Block, Measured], None]
# From the outputs [B, ..., C] to the cotangents to push back, [K, B, ..., C].
Columns = Callable[[Tensor], Tensor]


# One batch: inputs [B, ...], the cotangents, what to compute of a block, who takes it, and how many
# cotangents are pushed back at once.
Stream = Callable[[Inputs, Columns, Measure, Consume, int], None]
# Built once on a `shadow` of the model and the blocks wanted.
Backend = Callable[[nn.Module, Sequence[Block]], Stream]


class HookStream:
    """The stream through the layer tap.

    Args:
        network: A `shadow` of the model: hooks are left on it.
        blocks: The blocks wanted.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[Block]) -> None:
        self._at: dict[Site, list[Block]] = {}
        for block in blocks:
            self._at.setdefault(block.site, []).append(block)
        self._tap = Tap.on(network, blocks)

    def __call__(
        self,
        x: Inputs,
        columns: Columns,
        measure: Measure[Measured],
        consume: Consume[Measured],
        at_once: int,
    ) -> None:
        """Measure every block on one batch.

        Args:
            x: Inputs, `[B, ...]`.
            columns: Called once with the outputs; checks them and gives the cotangents.
            measure: What to compute of a block, for some of the cotangents.
            consume: Takes it, once for every part of the cotangents.
            at_once: How many cotangents make a part.
        """
        outputs = self._tap.forward(x)
        parts = columns(outputs.detach()).split(at_once)
        for index, part in enumerate(parts):
            for site, uses in self._tap.backward(outputs, part, again=index + 1 < len(parts)):
                for block in self._at[site]:
                    consume(block, measure(self._tap.module(site), block, uses))
