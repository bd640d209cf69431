"""Sums of the blocks' Kronecker factors over data.

Several processes sum each block's factors at one of them, its owner, which decomposes them for all.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.block_tensors import (
    BlockTensors,
    add_to,
    check_finite,
    owners_of_blocks,
    with_all_blocks,
)
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.directions import Factor, GramFactor, moments
from laplace_debias.curvature.fits.factors import gradient_factor, input_factors
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.network.batches import FitData

# G and A of every block; a diagonal factor is a vector, one of few examples is their rows.
FactorSums = dict[Block, tuple[Factor, Factor]]
# The sides of a block.
_G = 0
_A = 1


class FactorAccumulator(Accumulator):
    """An accumulator of the blocks' factors, as rows while these are few, then as matrices.

    For a streamed factor a bounded number of rows is kept; see `GramFactor.max_rows`.

    Attributes:
        sums: Matrices, and diagonals as vectors; first those of G, then those of A.
        rows: Rows that no matrix was made of yet, in the same order.
        residual_traces: The traces that compressed rows leave out, in the same order.
        reduced: The sums of all processes, for the blocks that this process owns, after `reduce`.
    """

    needs_positions = True
    takes_single_columns = True

    def __init__(self, context: FitContext) -> None:
        super().__init__(context)
        self.sums: tuple[BlockTensors, BlockTensors] = ({}, {})
        self.rows: tuple[dict[Block, list[Tensor]], dict[Block, list[Tensor]]] = ({}, {})
        self.residual_traces: tuple[BlockTensors, BlockTensors] = ({}, {})
        self.reduced: list[dict[Block, Factor]] = []

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The sums, rows and traces of both sides, under the names of a checkpoint."""
        return {
            "sums of G": self.sums[_G],
            "sums of A": self.sums[_A],
            "rows of G": self.rows[_G],
            "rows of A": self.rows[_A],
            "rests of G": self.residual_traces[_G],
            "rests of A": self.residual_traces[_A],
        }

    def keeps_rows(self, block: Block) -> tuple[bool, bool]:
        """Whether G, and A, of a block are measured as rows, however many these are."""
        return block.is_streamed

    def measure(self, record: BlockRecord) -> tuple[Factor, Iterable[Factor]]:
        """Compute G for a chunk, and the parts of A unless an earlier record had these inputs."""
        keeps_rows_G, _ = self.keeps_rows(record.block)
        G = gradient_factor(record, as_rows=keeps_rows_G)
        if record.block.is_exact or not record.has_new_inputs:
            return G, ()
        return G, self.measure_inputs(record)

    def measure_inputs(self, record: BlockRecord) -> Iterable[Factor]:
        """Compute the parts of A for a chunk, which need no output gradients."""
        _, keeps_rows_A = self.keeps_rows(record.block)
        inputs = record.weighted_inputs()
        return input_factors(
            record.layer, record.block, inputs, masks=record.masks, as_rows=keeps_rows_A
        )

    def add(self, block: Block, measured: tuple[Factor, Iterable[Factor]]) -> None:
        """Add G, and the parts of A one by one."""
        G, parts_of_A = measured
        self.add_factor(block, _G, G)
        for A in parts_of_A:
            self.add_factor(block, _A, A)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Begin a block's sums if there are none."""
        self.add_zero_factor(block, _G)
        if not block.is_exact:
            self.add_zero_factor(block, _A)

    def add_zero_factor(self, block: Block, side: int) -> None:
        """Begin the sum of one side, 0 for G and 1 for A, if there is none."""
        if block in self.sums[side] or block in self.rows[side]:
            return
        context = self.context
        size = (*block.groups, block.shape[side])
        zeros = torch.zeros(1, *size, dtype=context.dtype, device=context.device)
        is_diagonal = len(block.factor_shapes[side]) == 1
        self.add_factor(block, side, zeros[0] if is_diagonal else GramFactor(zeros))

    def add_factor(self, block: Block, side: int, factor: Factor) -> None:
        """Add a factor of one side, 0 for G and 1 for A."""
        d = block.shape[side]
        if not isinstance(factor, GramFactor):
            self._add_matrix(block, side, factor)
            return
        rows = self.rows[side].setdefault(block, [])
        if block.is_streamed[side]:
            self._add_streamed(block, side, factor.rows.to(self.context.factor_dtype))
            return
        rows.append(factor.rows)
        if sum(map(len, rows)) >= (d // 2 + 1 if side == _A else d):
            self._add_matrix(block, side, moments(torch.cat(self.rows[side].pop(block))))

    def _add_matrix(self, block: Block, side: int, matrix: Tensor) -> None:
        """Add a matrix, or a diagonal, to the sum of one side."""
        sums = self.sums[side]
        # The sum has the dtype of the first. A second matrix of another dtype needs no copy.
        add_to(sums, block, matrix if block in sums else matrix.to(self.context.factor_dtype))

    def _add_streamed(self, block: Block, side: int, new_rows: Tensor) -> None:
        """Add rows part by part, each of which is compressed with the leading directions so far."""
        check_finite({block: new_rows})
        rows = self.rows[side][block]
        traces = self.residual_traces[side]
        leading = rows[0] if rows else new_rows[:0]
        total = GramFactor(leading, traces.get(block, 0.0), block.most_rows)
        for next_rows in new_rows.split(2 * (block.rank or 1)):
            joined = torch.cat([total.rows, next_rows])
            total = GramFactor(joined, total.residual_trace, total.max_rows).compressed()
        rows[:] = [total.rows]
        traces[block] = torch.as_tensor(total.residual_trace).to(new_rows)

    def reduce(self) -> None:
        """Check that the sums are finite, and add those of all processes at each block's owner."""
        self.reduced = [self.reduce_side(_G), self.reduce_side(_A)]

    def reduce_side(self, side: int) -> dict[Block, Factor]:
        """Sum G (0) or A (1) over all processes, for the blocks that this process owns."""
        context = self.context
        few_rows = self._join_few_rows(side)
        factors: dict[Block, Factor] = {**self.sums[side], **few_rows}
        factors = {block: factors[block] for block in context.blocks if block in factors}
        check_finite(factors)
        if context.ranks.size == 1:
            return factors
        owners = owners_of_blocks(context)
        matrices = with_all_blocks(context, self.sums[side])
        factors = {**few_rows, **context.ranks.sum_to_owners(matrices, owners)}
        own_blocks = [b for b in context.blocks if b in factors and owners[b] == context.ranks.rank]
        return {block: factors[block] for block in own_blocks}

    def _join_few_rows(self, side: int) -> dict[Block, GramFactor]:
        """Return the rows of all processes, where these are so few that no matrix is made of them.

        The other rows are added to the matrices.
        """
        context = self.context
        rows = self.rows[side]
        sums = self.sums[side]
        counts_and_traces: list[tuple[int | None, float]] = []
        for block in context.blocks:
            num_rows = None if block in sums else sum(map(len, rows.get(block, [])))
            trace = float(self.residual_traces[side].get(block, 0.0))
            counts_and_traces.append((num_rows, trace))
        by_block = zip(*context.ranks.exchange(counts_and_traces), strict=True)
        traces: dict[Block, float] = {}
        joined: list[Tensor] = []
        for block, pairs in zip(context.blocks, by_block, strict=True):
            counts, block_traces = zip(*pairs, strict=True)
            are_few = None not in counts and 0 < 2 * sum(counts) <= block.shape[side]
            if are_few or block.is_streamed[side]:
                traces[block] = sum(block_traces)
                no_rows = torch.zeros(0, *block.groups, block.shape[side], device=context.device)
                joined.append(torch.cat([no_rows.to(context.dtype), *rows.pop(block, [])]))
            elif block in rows:
                self._add_matrix(block, side, moments(torch.cat(rows.pop(block))))
        factors = {}
        rows_of_all = context.ranks.on_all(joined) if traces else []
        for (block, trace), block_rows in zip(traces.items(), rows_of_all or [], strict=True):
            max_rows = block.most_rows if block.is_streamed[side] else None
            factor = GramFactor(block_rows.to(context.factor_dtype), trace, max_rows)
            factors[block] = factor.compressed()
        return factors

    def factors(self, weight: float) -> FactorSums:
        """Return G and A of the blocks that this process owns.

        Args:
            weight: The sum of all examples' weights, once for each of which G is multiplied by 1.
        """
        factors_G, factors_A = self.reduced
        factors: FactorSums = {}
        for block, G in factors_G.items():
            if block.is_exact:
                factors_A[block] = torch.full(
                    (*block.groups, 1, 1),
                    weight,
                    dtype=self.context.factor_dtype,
                    device=self.context.device,
                )
            factors[block] = (G, factors_A[block])
        return factors


def factor_sums(
    context: FitContext, data: FitData, first_index: int = 0
) -> tuple[FactorSums, DataTotals]:
    """Sum the factors of every block over all examples.

    With several processes the sums are over the examples of all, each block's only at its owner.
    `first_index` is that of the data's first example among all examples of the fit.
    """
    accumulator = FactorAccumulator(context)
    totals = accumulate(accumulator, data, first_index)
    return accumulator.factors(totals.weight), totals
