"""The quantities that a backward pass records for one block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.calls import ReplayedCalls

# For each call of a layer, a mask [B, T] of the positions that take part; calls may differ in T.
Masks = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class BlockRecord:
    """Inputs and output gradients of a block's layer, for a chunk of examples and some columns.

    Attributes:
        block: The curvature block.
        layer: The layer of the block.
        inputs: The input `[B, ...]` of each call of the layer.
        output_gradients: The gradients at each call's output, `[K, B, ...]`, one for each column of
            the loss Hessian's root.
        replayed: The calls of modules that read the block's parameter, if these calls are run
            again.
        masks: The positions that take part, `[B, T]` for each call, or None if all take part.
        input_weights: The weights with which the examples enter the factor A; None if all are 1.
        has_new_inputs: Whether no earlier record had the inputs of these examples. A chunk whose
            columns are pushed back in several parts has one record for each part.
    """

    block: Block
    layer: nn.Module
    inputs: Sequence[Tensor] = ()
    output_gradients: Sequence[Tensor] = ()
    replayed: ReplayedCalls | None = None
    masks: Masks | None = None
    input_weights: Float[Tensor, " batch"] | None = None
    has_new_inputs: bool = True

    @property
    def num_columns(self) -> int:
        """K, the number of columns."""
        if self.replayed is not None:
            return self.replayed.num_columns
        return self.output_gradients[0].shape[0]

    @property
    def num_examples(self) -> int:
        """B, the number of examples."""
        if self.replayed is not None:
            return self.replayed.num_examples
        return self.output_gradients[0].shape[1]

    @property
    def num_positions(self) -> int:
        """The number of positions of all calls together."""
        entries = sum(g[0, 0].numel() for g in self.output_gradients)
        return entries // (self.block.num_groups * self.block.shape[0])

    def columns(
        self, examples: slice = slice(None)
    ) -> list[Float[Tensor, "columns part *groups d_out positions"]]:
        """Return the output gradients of each call as columns; `examples` selects the examples."""
        rule = self.block.rule
        return [
            rule.output_gradients(self.layer, self.block, x[examples], g[:, examples])
            for x, g in self.calls()
        ]

    def calls(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the input and the output gradients of each call."""
        yield from zip(self.inputs, self.output_gradients, strict=True)

    def jacobian_rows(
        self,
    ) -> Iterator[tuple[slice, Float[Tensor, "columns part *groups d_out"]]]:
        """Compute the Jacobian rows of an exact block, with the slice of their examples.

        The rows are sums over all calls. For replayed calls, automatic differentiation computes
        them.
        """
        if self.replayed is not None:
            yield from self.replayed.rows(self.block)
            return
        rule = self.block.rule
        rows = [rule.jacobian_rows(self.layer, self.block, x, g) for x, g in self.calls()]
        yield slice(0, self.num_examples), torch.stack(rows).sum(0)
