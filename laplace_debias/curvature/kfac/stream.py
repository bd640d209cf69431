"""A batch's curvature, measured block by block as a backward pass reaches the layers.

Two backends produce the same stream: BackPACK for plain sequential networks, the layer tap for any
forward pass. Whatever is measured (factors, or curvature along given directions) is handed over per
block and freed before the next one.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.layers import Uses
from laplace_debias.curvature.tap import Tap

Measured = TypeVar("Measured")
# From a layer, its block and the layer's uses to what is wanted of the block.
Measure = Callable[[nn.Module, Block, Uses], Measured]
Consume = Callable[[Block, Measured], None]
# From the outputs [B, C] to the cotangents to push back, [K, B, C].
Columns = Callable[[Tensor], Tensor]
Stream = Callable[[nn.Module, Sequence[Block], Tensor, Columns, Measure, Consume], None]


def stream_with_hooks(
    network: nn.Module,
    blocks: Sequence[Block],
    x: Tensor,
    columns: Columns,
    measure: Measure[Measured],
    consume: Consume[Measured],
) -> None:
    """Measure every block on one batch through the layer tap.

    Args:
        network: A `shadow` of the model, made for this call.
        blocks: The blocks wanted.
        x: Inputs, `[B, ...]`.
        columns: Called once with the outputs; checks them and gives the cotangents.
        measure: What to compute of a block.
        consume: Takes it.
    """
    of_layer: dict[str, list[Block]] = {}
    for block in blocks:
        of_layer.setdefault(block.layer, []).append(block)
    tap = Tap(network, list(of_layer))
    outputs = tap.forward(x)
    for path, uses in tap.backward(outputs, columns(outputs.detach())):
        layer = network.get_submodule(path)
        for block in of_layer[path]:
            consume(block, measure(layer, block, uses))
