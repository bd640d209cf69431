"""Magnitudes: the curvature along given directions, measured on data."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.block_tensors import (
    BlockTensors,
    add_to,
    check_finite,
    sum_over_processes,
)
from laplace_debias.curvature.fits.context import FactorScales, FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.directions import Eigenbasis, Eigenpairs, outer
from laplace_debias.curvature.fits.factor_keys import Side
from laplace_debias.curvature.fits.factor_sums import SidedAccumulator, SideSums
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.directions import Axes, Basis, Directions, ThinBasis


@dataclass(frozen=True)
class ProductMagnitudes:
    """Magnitudes that are products of the two factors' curvatures.

    Attributes:
        values: The products along every direction of each block.
        factor_scales: The scales of the two factors, by the block's name.
        totals: The totals of the data on which the magnitudes were measured.
    """

    values: BlockTensors
    factor_scales: dict[str, FactorScales]
    totals: DataTotals


def curvature_along(
    context: FitContext, bases: dict[Block, Eigenbasis], data: Iterable[Batch], first_index: int
) -> ProductMagnitudes:
    """Measure each factor's curvature along the directions, on other data (Eq. 9)."""
    accumulator = DirectionalCurvature(context, bases)
    totals = accumulate(accumulator, data, first_index)
    along_A = accumulator.A.projected
    values: BlockTensors = {}
    scales: dict[str, FactorScales] = {}
    for block, G in accumulator.G.projected.items():
        # The block of a vector has no input factor: its A is 1.
        A = G.new_ones(*block.groups, 1)
        if block in along_A:
            A = along_A[block] / totals.input_divisor(block)
        values[block] = bases[block].pooled(outer(G / totals.weight, A), context.dtype)
        trace_A = bases[block].A.directions.trace(A).to(context.dtype)
        scales[block.name] = FactorScales(trace_A, totals.input_share(block))
    return ProductMagnitudes(values, scales, totals)


class ProjectedSums(SideSums):
    """Sums of the curvature of one side's factors along directions from other data.

    Rows are projected onto thin directions batch by batch. For other directions, the factors are
    summed first, and projected once.

    Attributes:
        projected: The curvature along every direction, summed over examples, and after `reduce`
            also over all processes.
    """

    def __init__(
        self, context: FitContext, side: Side, directions: Mapping[Block, Directions]
    ) -> None:
        super().__init__(context, side)
        self._directions = directions
        self.projected: BlockTensors = {}

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The factors that are still being summed, and the curvature along thin directions."""
        return {**super().tables, self.side.name: self.projected}

    def keeps_rows(self, block: Block) -> bool:
        """Whether the factor of a block is measured as rows, which are projected immediately."""
        is_thin = isinstance(self._directions[block], ThinBasis)
        return is_thin or super().keeps_rows(block)

    def add(self, block: Block, factor: Factor) -> None:
        """Project rows, or add a factor to the sum of factors."""
        if self.keeps_rows(block):
            self._project(block, factor)
        else:
            super().add(block, factor)

    def _project(self, block: Block, factor: Factor) -> None:
        directions = self._directions[block]
        curvature = directional_curvature(factor.to(self._context.factor_dtype), directions)
        add_to(self.projected, block, curvature)

    def reduce(self) -> None:
        """Project the summed factors, block by block, and add the results of all processes."""
        for block in self._directions:
            if block in self.sums:
                self._project(block, self.sums.pop(block))
            if block in self.rows:
                rows = torch.cat(self.rows.pop(block))
                self._project(block, GramFactor(rows))
        check_finite(self.projected)
        self.projected = sum_over_processes(self._context, self.projected)


class DirectionalCurvature(SidedAccumulator[ProjectedSums]):
    """An accumulator of the factors' curvature along directions from other data."""

    def __init__(self, context: FitContext, bases: Mapping[Block, Eigenbasis]) -> None:
        output_directions = {block: basis.G.directions for block, basis in bases.items()}
        input_directions = {block: basis.A.directions for block, basis in bases.items()}
        G = ProjectedSums(context, Side.G, output_directions)
        A = ProjectedSums(context, Side.A, input_directions)
        super().__init__(context, G, A)

    def reduce(self) -> None:
        """Project the factors, and add the curvatures of all processes."""
        self.G.reduce()
        self.A.reduce()


def directional_curvature(
    factor: Factor, directions: Directions
) -> Float[Tensor, "*groups magnitudes"]:
    r"""Compute a factor's curvature along directions, $\mathrm{diag}(U^\top F U)$ (Eq. 9).

    Along thin directions, the factor must be a `GramFactor`.
    """
    if isinstance(factor, GramFactor):
        return directions.pool(directions.coordinates(factor.rows).square().sum(0))
    is_diagonal = factor.ndim == 1
    if isinstance(directions, Axes):
        return factor if is_diagonal else factor.diagonal(dim1=-2, dim2=-1)
    assert isinstance(directions, Basis)
    U = directions.U
    if is_diagonal:
        return U.square().T @ factor
    return ((factor @ U) * U).sum(-2).clamp_min(0)


def ekfac_sums(
    context: FitContext, bases: dict[Block, Eigenbasis], data: Iterable[Batch], first_index: int
) -> tuple[BlockTensors, DataTotals]:
    """Compute the exact curvature along every direction, summed over examples."""
    accumulator = SquaredGradients(context, bases)
    totals = accumulate(accumulator, data, first_index)
    return accumulator.squares, totals


class SquaredGradients(Accumulator):
    """An accumulator of squared gradients, which are the exact curvature along directions.

    Attributes:
        squares: The squares `[*groups, d_out, d_in]` of each block, summed over examples, and after
            `reduce` also over all processes.
    """

    def __init__(self, context: FitContext, bases: Mapping[Block, Eigenbasis]) -> None:
        super().__init__(context)
        # Rotations are computed in the model's dtype, because sums of squares do not cancel.
        self._directions: dict[Block, tuple[Directions, Directions]] = {}
        for block, basis in bases.items():
            converted_basis = basis.to(context.dtype)
            directions = converted_basis.G.directions, converted_basis.A.directions
            self._directions[block] = directions
        self.squares: BlockTensors = {}

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The squares, under the name of a checkpoint."""
        return {"table": self.squares}

    def measure(self, record: BlockRecord) -> Tensor:
        """Compute the squares for a chunk of examples."""
        output_directions, input_directions = self._directions[record.block]
        return ekfac_magnitudes(record, output_directions, input_directions)

    def add(self, block: Block, measured: Tensor) -> None:
        """Add the squares of a chunk."""
        # The sum has the dtype of its first summand, so the first summand is converted.
        if block not in self.squares:
            measured = measured.to(self.context.factor_dtype)
        add_to(self.squares, block, measured)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Start the sum of a block at zero if it has no sum yet."""
        if block not in self.squares:
            shape = [directions.num_magnitudes for directions in self._directions[block]]
            zeros = torch.zeros(*block.groups, *shape, device=self.context.device)
            self.add(block, zeros)

    def reduce(self) -> None:
        """Check that the squares are finite, and add the squares of all processes."""
        check_finite(self.squares)
        self.squares = sum_over_processes(self.context, self.squares)


def ekfac_magnitudes(
    record: BlockRecord, output_directions: Directions, input_directions: Directions
) -> Float[Tensor, "*groups rows columns"]:
    r"""Compute the exact curvature along a block's directions, summed over examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    block = record.block
    is_linear = block.rule.is_linear and not block.is_vector
    if is_linear and len(record.inputs) == 1 and record.inputs[0].ndim == 2:
        # With one position, the square of the outer product is the outer product of the squares.
        activations = block.rule.activations(record.layer, block, record.inputs[0])
        a = input_directions.coordinates(activations[:, 0])
        rows = output_directions.coordinates(record.columns()[0][..., 0])
        squares = rows.square().sum(0).T @ a.square()
    else:
        squares = _squared_coordinates(record, output_directions, input_directions)
    return output_directions.pool(input_directions.pool(squares).mT).mT


def _squared_coordinates(
    record: BlockRecord, output_directions: Directions, input_directions: Directions
) -> Float[Tensor, "*groups d_out_coordinates d_in_coordinates"]:
    """Sum the squares of a Jacobian's coordinates over the columns and the examples."""
    shape = output_directions.num_coordinates, input_directions.num_coordinates
    total: Tensor | None = None
    for _, J, columns in rotated_jacobians(record, output_directions, input_directions):
        squares = J.square().sum((0, 1))
        if total is None and columns is None and squares.shape[-2:] == shape:
            total = squares
            continue
        if total is None:
            total = squares.new_zeros(*squares.shape[:-2], *shape)
        if columns is None:
            # Rows and columns that are left out are zero.
            total[..., : squares.shape[-2], : squares.shape[-1]] += squares
        else:
            total.index_add_(1, columns, squares)
    assert total is not None
    return total


class _DroppedSquares(SquaredGradients):
    """An accumulator that measures the squares along directions, but does not add them."""

    def add(self, block: Block, measured: Tensor) -> None:
        """Drop the squares."""


def drop_squares(context: FitContext, data: Iterable[Batch]) -> None:
    """Measure the squares along the coordinate axes for a plan, without keeping the squares."""
    axes = {block: coordinate_axes(block) for block in context.blocks}
    accumulate(_DroppedSquares(context, axes), data)


def coordinate_axes(block: Block) -> Eigenbasis:
    """Return the coordinate axes of a block as directions whose eigenvalues are 1."""
    d_out, d_in = block.shape
    # Expand a single number to save memory, because a layer may be very wide.
    one = torch.ones(())
    return Eigenbasis(Eigenpairs(one.expand(d_out), None), Eigenpairs(one.expand(d_in), None))


def assemble(
    context: FitContext, bases: dict[Block, Eigenbasis], magnitudes: BlockTensors
) -> BlockDiagonal:
    """Build the curvature from directions and magnitudes, `[*groups, d_out, d_in]` for each block.

    Both mappings are emptied in the process, so that at most one block is in memory twice.
    """
    blocks: dict[str, EigenKronecker] = {}
    for block in context.blocks:
        blocks[block.name] = _kronecker(bases.pop(block), magnitudes.pop(block), context.dtype)
    return BlockDiagonal(blocks)


def assemble_eigenvalues(
    context: FitContext, bases: dict[Block, Eigenbasis], totals: DataTotals
) -> tuple[BlockDiagonal, dict[str, FactorScales]]:
    """Build the curvature from directions and the products of the factors' own eigenvalues.

    Bases are emptied in the process, so that at most one block is in memory twice.

    Args:
        context: The blocks, in order, and the dtype.
        bases: The directions of each block.
        totals: The totals of the data from which the factors were computed.

    Returns:
        The curvature, and the scales of the factors by the block's name.
    """
    blocks: dict[str, EigenKronecker] = {}
    scales: dict[str, FactorScales] = {}
    for block in context.blocks:
        basis = bases.pop(block)
        blocks[block.name] = _kronecker(
            basis, outer(basis.G.eigenvalues, basis.A.eigenvalues), context.dtype
        )
        trace_A = basis.A.directions.trace(basis.A.eigenvalues).to(context.dtype)
        scales[block.name] = FactorScales(trace_A, totals.input_share(block))
    return BlockDiagonal(blocks), scales


def _kronecker(
    basis: Eigenbasis, magnitudes: Float[Tensor, "*groups d_out d_in"], dtype: torch.dtype
) -> EigenKronecker:
    """Build the curvature of a block in the dtype of the posterior."""
    converted_basis = basis.to(dtype)
    return EigenKronecker(converted_basis.G.U, converted_basis.A.U, magnitudes.to(dtype))
