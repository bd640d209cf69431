"""The record of one block that a pass over data hands to an accumulator."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.uses import Masks, Uses


@dataclass(frozen=True, eq=False)
class BlockRecord:
    """Activations and output gradients of a block, for a chunk of examples and some columns.

    Attributes:
        block: The curvature block.
        layer: The layer that the block belongs to.
        uses: The input `[B, ...]` of each call of the layer, with the gradients at its output
            `[K, B, ...]`, one for each column of the loss Hessian's root.
        masks: The positions that take part, `[B, T]` for each call; None for all positions.
        root_weights: The square roots of the examples' weights, which the gradients contain; None
            if the examples have no weights.
        has_new_inputs: Whether no earlier record had the inputs of these examples. A chunk whose
            columns are pushed back in several parts has one record for each part.
    """

    block: Block
    layer: nn.Module
    uses: Uses
    masks: Masks | None
    root_weights: Float[Tensor, " batch"] | None
    has_new_inputs: bool

    def weighted_inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the layer's calls, times the square roots of the examples' weights."""
        inputs, _ = zip(*self.uses, strict=True)  # type: ignore[misc]
        if self.root_weights is None:
            return inputs
        return tuple(scale_examples(x, self.root_weights, 0) for x in inputs)


def scale_examples(values: Tensor, scales: Float[Tensor, " batch"], dim: int) -> Tensor:
    """Multiply every example by its scale; the examples are along dimension `dim`."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return values * scales.to(values).view(shape)
