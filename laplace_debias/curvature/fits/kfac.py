"""Kronecker-factored curvature: factors → directions → magnitudes → blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import Eigenbasis, outer
from laplace_debias.curvature.fits.factors import gradient_factor, input_factor
from laplace_debias.curvature.fits.magnitudes import directional_curvature, ekfac_magnitudes
from laplace_debias.curvature.fits.over_ranks import (
    owners_of_blocks,
    shape_along_A,
    shape_along_G,
    shape_of_table,
    to_all,
    to_keepers,
)
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem, Seen
from laplace_debias.curvature.fits.sharded_blocks import Elsewhere, ShardedBlocks
from laplace_debias.curvature.fits.sums import (
    Sums,
    add_to,
    check_finite_sums,
    eigenbases,
    factor_sums,
)
from laplace_debias.curvature.fits.sweep import sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.operators import BlockDiagonal, EigenKronecker, LinearOperator


def fit_kfac(problem: Problem, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """K-FAC: directions from one set of batches, magnitudes from another (Eq. 9) or the same.

    The second factors are projected and freed one block at a time.

    Args:
        problem: The network and its blocks.
        directions: Pairs `(x, y)` whose factors give the eigenbases.
        magnitudes: Pairs that the curvature is measured on; None for the same.
    """
    sums, seen = factor_sums(problem, directions)
    bases = eigenbases(problem, sums, seen.num_examples, on_all=not problem.is_sharded)
    if magnitudes is None:
        return CurvatureFit(assemble(problem, bases, {b: bases[b].magnitudes for b in bases}), seen)
    if problem.is_sharded:
        return _measured_by_owners(problem, bases, seen, magnitudes)
    bases = _kept(problem, bases)

    along_G: Sums = {}
    along_A: Sums = {}

    def project_gradients(block: Block, G: Tensor) -> None:
        add_to(along_G, block, directional_curvature(G.to(problem.factor_dtype), bases[block].U_G))

    def project_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        A = input_factor(layer, block, inputs, masks).to(problem.factor_dtype)
        add_to(along_A, block, directional_curvature(A, bases[block].U_A))

    measured = sweep(
        problem,
        magnitudes,
        gradient_factor,
        project_gradients,
        project_inputs,
        seen.num_examples,
        additive=True,
        held=[along_G, along_A],
        along=_directions(problem, bases),
    )
    check_finite_sums({block: [G] for block, G in along_G.items()})
    check_finite_sums({block: [A] for block, A in along_A.items()})
    along_G = to_all(problem, along_G, shape_along_G)
    along_A = to_all(problem, along_A, shape_along_A)
    table = {}
    for block, G in along_G.items():
        ones = G.new_ones(*block.groups, 1)
        A = along_A[block] / measured.num_examples if block in along_A else ones
        on_others = outer(G / measured.num_examples, A)
        table[block] = bases[block].pooled(on_others, problem.dtype)
    return CurvatureFit(assemble(problem, bases, table), seen + measured)


def _measured_by_owners(
    problem: Problem, bases: dict[Block, Eigenbasis], seen: Seen, magnitudes: Pairs
) -> CurvatureFit:
    """K-FAC's magnitudes from second factors that go where the eigenbases are.

    Args:
        problem: The network and its blocks.
        bases: Those of this process's blocks.
        seen: What they were made of.
        magnitudes: Pairs that the curvature is measured on.
    """
    sums, measured = factor_sums(problem, magnitudes, seen.num_examples)
    table = {}
    for block in list(sums):
        G, A = (factor / measured.num_examples for factor in sums.pop(block))
        basis = bases[block]
        along = directional_curvature(G, basis.U_G), directional_curvature(A, basis.U_A)
        table[block] = basis.pooled(outer(*along), problem.dtype)
    return CurvatureFit(assemble(problem, bases, table), seen + measured)


def fit_ekfac(problem: Problem, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """EKFAC: K-FAC's directions, and the exact curvature along every one of them.

    Args:
        problem: The network and its blocks.
        directions: Pairs `(x, y)` whose factors give the eigenbases.
        magnitudes: Pairs that the curvature is measured on; None for the same, which are then
            read twice.
    """
    sums, seen = factor_sums(problem, directions)
    bases = _kept(problem, eigenbases(problem, sums, seen.num_examples))
    data, first = (directions, 0) if magnitudes is None else (magnitudes, seen.num_examples)
    table, measured = exact_sums(problem, bases, data, first)
    for block, squares in table.items():
        table[block] = bases[block].pooled(squares.div_(measured.num_examples), problem.dtype)
    everything = seen if magnitudes is None else seen + measured
    return CurvatureFit(assemble(problem, bases, table), everything)


def exact_sums(
    problem: Problem, bases: dict[Block, Eigenbasis], batches: Pairs, first: int
) -> tuple[Sums, Seen]:
    """Exact curvature along every direction, summed over examples.

    Returns:
        `[*groups, d_out, d_in]` of each block that this process keeps, and what was seen.
    """
    # Rotations are computed in the model's dtype: the squares that are summed do not cancel.
    dtype = problem.dtype
    rotations = {b: (_cast(of.U_G, dtype), _cast(of.U_A, dtype)) for b, of in bases.items()}
    sums: Sums = {}

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Tensor:
        return ekfac_magnitudes(layer, block, uses, *rotations[block])

    def collect(block: Block, squares: Tensor) -> None:
        add_to(sums, block, squares.to(problem.factor_dtype))

    along = _directions(problem, bases)
    seen = sweep(problem, batches, measure, collect, first=first, held=[sums], along=along)
    check_finite_sums({block: [squares] for block, squares in sums.items()})
    return to_keepers(problem, sums, shape_of_table), seen


def fit_diagonal(problem: Problem, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """The exact diagonal of the curvature: EKFAC's magnitudes along the coordinate axes.

    Directions that no data chose are not biased by any: a debiased fit is that of its second
    batches alone, of which `directions` is not even read.

    Args:
        problem: The network and its blocks.
        directions: Pairs `(x, y)`.
        magnitudes: Pairs that the curvature is measured on; None for `directions`.
    """
    ones = {block: torch.ones(0) for block in problem.blocks}
    bases = {block: Eigenbasis(None, None, none, none) for block, none in ones.items()}
    table, seen = exact_sums(problem, bases, directions if magnitudes is None else magnitudes, 0)
    for squares in table.values():
        squares.div_(seen.num_examples)
    return CurvatureFit(assemble(problem, bases, table), seen)


def _kept(problem: Problem, bases: Mapping[Block, Eigenbasis]) -> dict[Block, Eigenbasis]:
    """Eigenbases to measure along, of a pass that is gone on with those that it was begun with."""
    tensors = {
        f"{block.name}.{field.name}": value
        for block, basis in bases.items()
        for field in fields(basis)
        if (value := getattr(basis, field.name)) is not None
    }
    kept = problem.passes.along(tensors)
    return {
        block: Eigenbasis(*(kept.get(f"{block.name}.{field.name}") for field in fields(basis)))  # type: ignore[arg-type]
        for block, basis in bases.items()
    }


def _directions(problem: Problem, bases: Mapping[Block, Eigenbasis]) -> list[Tensor | None]:
    return [U for block in problem.blocks for U in (bases[block].U_G, bases[block].U_A)]


def _cast(directions: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if directions is None else directions.to(dtype)


FITS = {"kfac": fit_kfac, "ekfac": fit_ekfac, "diag": fit_diagonal}


def assemble(
    problem: Problem,
    bases: dict[Block, Eigenbasis],
    table: dict[Block, Float[Tensor, "*groups d_out d_in"]],
) -> BlockDiagonal:
    """The curvature from directions and magnitudes, in the model's dtype.

    Bases and table are emptied on the way, so that no more than one block is there twice.

    Args:
        problem: The network and its blocks.
        bases: The eigenbases of the blocks that this process keeps, at least.
        table: Magnitudes of these blocks.
    """
    dtype, ranks = problem.dtype, problem.ranks
    owners = owners_of_blocks(problem)
    none = torch.empty(0, dtype=dtype, device=problem.device)
    blocks: dict[str, LinearOperator] = {}
    for block in problem.blocks:
        if problem.is_sharded and owners[block] != ranks.rank:
            bases.pop(block, None)
            blocks[block.name] = Elsewhere(none, block.size, owners[block])
            continue
        basis = bases.pop(block)
        of_block = EigenKronecker(basis.U_G, basis.U_A, table.pop(block))
        blocks[block.name] = of_block.to(dtype)
    if problem.is_sharded:
        return ShardedBlocks(blocks, rank=ranks.rank, num_ranks=ranks.size)
    return BlockDiagonal(blocks)
