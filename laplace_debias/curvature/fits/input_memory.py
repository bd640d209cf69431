"""How much memory `factors.input_factor` takes while it runs, from shapes alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.patches import has_fast_patches, most_numbers
from laplace_debias.curvature.layers.uses import activations, slices
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS
from laplace_debias.operators.eigh import may_be_low_rank


def most_numbers_of_input_factor(layer: Any, block: Block, inputs: Sequence[Tensor]) -> int:
    """Numbers at most, in the layer's dtype, while A is computed from a batch, A included.

    Args:
        layer: The layer.
        block: Its weight block.
        inputs: What goes into the layer's uses, `[B, ...]`, of which nothing but the shape is read.
    """
    d = block.shape[1]
    if block.role == "table":
        return 3 * d  # counts of eight bytes, and these as floating-point numbers
    of_A = block.num_groups * (d if block.has_diagonal_A else d * d)
    return of_A + max((_beside(layer, block, x, of_A) for x in inputs), default=0)


def _beside(layer: Any, block: Block, x: Tensor, of_A: int) -> int:
    """Numbers at most beside the sum, while what one use contributes is added."""
    is_convolution = isinstance(layer, CONVOLUTIONS)
    is_summed = block.sharing != "reduce" and not block.has_diagonal_A
    channels = x.chunk(block.num_groups, dim=1)[0] if is_convolution else x
    if is_convolution and is_summed and has_fast_patches(layer, channels):
        # Groups come one after the other, and are stacked then.
        others = (block.num_groups - 1) * block.shape[1] ** 2
        stacked = 2 * of_A if block.groups else 0
        return max(others + most_numbers(layer, channels), stacked)
    part = next(iter(slices(layer, block, x)))
    rows = activations(layer, block, x[part])
    is_copied = not isinstance(layer, torch.nn.Linear) or block.is_joint
    unfolded = rows.numel() if is_copied else 0
    if block.has_diagonal_A:
        return unfolded + rows.numel()
    doubled = 0
    if not block.groups and may_be_low_rank(rows.shape[0] * rows.shape[1], block.shape[1]):
        # The sum and the rows once more, in double precision.
        doubled = (of_A + rows.numel()) * 8 // layer.weight.element_size()
    return unfolded + (doubled or of_A // 8)
