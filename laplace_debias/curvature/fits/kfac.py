"""Kronecker-factored curvature: factors → directions → magnitudes → blocks."""

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Factor,
    Rows,
    directional_curvature,
    ekfac_magnitudes,
    outer,
)
from laplace_debias.curvature.fits.sums import (
    RunningSums,
    Sums,
    add_to,
    check_finite_sums,
    eigenbases,
    factor_sums,
    to_all,
)
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.eigen_kronecker import is_thin


def fit_kfac(problem: FitContext, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """K-FAC: directions from one set of batches, magnitudes from another (Eq. 9) or the same.

    The second factors are projected and freed one block at a time.
    """
    factors, seen = factor_sums(problem, directions)
    bases = eigenbases(problem, factors, seen.weight)
    if magnitudes is None:
        return CurvatureFit(assemble(problem, bases, None), seen)
    table, measured = curvature_along(problem, bases, magnitudes, seen.num_examples)
    return CurvatureFit(assemble(problem, bases, table), seen + measured)


def curvature_along(
    problem: FitContext, bases: dict[Block, Eigenbasis], batches: Pairs, first: int
) -> tuple[Sums, DataTotals]:
    """The factors' own curvature along every direction on other data (Eq. 9), and what was seen.

    Along thin directions rows are projected as they come; else the sum of the factors is.
    """
    running, sides = RunningSums(problem), (dict[Block, Tensor](), dict[Block, Tensor]())
    directions = {block: (basis.U_G, basis.U_A) for block, basis in bases.items()}
    as_rows = {
        block: (
            is_thin(U_G) or block.is_streamed[0],
            is_thin(U_A) or block.is_streamed[1],
        )
        for block, (U_G, U_A) in directions.items()
    }

    def project(block: Block, side: int, factor: Factor) -> None:
        projected = directional_curvature(factor.to(problem.factor_dtype), directions[block][side])
        add_to(sides[side], block, projected)

    def add(block: Block, side: int, factor: Factor) -> None:
        (project if as_rows[block][side] else running.add)(block, side, factor)

    seen = Sweep(
        problem, add, as_rows=as_rows, sums=running.kept | dict(zip("GA", sides, strict=True))
    ).over(batches, first)
    for side, block in itertools.product((0, 1), bases):
        if block in running.sums[side]:
            project(block, side, running.sums[side].pop(block))
        if block in running.rows[side]:
            project(block, side, Rows(torch.cat(running.rows[side].pop(block))))
    check_finite_sums(sides[0])
    check_finite_sums(sides[1])
    along_G, along_A = to_all(problem, sides[0]), to_all(problem, sides[1])
    table = {}
    for block, G in along_G.items():
        A = along_A[block] / seen.weight if block in along_A else G.new_ones(*block.groups, 1)
        table[block] = bases[block].pooled(outer(G / seen.weight, A), problem.dtype)
    return table, seen


def fit_ekfac(problem: FitContext, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """EKFAC: K-FAC's directions, and the exact curvature along every one of them.

    Without `magnitudes` the data of `directions` are read twice.
    """
    factors, seen = factor_sums(problem, directions)
    bases = eigenbases(problem, factors, seen.weight)
    data, first = (directions, 0) if magnitudes is None else (magnitudes, seen.num_examples)
    table, measured = exact_sums(problem, bases, data, first)
    for block, squares in table.items():
        table[block] = bases[block].pooled(squares.div_(measured.weight), problem.dtype)
    everything = seen if magnitudes is None else seen + measured
    return CurvatureFit(assemble(problem, bases, table), everything)


def exact_sums(
    problem: FitContext, bases: dict[Block, Eigenbasis], batches: Pairs, first: int
) -> tuple[Sums, DataTotals]:
    """Exact curvature `[*groups, d_out, d_in]` along every direction, summed over examples."""
    # Rotations are computed in the model's dtype: the squares that are summed do not cancel.
    dtype, sums = problem.dtype, dict[Block, Tensor]()
    rotations = {block: basis.directions(dtype) for block, basis in bases.items()}

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Tensor:
        return ekfac_magnitudes(layer, block, uses, *rotations[block])

    def collect(block: Block, squares: Tensor) -> None:
        add_to(sums, block, squares.to(problem.factor_dtype))

    seen = Sweep(problem, collect, measure, sums={"table": sums}).over(batches, first)
    check_finite_sums(sums)
    return to_all(problem, sums), seen


def fit_diagonal(problem: FitContext, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """The exact diagonal of the curvature: EKFAC's magnitudes along the coordinate axes.

    Directions that no data chose are not biased by any: a debiased fit is that of its second
    batches alone, of which `directions` is not even read.
    """
    ones = {block: torch.ones(0) for block in problem.blocks}
    bases = {block: Eigenbasis(None, None, none, none) for block, none in ones.items()}
    table, seen = exact_sums(problem, bases, directions if magnitudes is None else magnitudes, 0)
    for squares in table.values():
        squares.div_(seen.weight)
    return CurvatureFit(assemble(problem, bases, table), seen)


def assemble(
    problem: FitContext,
    bases: dict[Block, Eigenbasis],
    table: dict[Block, Float[Tensor, "*groups d_out d_in"]] | None,
) -> BlockDiagonal:
    """The curvature from directions and magnitudes, in the model's dtype; None for their own.

    Bases and table are emptied on the way, so that no more than one block is there twice.
    """
    blocks: dict[str, EigenKronecker] = {}
    for block in problem.blocks:
        basis = bases.pop(block)
        magnitudes = outer(basis.along_G, basis.along_A) if table is None else table.pop(block)
        U_G, U_A = basis.directions(problem.dtype)
        blocks[block.name] = EigenKronecker(U_G, U_A, magnitudes.to(problem.dtype))
    return BlockDiagonal(blocks)


FITS = {"kfac": fit_kfac, "ekfac": fit_ekfac, "diag": fit_diagonal}
