"""Masks of the positions that count in layers whose positions share a weight."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_debias.curvature.layer_rules import Block

# For each call of a layer, which positions take part, [B, T]; calls may differ in T.
Masks = Sequence[Tensor]


def select_positions(
    rows: Float[Tensor, "columns batch positions *d"], mask: Bool[Tensor, "batch positions"]
) -> Float[Tensor, "columns n *d"]:
    """Select the rows of the positions that count, `[K, n, ...]`.

    On an accelerator the host would wait for their number: there the others are left in, as zeros.
    """
    if mask.device.type == "cpu":
        return rows[:, mask]
    # Not a product: what is padded may be infinite.
    return rows.where(mask.view(*mask.shape, *[1] * (rows.ndim - 3)), 0).flatten(1, 2)


def reached_examples(block: Block, output_gradients: Sequence[Tensor]) -> Masks:
    """Mask the examples that have a gradient at the layer's outputs, call by call.

    Whether a batch calls a layer for the others is a matter of how examples are batched.
    """
    by_call = [(g != 0).flatten(2).any(2).any(0) for g in output_gradients]
    has_gradient = torch.stack(by_call).any(0)
    masks = []
    for g in output_gradients:
        num_positions = g[0, 0].numel() // (block.num_groups * block.shape[0])
        masks.append(has_gradient.unsqueeze(1).expand(-1, num_positions))
    return masks
