"""Magnitudes: the curvature along given directions, measured on data."""

import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.block_tensors import (
    BlockTensors,
    add_to,
    check_finite,
    sum_over_processes,
)
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Factor,
    GramFactor,
    directional_curvature,
    ekfac_magnitudes,
    outer,
    trace_along,
)
from laplace_debias.curvature.fits.factor_sums import FactorAccumulator
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.network.batches import FitData
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.eigen_kronecker import is_thin


def curvature_along(
    context: FitContext, bases: dict[Block, Eigenbasis], data: FitData, first_index: int
) -> tuple[BlockTensors, BlockTensors, DataTotals]:
    """Measure the factors' own curvature along every direction on other data (Eq. 9).

    Returns:
        The products of both factors' curvatures, the traces of A, and the totals of the data.
    """
    accumulator = DirectionalCurvature(context, bases)
    totals = accumulate(accumulator, data, first_index)
    along_G, along_A = accumulator.projected
    table = {}
    traces_A = {}
    for block, G in along_G.items():
        A = G.new_ones(*block.groups, 1)
        if block in along_A:
            A = along_A[block] / totals.input_divisor(block)
        table[block] = bases[block].pooled(outer(G / totals.weight, A), context.dtype)
        traces_A[block] = trace_along(A, bases[block].U_A)
    return table, traces_A, totals


class DirectionalCurvature(FactorAccumulator):
    """An accumulator of the factors' curvature along directions from other data.

    Along thin directions rows are projected batch by batch. Along other directions the factors are
    summed first, and projected once.

    Attributes:
        projected: The curvature along every direction, summed over examples; first that of G, then
            that of A. After `reduce` those of all processes.
    """

    def __init__(self, context: FitContext, bases: Mapping[Block, Eigenbasis]) -> None:
        super().__init__(context)
        self._directions = {block: (basis.U_G, basis.U_A) for block, basis in bases.items()}
        self.projected: tuple[BlockTensors, BlockTensors] = ({}, {})

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The factors that are still summed, and the curvature along thin directions."""
        projected_G, projected_A = self.projected
        return {**super().tables, "G": projected_G, "A": projected_A}

    def keeps_rows(self, block: Block) -> tuple[bool, bool]:
        """Whether G, and A, of a block are measured as rows, which are projected at once."""
        U_G, U_A = self._directions[block]
        is_streamed_G, is_streamed_A = block.is_streamed
        return is_thin(U_G) or is_streamed_G, is_thin(U_A) or is_streamed_A

    def add_factor(self, block: Block, side: int, factor: Factor) -> None:
        """Project rows, or add a factor to the sum of factors."""
        if self.keeps_rows(block)[side]:
            self._project(block, side, factor)
        else:
            super().add_factor(block, side, factor)

    def _project(self, block: Block, side: int, factor: Factor) -> None:
        U = self._directions[block][side]
        curvature = directional_curvature(factor.to(self.context.factor_dtype), U)
        add_to(self.projected[side], block, curvature)

    def reduce(self) -> None:
        """Project the summed factors, block by block, and add the results of all processes."""
        for side, block in itertools.product((0, 1), self._directions):
            if block in self.sums[side]:
                self._project(block, side, self.sums[side].pop(block))
            if block in self.rows[side]:
                rows = torch.cat(self.rows[side].pop(block))
                self._project(block, side, GramFactor(rows))
        projected_G, projected_A = self.projected
        check_finite(projected_G)
        check_finite(projected_A)
        self.projected = (
            sum_over_processes(self.context, projected_G),
            sum_over_processes(self.context, projected_A),
        )


def exact_sums(
    context: FitContext, bases: dict[Block, Eigenbasis], data: FitData, first_index: int
) -> tuple[BlockTensors, DataTotals]:
    """Compute the exact curvature along every direction, summed over examples."""
    accumulator = SquaredGradients(context, bases)
    totals = accumulate(accumulator, data, first_index)
    return accumulator.squares, totals


class SquaredGradients(Accumulator):
    """An accumulator of the exact curvature along directions, the squared gradients.

    Attributes:
        squares: `[*groups, d_out, d_in]` for each block, summed over examples. After `reduce` those
            of all processes.
    """

    def __init__(self, context: FitContext, bases: Mapping[Block, Eigenbasis]) -> None:
        super().__init__(context)
        # Rotations are computed in the model's dtype: the squares that are summed do not cancel.
        self._rotations = {block: basis.directions(context.dtype) for block, basis in bases.items()}
        self.squares: BlockTensors = {}

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The squares, under the name of a checkpoint."""
        return {"table": self.squares}

    def measure(self, record: BlockRecord) -> Tensor:
        """Compute the squares for a chunk of examples."""
        U_G, U_A = self._rotations[record.block]
        return ekfac_magnitudes(record, U_G, U_A)

    def add(self, block: Block, measured: Tensor) -> None:
        """Add the squares of a chunk."""
        # The sum has the dtype of the first.
        if block not in self.squares:
            measured = measured.to(self.context.factor_dtype)
        add_to(self.squares, block, measured)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Begin the sum of a block if there is none."""
        if block not in self.squares:
            shape = list(block.shape)
            for side, U in enumerate(self._rotations[block]):
                if is_thin(U):
                    # The last magnitude is that of all remaining directions.
                    shape[side] = U.shape[-1] + 1
            zeros = torch.zeros(*block.groups, *shape, device=self.context.device)
            self.add(block, zeros)

    def reduce(self) -> None:
        """Check that the squares are finite, and add those of all processes."""
        check_finite(self.squares)
        self.squares = sum_over_processes(self.context, self.squares)


class _DroppedSquares(SquaredGradients):
    """Measures the squares along directions, and adds them to nothing."""

    def add(self, block: Block, measured: Tensor) -> None:
        """Drop the squares."""


def drop_squares(context: FitContext, data: FitData) -> None:
    """Measure the squares along the coordinate axes without keeping them, for a plan."""
    axes = {block: coordinate_axes() for block in context.blocks}
    accumulate(_DroppedSquares(context, axes), data)


def coordinate_axes() -> Eigenbasis:
    """Return the coordinate axes as directions, with no curvature of factors along them."""
    return Eigenbasis(None, None, torch.ones(0), torch.ones(0))


def assemble(
    context: FitContext,
    bases: dict[Block, Eigenbasis],
    table: dict[Block, Float[Tensor, "*groups d_out d_in"]] | None,
    traces_A: BlockTensors | None = None,
    totals: DataTotals | None = None,
) -> BlockDiagonal:
    """Build the curvature from directions and magnitudes.

    Bases and table are emptied on the way, so that no more than one block is there twice.

    Args:
        context: The blocks, in order, and the dtype.
        bases: The directions of each block.
        table: The magnitudes of each block; None for the products of the factors' eigenvalues.
        traces_A: The trace of A of each block, if the magnitudes in the table are products of
            curvatures of the factors.
        totals: The totals of the data that the magnitudes come from, if these are such products.
    """
    blocks: dict[str, EigenKronecker] = {}
    for block in context.blocks:
        basis = bases.pop(block)
        trace_A = None
        if table is None:
            magnitudes = outer(basis.eigenvalues_G, basis.eigenvalues_A)
            trace_A = trace_along(basis.eigenvalues_A, basis.U_A)
        else:
            magnitudes = table.pop(block)
            if traces_A is not None:
                trace_A = traces_A[block]
        U_G, U_A = basis.directions(context.dtype)
        kronecker = EigenKronecker(
            U_G,
            U_A,
            magnitudes.to(context.dtype),
            trace_A=None if trace_A is None else trace_A.to(context.dtype),
            share_A=1.0 if totals is None else totals.input_share(block),
        )
        blocks[block.name] = kronecker
    return BlockDiagonal(blocks)
