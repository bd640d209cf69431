"""Sums over data, block by block: factors, and the eigenbases that are made of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import Eigenbasis, Factor, Rows, eigenbasis
from laplace_debias.curvature.fits.factors import (
    few_gradient_rows,
    few_input_rows,
    gradient_factor,
    input_factor,
    moments,
)
from laplace_debias.curvature.fits.over_ranks import (
    owners_by_cost,
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
# G and A of every block; a diagonal factor is a vector, one of few examples is their rows.
FactorSums = dict[Block, tuple[Factor, Factor]]
RowsOf = dict[Block, list[Tensor]]


def factor_sums(problem: Problem, batches: Pairs, first: int = 0) -> tuple[FactorSums, Seen]:
    """Factors of every block, summed over the examples of all batches; `first` as in `Sweep.over`.

    On several processes they are those of all, and each block's are at its owner alone.
    """
    of_gradients: Sums = {}
    of_inputs: Sums = {}
    gradient_rows: RowsOf = {}
    input_rows: RowsOf = {}
    dtype = problem.factor_dtype

    def measure(layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None) -> Factor:
        few = few_gradient_rows(layer, block, uses, masks)
        return gradient_factor(layer, block, uses, masks) if few is None else Rows(few)

    def add_gradients(block: Block, gradients: Factor) -> None:
        if not isinstance(gradients, Rows):
            add_to(of_gradients, block, gradients.to(dtype))
            return
        kept = gradient_rows.setdefault(block, [])
        kept.append(gradients.rows)
        if sum(map(len, kept)) >= block.shape[0]:
            multiply(block, gradient_rows, of_gradients)

    def add_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        few = None if block in of_inputs else few_input_rows(layer, block, inputs, masks)
        if few is not None:
            kept = input_rows.setdefault(block, [])
            kept.append(few)
            if sum(map(len, kept)) * 2 > block.shape[1]:
                multiply(block, input_rows, of_inputs)
            return
        A = input_factor(layer, block, inputs, masks)
        # The sum has the dtype of the first.
        add_to(of_inputs, block, A if block in of_inputs else A.to(dtype))

    def multiply(block: Block, rows: RowsOf, sums: Sums) -> None:
        add_to(sums, block, moments(torch.cat(rows.pop(block))).to(dtype))

    sums = {"G": of_gradients, "A": of_inputs, "rows": gradient_rows, "input rows": input_rows}
    sweep = Sweep(problem, measure, add_gradients, add_inputs, sums=sums, additive=True)
    seen = sweep.over(batches, first)
    few = [
        _few(problem, rows, of_side, side)
        for side, (rows, of_side) in enumerate(
            ((gradient_rows, of_gradients), (input_rows, of_inputs))
        )
    ]
    for rows, of_side in ((gradient_rows, of_gradients), (input_rows, of_inputs)):
        for block in list(rows):
            multiply(block, rows, of_side)
    found = {
        block: [of[block] for of in (of_gradients, of_inputs) if block in of]
        + [of[block].rows for of in few if block in of]
        for block in problem.blocks
    }
    check_finite_sums({block: parts for block, parts in found.items() if parts})
    few_G, few_A = few
    owned_G: dict[Block, Factor] = {
        **few_G,
        **to_owners(problem, of_gradients, lambda b: None if b in few_G else shape_of_G(b)),
    }
    owned_A: dict[Block, Factor] = {
        **few_A,
        **to_owners(problem, of_inputs, lambda b: None if b in few_A else shape_of_A(b)),
    }
    owners = owners_by_cost(problem.blocks, problem.ranks.size)
    factors: FactorSums = {}
    for block, owner in owners.items():
        if owner == problem.ranks.rank:
            # What an exact block is multiplied with, once an example.
            shape = (*block.groups, 1, 1)
            ones = torch.full(shape, seen.weight, dtype=dtype, device=problem.device)
            factors[block] = (owned_G[block], ones if block.is_exact else owned_A[block])
    return factors, seen


def _few(problem: Problem, rows: RowsOf, sums: Sums, side: int) -> dict[Block, Rows]:
    """The factors of so few rows that no matrix is made of them; these are taken out of `rows`.

    Args:
        problem: The blocks, and the processes whose rows are joined.
        rows: Rows of the factors.
        sums: Factors that are matrices already.
        side: 0 for G, 1 for A.
    """
    ranks, limit = problem.ranks, {block: block.shape[side] for block in problem.blocks}
    own = {
        block.name: None if block in sums else sum(map(len, rows.get(block, [])))
        for block in problem.blocks
    }
    of_ranks = ranks.exchange(own)
    few = []
    for block in problem.blocks:
        counts = [of_rank[block.name] for of_rank in of_ranks]
        if None not in counts and 0 < 2 * sum(counts) <= limit[block]:
            few.append(block)
    if not few:
        return {}
    none = [torch.zeros(0, limit[b], dtype=problem.dtype, device=problem.device) for b in few]
    joined = ranks.on_all(
        [torch.cat([zero, *rows.pop(b, [])]) for b, zero in zip(few, none, strict=True)]
    )
    assert joined is not None
    return {b: Rows(of.to(problem.factor_dtype)) for b, of in zip(few, joined, strict=True)}


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


def eigenbases(problem: Problem, sums: FactorSums, weight: float) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied block by block on the way.

    Args:
        problem: The network and its blocks.
        sums: Factors of the blocks that this process owns.
        weight: Of how many examples they are sums, or of what weight.
    """
    bases: dict[Block, Eigenbasis] = {}
    for block in list(sums):
        G, A = sums.pop(block)
        bases[block] = eigenbasis(G / weight, A / weight, block.name)
    return shared_bases(problem, bases) if problem.ranks.size > 1 else bases


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value
