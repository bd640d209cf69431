"""The calls of a block's layer: inputs, output gradients, and the positions that take part."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.calls import CallUses

# A layer's uses in one forward pass: input [B, ...] and output gradients [K, B, ...]; or the calls
# of modules that read a parameter.
LayerUses = Sequence[tuple[Tensor, Tensor]]
Uses = LayerUses | CallUses

# For every use of a layer, which positions take part, [B, T]; uses may differ in T.
Masks = Sequence[Tensor]


def chosen(
    rows: Float[Tensor, "columns batch positions *d"], mask: Bool[Tensor, "batch positions"]
) -> Float[Tensor, "columns n *d"]:
    """Rows of the positions that take part, `[K, n, ...]`, to be multiplied with themselves.

    On an accelerator the host would wait for their number: there the others are left in, as zeros.
    """
    if mask.device.type == "cpu":
        return rows[:, mask]
    # Not a product: what is padded may be infinite.
    return rows.where(mask.view(*mask.shape, *[1] * (rows.ndim - 3)), 0).flatten(1, 2)


def taking_examples(block: Block, uses: LayerUses) -> Masks:
    """All positions of the examples that have a gradient at the layer's outputs, by call.

    Whether a batch calls a layer for the others is a matter of how examples are batched.
    """
    masks = []
    has_gradient = torch.stack([(g != 0).flatten(2).any(2).any(0) for _, g in uses]).any(0)
    for _, g in uses:
        num_positions = g[0, 0].numel() // (block.num_groups * block.shape[0])
        masks.append(has_gradient.unsqueeze(1).expand(-1, num_positions))
    return masks


def exact_rows(
    layer: nn.Module, block: Block, uses: Uses
) -> Iterator[tuple[slice, Float[Tensor, "columns part *groups d_out"]]]:
    """Jacobian rows of what has an exact block, with the examples that they belong to.

    They are sums over all uses, or those that automatic differentiation gives for replayed calls.
    """
    if isinstance(uses, CallUses):
        yield from uses.rows(block)
        return
    rows = [block.rule.jacobian_rows(layer, block, x, g) for x, g in uses]
    yield slice(0, rows[0].shape[1]), torch.stack(rows).sum(0)
