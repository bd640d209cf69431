"""Sums over data, block by block: factors, and the eigenbases that are made of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.fits.factors import gradient_factor, input_factor, moments
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.fits.sweep import sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Masks, Uses, exact_rows
from laplace_debias.curvature.network.batches import Pairs

Sums = dict[Block, Tensor]
# G and A of every block; a diagonal factor is a vector.
FactorSums = dict[Block, tuple[Tensor, Tensor]]
# From so many entries on, a matrix is not added to for every few rows.
_WIDE = 256


def factor_sums(problem: Problem, batches: Pairs, first: int = 0) -> tuple[FactorSums, Seen]:
    """Factors of every block, summed over the examples of all batches; `first` as in `sweep`."""
    sums: FactorSums = {}
    rows: dict[Block, list[Tensor]] = {}

    def measure(layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None) -> Tensor:
        if _is_wide(block):
            return exact_rows(layer, block, uses).flatten(0, 1)
        return gradient_factor(layer, block, uses, masks)

    def add_gradients(block: Block, measured: Tensor) -> None:
        if not _is_wide(block):
            add(block, measured)
            return
        kept = rows.setdefault(block, [])
        kept.append(measured)
        if sum(map(len, kept)) >= block.shape[0]:
            add(block, moments(torch.cat(rows.pop(block))))

    def add(block: Block, G: Tensor) -> None:
        G = G.to(problem.factor_dtype)
        if block in sums:
            sums[block][0].add_(G)
        else:
            sums[block] = (G, _no_input_factor(block, G))

    def add_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        sums[block][1].add_(input_factor(layer, block, inputs, masks))

    seen = sweep(problem, batches, measure, add_gradients, add_inputs, first, additive=True)
    while rows:
        block, kept = rows.popitem()
        add(block, moments(torch.cat(kept)))
    check_finite_sums(sums)
    for block, (_, A) in sums.items():
        if block.is_exact:
            A.mul_(seen.num_examples)
    return sums, seen


def _is_wide(block: Block) -> bool:
    """Whether a batch's chunks keep their Jacobian rows, far fewer numbers than their product."""
    return block.is_exact and block.num_groups == 1 and block.shape[0] >= _WIDE


def check_finite_sums(sums: Mapping[Block, Sequence[Tensor]]) -> None:
    """Require what was summed over the data to be finite, block by block.

    What is not finite in one batch is not in the sum either, so that the host waits for the device
    once, behind the last batch.

    Args:
        sums: Sums of each block.

    Raises:
        ValueError: Naming the first block where one holds NaN or Inf, and its layer.
    """
    extremes = [torch.stack(torch.aminmax(part)).double() for of in sums.values() for part in of]
    if not extremes:
        return
    is_finite = iter(torch.stack(extremes).isfinite().all(1).tolist())
    for block, of_block in sums.items():
        found = [next(is_finite) for _ in of_block]
        if not all(found):
            layer = f"layer {block.layer!r}" if block.layer else "the model"
            raise ValueError(
                f"The curvature of {block.name} holds NaN or Inf: the inputs of {layer}, or the "
                "gradients at its outputs, hold Inf or overflow when they are squared. Look for "
                "Inf in the data, rescale it, or convert the model to a wider dtype."
            )


def _no_input_factor(block: Block, like: Tensor) -> Tensor:
    """A before any data: zero, or what an exact block is multiplied with."""
    if block.is_exact:
        return like.new_ones(*block.groups, 1, 1)
    d_in = block.shape[1]
    if block.role == "table":
        return like.new_zeros(d_in)
    return like.new_zeros(*block.groups, d_in, d_in)


def eigenbases(sums: FactorSums, num_examples: int) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied block by block on the way."""
    bases: dict[Block, Eigenbasis] = {}
    for block in list(sums):
        G, A = sums.pop(block)
        bases[block] = eigenbasis(G / num_examples, A / num_examples, block.name)
    return bases


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value
