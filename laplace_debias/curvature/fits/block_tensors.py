"""Tensors by block: sums over the examples of one process or of several processes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.layer_rules import Block

BlockTensors = dict[Block, Tensor]


def add_to(sums: BlockTensors, block: Block, value: Tensor) -> None:
    """Add a value to the sum of a block, or begin the sum."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value


def check_finite(sums: Mapping[Block, Factor]) -> None:
    """Require that the sums of all blocks are finite.

    A sum is finite only if every summand is, so one check after the last batch is enough, and the
    host waits for the device only once. For the same reason, the total of all entries is checked
    first. The entries are searched only if the total is not finite, because the total itself may
    overflow.
    """
    if not sums:
        return
    entries = [value.rows if isinstance(value, GramFactor) else value for value in sums.values()]
    totals = torch.stack([tensor.sum(dtype=torch.float64) for tensor in entries])
    for block, tensor, is_finite in zip(sums, entries, totals.isfinite().tolist(), strict=True):
        if not is_finite and not bool(tensor.isfinite().all()):
            layer = f"layer {block.layer!r}" if block.layer else "the model"
            raise ValueError(
                f"The curvature of {block.name} contains NaN or Inf. The inputs of {layer}, or "
                "the gradients with respect to its outputs, contain Inf, or their squares are "
                "too large for the dtype. Remove Inf from the data, rescale the data, or convert "
                "the model to a wider dtype."
            )


def owners_of_blocks(context: FitContext) -> dict[Block, int]:
    """Choose the process that decomposes each block.

    Blocks are assigned by descending cost, each to the process with the least work. A factor of d
    columns costs d³, and a diagonal factor costs nothing.

    Reference:
        Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    costs = dict.fromkeys(context.blocks, 0)
    for block in context.blocks:
        for shape in block.factor_shapes:
            if len(shape) > 1:
                costs[block] += block.num_groups * shape[-1] ** 3
    owners: dict[Block, int] = {}
    loads = [0] * context.ranks.size
    for block in sorted(costs, key=costs.__getitem__, reverse=True):
        owners[block] = loads.index(min(loads))
        loads[owners[block]] += costs[block]
    return owners


def with_all_blocks(context: FitContext, sums: Mapping[Block, Tensor]) -> BlockTensors:
    """Return the sums of this process, with zeros for blocks that only other processes have.

    With several processes, the sums are in the order of the blocks, as they are on all processes.
    """
    if context.ranks.size == 1:
        return dict(sums)
    shapes: dict[str, tuple[int, ...]] = {}
    own_shapes = {block.name: tuple(value.shape) for block, value in sums.items()}
    for shapes_of_process in context.ranks.exchange(own_shapes):
        shapes |= shapes_of_process
    complete: BlockTensors = {}
    for block in context.blocks:
        if block in sums:
            complete[block] = sums[block].contiguous()
        elif block.name in shapes:
            complete[block] = torch.zeros(
                shapes[block.name], dtype=context.factor_dtype, device=context.device
            )
    return complete


def sum_over_processes(context: FitContext, sums: Mapping[Block, Tensor]) -> BlockTensors:
    """Add the sums of all processes, and return the result on each process."""
    complete = with_all_blocks(context, sums)
    context.ranks.sum(list(complete.values()))
    return complete
