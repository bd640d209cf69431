"""Inputs of the layers of weight blocks, kept until A is computed from it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.layers.backends import Measure
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.uses import Masks, Uses

# From a layer, its block, its inputs (a part of the batch, a use), and which positions take part.
ConsumeInputs = Callable[
    [nn.Module, Block, Sequence[Sequence[Tensor]], Sequence[Masks | None]], None
]
MOST_KEPT = 2**30
"""Bytes of layers' inputs that are kept until A is computed from them."""


class KeptInputs:
    """Inputs of the layers of weight blocks, kept until the end of a batch.

    Args:
        network: The network that is swept.
        blocks: The curvature blocks.
        consume: As `sweep` takes it.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[Block], consume: ConsumeInputs) -> None:
        self._network = network
        self._blocks = [block for block in blocks if not block.is_exact]
        self._consume = consume
        self._parts: dict[Block, list[tuple[list[Tensor], Masks | None]]] = {}
        self._of_chunk: list[Block] = []
        self._num_bytes = 0

    def and_measure(
        self, measure: Measure, masks: Mapping[str, Masks], roots: Tensor | None = None
    ) -> Measure:
        """`measure`, which keeps the inputs of a chunk's blocks on the way.

        Args:
            measure: What to compute of a block.
            masks: Which positions take part, of the layers where not all do.
            roots: Those of the examples' weights, by which inputs are multiplied; None for one.
        """
        # Further cotangents of the same examples come with the same inputs.
        fresh = set(self._blocks)
        self._of_chunk.clear()

        def keep_and_measure(layer: nn.Module, block: Block, uses: Uses) -> Any:
            mask = masks.get(block.layer)
            if block in fresh and not isinstance(uses, CallUses):
                fresh.discard(block)
                inputs = [x if roots is None else by_example(x, roots, 0) for x, _ in uses]
                self._parts.setdefault(block, []).append((inputs, mask))
                self._of_chunk.append(block)
                self._num_bytes += _num_bytes(inputs)
            return (
                measure(layer, block, uses) if mask is None else measure(layer, block, uses, mask)
            )

        return keep_and_measure

    def forget_chunk(self) -> None:
        """Let go of what was kept of the last chunk, which is run again."""
        for block in self._of_chunk:
            inputs, _ = self._parts[block].pop()
            self._num_bytes -= _num_bytes(inputs)
            if not self._parts[block]:
                del self._parts[block]
        self._of_chunk.clear()

    def hand_over_if_full(self) -> None:
        """Hand over what is kept if it takes much memory."""
        if self._num_bytes > MOST_KEPT:
            self.hand_over()

    def hand_over(self) -> None:
        """Hand over what is kept, one block after the other, and forget it."""
        while self._parts:
            block, parts = self._parts.popitem()
            self._consume(self._network.get_submodule(block.layer), block, *_joined(parts))
        self._num_bytes = 0


def by_example(values: Tensor, factors: Tensor, dim: int) -> Tensor:
    """Values times a factor for each example, which are along a dimension."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return values * factors.to(values).view(shape)


def _num_bytes(inputs: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in inputs)


def _joined(
    parts: list[tuple[list[Tensor], Masks | None]],
) -> tuple[list[list[Tensor]], list[Masks | None]]:
    """The parts of a batch in one, where they are alike."""
    inputs, masks = [part for part, _ in parts], [mask for _, mask in parts]
    is_masked = any(mask is not None for mask in masks)
    if is_masked or len({tuple(x.shape[1:] for x in part) for part in inputs}) > 1:
        return inputs, masks
    return [[torch.cat(uses) for uses in zip(*inputs, strict=True)]], [None]
