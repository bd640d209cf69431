"""Sums of the blocks' Kronecker factors over data.

With several processes, each block's factors are summed on one process, the block's owner, which
decomposes the factors for all processes.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
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
from laplace_debias.curvature.fits.factor_keys import FactorKey, Side
from laplace_debias.curvature.fits.factors import gradient_factor, input_factors
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor, gram
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord

# The factors G and A of every block. A diagonal factor is a vector; a factor of few examples is
# kept as rows.
FactorSums = dict[Block, tuple[Factor, Factor]]


class SideSums:
    """Sums of the factors of one side, kept as rows while there are few, and then as matrices.

    A streamed factor never becomes a matrix; a bounded number of its rows is kept (see
    `GramFactor.max_rows`).

    Attributes:
        side: The side, G or A.
        sums: The sum of each factor that is not kept as rows: a matrix, or a vector if diagonal.
        rows: Rows from which no matrix has been formed yet.
        residual_traces: The traces that compressed rows leave out.
    """

    def __init__(self, context: FitContext, side: Side) -> None:
        self._context = context
        self.side = side
        self.sums: BlockTensors = {}
        self.rows: dict[Block, list[Tensor]] = {}
        self.residual_traces: BlockTensors = {}

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The sums, rows and traces, under the names of a checkpoint."""
        return {
            f"sums of {self.side.name}": self.sums,
            f"rows of {self.side.name}": self.rows,
            f"rests of {self.side.name}": self.residual_traces,
        }

    def keeps_rows(self, block: Block) -> bool:
        """Whether the factor of a block is measured as rows, however many rows there are."""
        return FactorKey(block, self.side).is_streamed

    def add_zero(self, block: Block) -> None:
        """Start the sum of a block at zero if it has no sum yet."""
        if block in self.sums or block in self.rows:
            return
        context = self._context
        key = FactorKey(block, self.side)
        size = (*block.groups, key.size)
        zeros = torch.zeros(1, *size, dtype=context.dtype, device=context.device)
        self.add(block, zeros[0] if key.is_diagonal else GramFactor(zeros))

    def add(self, block: Block, factor: Factor) -> None:
        """Add a factor to the sum of its block."""
        if not isinstance(factor, GramFactor):
            self._add_matrix(block, factor)
            return
        key = FactorKey(block, self.side)
        rows = self.rows.setdefault(block, [])
        if key.is_streamed:
            self._add_streamed(block, factor.rows.to(self._context.factor_dtype))
            return
        rows.append(factor.rows)
        # Only up to half as many rows as columns can remain rows. But rows of G wait until there
        # are as many as columns, because multiplying the rows of several chunks together is cheaper
        # than writing G for each chunk.
        num_rows_of_matrix = key.size // 2 + 1
        if self.side is Side.G:
            num_rows_of_matrix = key.size
        if sum(map(len, rows)) >= num_rows_of_matrix:
            self._add_matrix(block, gram(torch.cat(self.rows.pop(block))))

    def _add_matrix(self, block: Block, matrix: Tensor) -> None:
        """Add a matrix, or a diagonal."""
        sums = self.sums
        # Only the first matrix is converted. Later matrices are added in place, so the sum keeps
        # its dtype, and they need no converted copy.
        add_to(sums, block, matrix if block in sums else matrix.to(self._context.factor_dtype))

    def _add_streamed(self, block: Block, new_rows: Tensor) -> None:
        """Add rows part by part; compress each part with the leading directions found so far."""
        max_rows = block.most_rows
        assert max_rows is not None
        check_finite({block: new_rows})
        rows = self.rows[block]
        traces = self.residual_traces
        leading = rows[0] if rows else new_rows[:0]
        total = GramFactor(leading, traces.get(block, 0.0), max_rows)
        # A compression keeps half of `max_rows`, so it is repeated for every second part.
        for next_rows in new_rows.split(max_rows // 2):
            joined = torch.cat([total.rows, next_rows])
            total = GramFactor(joined, total.residual_trace, max_rows).compressed()
        rows[:] = [total.rows]
        traces[block] = torch.as_tensor(total.residual_trace).to(new_rows)


def sum_at_owners(context: FitContext, sums: SideSums) -> Mapping[Block, Factor]:
    """Check that sums are finite, and add the sums of all processes at each block's owner.

    Factors that are still rows are sent to all processes, because the rows are few, but matrices
    are summed only at the owner.

    Returns:
        The sums of all processes, for the blocks that this process owns.
    """
    factors_of_rows = _join_rows_of_all(context, sums)
    factors = _in_order(context, {**sums.sums, **factors_of_rows})
    check_finite(factors)
    if context.ranks.size == 1:
        return factors
    owners = owners_of_blocks(context)
    # Each process passes the same blocks, with zeros for blocks for which it has no sum.
    matrices = with_all_blocks(context, sums.sums)
    summed_matrices = context.ranks.sum_to_owners(matrices, owners)
    all_factors = _in_order(context, {**factors_of_rows, **summed_matrices})
    rank = context.ranks.rank
    return {block: factor for block, factor in all_factors.items() if owners[block] == rank}


def _in_order(context: FitContext, factors: Mapping[Block, Factor]) -> dict[Block, Factor]:
    """Sort factors by block, in the order of the context."""
    return {block: factors[block] for block in context.blocks if block in factors}


def _join_rows_of_all(context: FitContext, sums: SideSums) -> dict[Block, GramFactor]:
    """Return the rows of all processes for factors with so few rows that no matrix is formed.

    The other rows are added to the matrices.
    """
    traces = _traces_of_rows(context, sums)
    own_rows: list[Tensor] = []
    for block in traces:
        size = FactorKey(block, sums.side).size
        no_rows = torch.zeros(0, *block.groups, size, device=context.device)
        own_rows.append(torch.cat([no_rows.to(context.dtype), *sums.rows.pop(block, [])]))
    for block in list(sums.rows):
        sums.add(block, gram(torch.cat(sums.rows.pop(block))))
    if not traces:
        return {}
    rows_of_all = context.ranks.on_all(own_rows)
    assert rows_of_all is not None
    factors: dict[Block, GramFactor] = {}
    for (block, trace), rows in zip(traces.items(), rows_of_all, strict=True):
        max_rows = FactorKey(block, sums.side).max_rows
        factors[block] = GramFactor(rows.to(context.factor_dtype), trace, max_rows).compressed()
    return factors


def _traces_of_rows(context: FitContext, sums: SideSums) -> dict[Block, float]:
    """Find the factors that stay stored as rows, and sum their residual traces over all processes.

    A streamed factor always stays stored as rows. Any other factor does so only if no process has
    formed a matrix, and all processes together have at most half as many rows as columns.
    """
    counts_and_traces: list[tuple[int | None, float]] = []
    for block in context.blocks:
        num_rows = None if block in sums.sums else sum(map(len, sums.rows.get(block, [])))
        counts_and_traces.append((num_rows, float(sums.residual_traces.get(block, 0.0))))
    by_block = zip(*context.ranks.exchange(counts_and_traces), strict=True)
    traces: dict[Block, float] = {}
    for block, by_rank in zip(context.blocks, by_block, strict=True):
        key = FactorKey(block, sums.side)
        nums_rows, residual_traces = zip(*by_rank, strict=True)
        are_few = None not in nums_rows and 0 < 2 * sum(nums_rows) <= key.size
        if are_few or key.is_streamed:
            traces[block] = sum(residual_traces)
    return traces


Sums = TypeVar("Sums", bound=SideSums)


class SidedAccumulator(Accumulator, Generic[Sums]):
    """An accumulator of measurements on the factors of each side.

    Attributes:
        G: The sums of G.
        A: The sums of A.
    """

    needs_positions = True
    takes_single_columns = True

    def __init__(self, context: FitContext, G: Sums, A: Sums) -> None:
        super().__init__(context)
        self.G = G
        self.A = A

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The tables of both sides."""
        return {**self.G.tables, **self.A.tables}

    def measure(self, record: BlockRecord) -> tuple[Factor, Iterable[Factor]]:
        """Compute G for a chunk, and the parts of A unless an earlier record had these inputs."""
        block = record.block
        G = gradient_factor(record, as_rows=self.G.keeps_rows(block))
        if block.is_vector or not record.has_new_inputs:
            return G, ()
        parts_of_A = input_factors(
            record.layer,
            block,
            record.inputs,
            masks=record.masks,
            weights=record.input_weights,
            as_rows=self.A.keeps_rows(block),
        )
        return G, parts_of_A

    def add(self, block: Block, measured: tuple[Factor, Iterable[Factor]]) -> None:
        """Add G, and add the parts of A one by one."""
        G, parts_of_A = measured
        self.G.add(block, G)
        for A in parts_of_A:
            self.A.add(block, A)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Start the sums of a block at zero if it has no sums yet."""
        self.G.add_zero(block)
        if not block.is_vector:
            self.A.add_zero(block)


class FactorAccumulator(SidedAccumulator[SideSums]):
    """An accumulator of the blocks' factors."""

    def __init__(self, context: FitContext) -> None:
        super().__init__(context, SideSums(context, Side.G), SideSums(context, Side.A))
        self._factors_G: Mapping[Block, Factor] = {}
        self._factors_A: Mapping[Block, Factor] = {}

    def reduce(self) -> None:
        """Check that the sums are finite, and add all processes' sums at each block's owner."""
        self._factors_G = sum_at_owners(self.context, self.G)
        self._factors_A = sum_at_owners(self.context, self.A)

    def factors(self, weight: float) -> FactorSums:
        """Return G and A of the blocks that this process owns.

        Args:
            weight: The sum of all examples' weights, which is used as A for blocks without an input
                factor.
        """
        factors: FactorSums = {}
        for block, G in self._factors_G.items():
            if not block.is_vector:
                factors[block] = (G, self._factors_A[block])
                continue
            A = torch.full(
                (*block.groups, 1, 1),
                weight,
                dtype=self.context.factor_dtype,
                device=self.context.device,
            )
            factors[block] = (G, A)
        return factors


def factor_sums(
    context: FitContext, data: Iterable[Batch], first_index: int = 0
) -> tuple[FactorSums, DataTotals]:
    """Sum the factors of every block over all examples.

    With several processes, the sums are over the examples of all processes, and each block's sums
    are only at its owner. `first_index` is the index of the data's first example among all examples
    of the fit.
    """
    accumulator = FactorAccumulator(context)
    totals = accumulate(accumulator, data, first_index)
    return accumulator.factors(totals.weight), totals
