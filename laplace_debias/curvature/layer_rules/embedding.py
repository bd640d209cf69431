"""Embeddings: tables whose rows are looked up."""

from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import (
    Block,
    LayerInputs,
    LayerRule,
    OutputGradients,
)
from laplace_debias.curvature.layer_rules.generic import GenericRule


class EmbeddingRule(LayerRule):
    """An embedding: a linear layer with one-hot activations, so A is diagonal."""

    module_types = (nn.Embedding,)
    kind = "embedding"
    is_one_hot = True

    def blocks(
        self, layer: nn.Module, path: str, key: str, sharing: str, joint: bool
    ) -> list[Block]:
        """Make the block of the table, always with `"expand"`: each token has its own row."""
        blocks = super().blocks(layer, path, key, sharing, joint)
        return [replace(block, sharing="expand") for block in blocks]

    def matrices(
        self, layer: nn.Module, weight: Shaped[Tensor, "d_in d_out"]
    ) -> Shaped[Tensor, "d_out d_in"]:
        """Transpose the table."""
        return weight.T

    def padding(self, layer: Any, x: LayerInputs) -> Bool[Tensor, "batch positions"] | None:
        """Return a mask of the positions whose token is the layer's `padding_idx`."""
        if layer.padding_idx is None:
            return None
        return self.activation_indices(layer, x).eq(layer.padding_idx)

    def output_gradients(
        self, layer: nn.Module, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns batch d_out positions"]:
        """Reshape the gradients, and set the gradients at padding to zero.

        torch does not differentiate with respect to the padding's row of the table.
        """
        columns = super().output_gradients(layer, block, x, g)
        padding = self.padding(layer, x)
        return columns if padding is None else columns * padding.logical_not().unsqueeze(1)

    def use_dense_gradients(self, layer: Any) -> None:
        """Switch off sparse gradients, and their division by the tokens' frequencies."""
        layer.sparse = False
        layer.scale_grad_by_freq = False


class EmbeddingBagRule(GenericRule):
    """An embedding that sums over bags of tokens, whose table is measured like any parameter."""

    module_types = (nn.EmbeddingBag,)

    def use_dense_gradients(self, layer: Any) -> None:
        """Switch off sparse gradients, and their division by the tokens' frequencies."""
        layer.sparse = False
        layer.scale_grad_by_freq = False
