"""Sums of several processes: of each block to one of them, which decomposes it, or to all."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laplace_debias.curvature.fits.directions import Eigenbasis
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.layers.blocks import Block

# From a block to the shape of what is summed for it; None if there is nothing.
Shape = Callable[[Block], tuple[int, ...] | None]


def factor_shape(block: Block, side: int) -> tuple[int, ...] | None:
    """The shape of the factor G (side 0) or A (side 1); an exact block has no A."""
    if side and block.is_exact:
        return None
    d = block.shape[side]
    is_diagonal = block.has_diagonal_A if side else block.has_diagonal_G
    return (d,) if is_diagonal else (*block.groups, d, d)


def owners_by_cost(blocks: Sequence[Block], num_ranks: int) -> dict[Block, int]:
    """The rank that decomposes each block: the longest first, each to the rank with least to do.

    A factor of d columns takes d³; a diagonal one nothing.

    Reference:
        Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    costs = dict.fromkeys(blocks, 0)
    for block in blocks:
        for shape in (factor_shape(block, 0), factor_shape(block, 1)):
            if shape is not None and len(shape) > 1:
                costs[block] += block.num_groups * shape[-1] ** 3
    loads = [0] * num_ranks
    owners = {}
    for block in sorted(costs, key=lambda block: -costs[block]):
        owner = loads.index(min(loads))
        owners[block] = owner
        loads[owner] += costs[block]
    return {block: owners[block] for block in blocks}


def to_owners(problem: Problem, sums: Mapping[Block, Tensor], shape: Shape) -> dict[Block, Tensor]:
    """Sums of all processes, each at its owner: of one process they are its own.

    A process without examples has no sums, but their shape.
    """
    if problem.ranks.size == 1:
        return dict(sums)
    return problem.ranks.sum_to_owners(
        _all(problem, sums, shape), owners_by_cost(problem.blocks, problem.ranks.size)
    )


def to_all(problem: Problem, sums: Mapping[Block, Tensor], shape: Shape) -> dict[Block, Tensor]:
    """Sums of all processes, on each; arguments as `to_owners`."""
    if problem.ranks.size == 1:
        return dict(sums)
    complete = _all(problem, sums, shape)
    problem.ranks.sum(list(complete.values()))
    return complete


def _all(problem: Problem, sums: Mapping[Block, Tensor], shape: Shape) -> dict[Block, Tensor]:
    """The sums of all blocks, in their order; a process without examples has zeros."""
    complete = {}
    for block in problem.blocks:
        if (of_block := shape(block)) is None:
            continue
        found = sums.get(block)
        if found is None:
            found = torch.zeros(of_block, dtype=problem.factor_dtype, device=problem.device)
        complete[block] = found.contiguous()
    return complete


def shared_bases(problem: Problem, bases: Mapping[Block, Eigenbasis]) -> dict[Block, Eigenbasis]:
    """The eigenbases of all blocks on every process, from those of each process's own blocks."""
    parts = {b: (of.U_G, of.U_A, of.along_G, of.along_A) for b, of in bases.items()}
    shared = problem.ranks.share(parts, owners_by_cost(problem.blocks, problem.ranks.size))
    return {block: Eigenbasis(*of) for block, of in shared.items()}  # type: ignore[arg-type]
