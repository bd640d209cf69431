"""Sums over data, block by block: factors, and the eigenbases that are made of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.fits.factors import (
    few_gradient_rows,
    gradient_factor,
    input_factor,
    moments,
)
from laplace_debias.curvature.fits.over_ranks import (
    shape_of_A,
    shape_of_G,
    shared_bases,
    to_owners,
)
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Pairs

Sums = dict[Block, Tensor]
# G and A of every block; a diagonal factor is a vector.
FactorSums = dict[Block, tuple[Tensor, Tensor]]


def factor_sums(problem: Problem, batches: Pairs, first: int = 0) -> tuple[FactorSums, Seen]:
    """Factors of every block, summed over the examples of all batches; `first` as in `Sweep.over`.

    On several processes they are those of all, and each block's are at its owner alone.
    """
    of_gradients: Sums = {}
    of_inputs: Sums = {}
    rows: dict[Block, list[Tensor]] = {}

    def measure(
        layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None
    ) -> tuple[bool, Tensor]:
        few = few_gradient_rows(layer, block, uses, masks)
        if few is not None:
            return True, few
        return False, gradient_factor(layer, block, uses, masks)

    def add_gradients(block: Block, measured: tuple[bool, Tensor]) -> None:
        are_rows, gradients = measured
        if not are_rows:
            add_to(of_gradients, block, gradients.to(problem.factor_dtype))
            return
        kept = rows.setdefault(block, [])
        kept.append(gradients)
        if sum(map(len, kept)) >= block.shape[0]:
            multiply_kept(block)

    def multiply_kept(block: Block) -> None:
        G = moments(torch.cat(rows.pop(block)))
        add_to(of_gradients, block, G.to(problem.factor_dtype))

    def add_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        A = input_factor(layer, block, inputs, masks)
        # The sum has the dtype of the first.
        add_to(of_inputs, block, A if block in of_inputs else A.to(problem.factor_dtype))

    sums = {"G": of_gradients, "A": of_inputs, "rows": rows}
    sweep = Sweep(problem, measure, add_gradients, add_inputs, sums=sums, additive=True)
    seen = sweep.over(batches, first)
    for block in list(rows):
        multiply_kept(block)
    check_finite_sums(
        {b: [G, *([of_inputs[b]] if b in of_inputs else [])] for b, G in of_gradients.items()}
    )
    of_gradients = to_owners(problem, of_gradients, shape_of_G)
    of_inputs = to_owners(problem, of_inputs, shape_of_A)
    factors = {}
    for block, G in of_gradients.items():
        # What an exact block is multiplied with, once an example.
        ones = G.new_full((*block.groups, 1, 1), seen.num_examples)
        factors[block] = (G, ones if block.is_exact else of_inputs[block])
    return factors, seen


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


def eigenbases(problem: Problem, sums: FactorSums, num_examples: int) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied block by block on the way.

    Args:
        problem: The network and its blocks.
        sums: Factors of the blocks that this process owns.
        num_examples: Of how many examples they are sums.
    """
    bases: dict[Block, Eigenbasis] = {}
    for block in list(sums):
        G, A = sums.pop(block)
        bases[block] = eigenbasis(G / num_examples, A / num_examples, block.name)
    return shared_bases(problem, bases) if problem.ranks.size > 1 else bases


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value
