"""The log-determinant of a sharded posterior's precision, and its slope."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.operators import EigenKronecker


class ShardedLogDet(torch.autograd.Function):
    """log det P and its slope in every block's δ, with one sum over the processes for both.

    The slopes travel with the values, so that a backward pass sends nothing.
    """

    @staticmethod
    def forward(ctx: Any, deltas: Tensor, curvature: ShardedBlocks, data_weight: float) -> Tensor:
        """Each process adds its blocks.

        Args:
            ctx: Where the slopes are kept.
            deltas: δ of every block, float64.
            curvature: The blocks.
            data_weight: N/T, which the curvature is multiplied by.
        """
        table = deltas.new_zeros(2, len(deltas))
        for index, block in enumerate(curvature.blocks.values()):
            if isinstance(block, EigenKronecker):
                precisions = data_weight * block.magnitudes.double() + deltas[index]
                table[0, index] = precisions.log().sum()
                table[1, index] = precisions.reciprocal().sum()
        values, slopes = curvature.summed(table)
        ctx.save_for_backward(slopes)
        return values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The slopes times what comes in."""
        (slopes,) = ctx.saved_tensors
        return gradient * slopes, None, None
