"""Exponentially weighted sums of blocks' factors, and of curvature along directions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.degenerate import average_degenerate
from laplace_debias.curvature.fits.directions import Eigenbasis, outer
from laplace_debias.curvature.fits.factor_sums import FactorAccumulator
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor, gram
from laplace_debias.curvature.fits.magnitudes import SquaredGradients, directional_curvature
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.records import BlockRecord

# The parts of each block: G and A, or the parts of the magnitudes.
BlockParts = Mapping[Block, Sequence[Factor]]
# Number of examples whose gradients are summed before they are squared.
_EXAMPLES_PER_SUM = 8
# For each side of a block, the squared inner products of new and old directions, `[*groups, d, d]`.
Overlaps = Sequence[Tensor | None]


class RunningSum:
    r"""A discounted sum over batches: $S \leftarrow \beta S + s$, $w \leftarrow \beta w + n$.

    $S/w$ is the mean per example after any number of batches.

    Args:
        decay: β, in (0, 1]; 1 for the plain sum.
        dtype: The dtype of S.

    Attributes:
        parts: S of every block, one tensor per part.
        totals: Totals of the examples, each of which is discounted once per later batch. The weight
            of the totals is w.
    """

    def __init__(self, decay: float, dtype: torch.dtype) -> None:
        self.decay = decay
        self.dtype = dtype
        self.parts: dict[Block, list[Tensor]] = {}
        self.totals = DataTotals()

    def update(self, parts: BlockParts, totals: DataTotals) -> None:
        """Add a batch's sums over its examples; rows are multiplied out first."""
        for block, batch_sums in _matrices(parts).items():
            if block not in self.parts:
                self.parts[block] = [torch.zeros_like(s, dtype=self.dtype) for s in batch_sums]
            for total, batch_sum in zip(self.parts[block], batch_sums, strict=True):
                total.mul_(self.decay).add_(batch_sum)
        self.totals = self.totals.discounted(self.decay) + totals.as_numbers()


def _matrices(parts: BlockParts) -> dict[Block, list[Tensor]]:
    """Return the parts of every block, and replace rows by their products.

    If a layer has one position per example, the rows of G are the same for its bias and its weight.
    Their products are computed only once.
    """
    matrices: dict[Block, list[Tensor]] = {}
    rows_of_weights: dict[str, Tensor] = {}
    products_of_weights: dict[str, Tensor] = {}
    for block, factors in parts.items():
        matrices[block] = []
        for factor in factors:
            if not isinstance(factor, GramFactor):
                matrices[block].append(factor)
                continue
            rows = rows_of_weights.get(block.layer)
            if rows is not None and torch.equal(rows, factor.rows):
                matrices[block].append(products_of_weights[block.layer])
                continue
            product = gram(factor.rows)
            if not matrices[block]:
                rows_of_weights[block.layer] = factor.rows
                products_of_weights[block.layer] = product
            matrices[block].append(product)
    return matrices


class RunningMagnitudes(ABC):
    """Magnitudes of batches, and their running sum.

    Attributes:
        num_parts: The number of tensors of a block.
    """

    num_parts: ClassVar[int]

    def __init__(self, decay: float, dtype: torch.dtype) -> None:
        self.sums = RunningSum(decay, dtype)

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients | None:
        """Return the accumulator that a batch needs besides its factors, or None."""
        return None

    @abstractmethod
    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Compute the sum over a batch's examples of the curvature along the directions."""

    @abstractmethod
    def rotate(self, block: Block, old: Eigenbasis, new: Eigenbasis, dtype: torch.dtype) -> None:
        """Project a block's running sum onto new directions.

        The sum is first averaged over each old eigenspace. The data do not determine a basis of an
        eigenspace, such as a null space, and the projection must not depend on the choice.

        Args:
            block: The block.
            old: The directions along which the sum was measured.
            new: The directions of the next batches.
            dtype: The dtype in which the directions were computed.
        """

    @abstractmethod
    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """Return a block's mean curvature per example along the directions."""


class FactorMagnitudes(RunningMagnitudes):
    """K-FAC magnitudes: curvature of current batches' factors along the directions (Eq. 9)."""

    num_parts = 2

    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Project a batch's factors."""
        measured = {}
        for block, (G, A) in factors.items():
            basis = bases[block].to(_dtype(G))
            along_G = directional_curvature(G, basis.G.directions)
            along_A = directional_curvature(A, basis.A.directions)
            measured[block] = [along_G, along_A]
        return measured

    def rotate(self, block: Block, old: Eigenbasis, new: Eigenbasis, dtype: torch.dtype) -> None:
        """Project the curvatures of G and A onto the new directions of their sides."""
        along = self.sums.parts[block]
        overlaps = overlaps_of_bases(new, old)
        for side, (overlap, pairs) in enumerate(zip(overlaps, old, strict=True)):
            if overlap is None:
                continue
            multiplicity = pairs.directions.multiplicity
            curvature = average_degenerate(along[side], pairs.eigenvalues, dtype, multiplicity)
            curvature = curvature.to(overlap.dtype).unsqueeze(-1)
            along[side] = (overlap @ curvature).squeeze(-1).to(along[side].dtype)

    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """Return the product of the factors' mean curvatures."""
        along_G, along_A = self.sums.parts[block]
        totals = self.sums.totals
        return outer(along_G / totals.weight, along_A / totals.input_divisor(block))


class GradientMagnitudes(RunningMagnitudes):
    """EKFAC magnitudes: squares of the coordinates of gradients along the directions."""

    num_parts = 1

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients:
        """Return an accumulator of squares, of summed gradients if signs or labels are random."""
        if context.cotangents.fisher.is_random:
            return SquaredSums(context, bases)
        return SquaredGradients(context, bases)

    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Return the squares of a batch."""
        return {block: [total] for block, total in squares.items()}

    def rotate(self, block: Block, old: Eigenbasis, new: Eigenbasis, dtype: torch.dtype) -> None:
        """Project the curvature onto the new directions of both sides."""
        overlap_G, overlap_A = overlaps_of_bases(new, old)
        (total,) = self.sums.parts[block]
        squares = old.pooled(total, dtype)
        if overlap_G is not None:
            squares = overlap_G @ squares.to(overlap_G.dtype)
        if overlap_A is not None:
            squares = squares.to(overlap_A.dtype) @ overlap_A.mT
        self.sums.parts[block] = [squares.to(total.dtype)]

    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """Return the mean of the squares."""
        (squares,) = self.sums.parts[block]
        return squares / self.sums.totals.weight


RUNNING_MAGNITUDES: Mapping[str, type[RunningMagnitudes]] = {
    "ekfac": GradientMagnitudes,
    "kfac": FactorMagnitudes,
}


def _dtype(factor: Factor) -> torch.dtype:
    return factor.rows.dtype if isinstance(factor, GramFactor) else factor.dtype


def overlaps_of_bases(new: Eigenbasis, old: Eigenbasis) -> Overlaps:
    """Square the products of new with old eigenvectors; a side where both are axes gets None."""
    overlaps: list[Tensor | None] = []
    for (_, U_new), (_, U_old) in zip(new, old, strict=True):
        if U_new is None or U_old is None:
            overlaps.append(None)
        else:
            overlaps.append((U_new.mT @ U_old).square())
    return overlaps


class SquaredSums(SquaredGradients):
    r"""An accumulator of the squares of gradients that are summed over several examples.

    With random signs or sampled labels, the gradients of different examples are independent and
    have mean zero, so their products vanish on average:

    $$\mathbb E\big(\textstyle\sum_n J_n\big)^2 = \sum_n\mathbb E\,J_n^2.$$

    A sum is a single matrix product and is rotated once, whereas separate gradients would each have
    to be rotated.

    Reference: the Gauss-Newton-Bartlett estimator of Liu et al. (2024), "Sophia: a scalable
    stochastic second-order optimizer for language model pre-training".
    """

    def measure(self, record: BlockRecord) -> Tensor:
        """Compute the squares for a chunk of examples."""
        block = record.block
        if block.is_vector or block.is_one_hot or record.num_positions == 1:
            # These gradients have few entries, or are outer products that are rotated in parts, so
            # they need not be summed first.
            return super().measure(record)
        output_directions, input_directions = self._directions[block]
        total: Tensor | None = None
        for start in range(0, record.num_examples, _EXAMPLES_PER_SUM):
            examples = slice(start, start + _EXAMPLES_PER_SUM)
            J = _summed_gradients(record, examples)
            J = output_directions.rotate(input_directions.rotate(J, -1), -2)
            squares = J.square().sum(0)
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total


def _summed_gradients(
    record: BlockRecord, examples: slice
) -> Float[Tensor, "columns *groups d_out d_in"]:
    """Compute the weight's gradient for each column, summed over the given examples."""
    block = record.block
    calls = [
        block.rule.weight_gradients(record.layer, block, x[examples], g[:, examples])
        for x, g in record.calls()
    ]
    return calls[0] if len(calls) == 1 else torch.stack(calls).sum(0)


class BatchSums(Accumulator):
    """The sums of one batch: its factors, and the squares along the directions.

    Attributes:
        factors: Sums the factors.
        squares: Sums the squares along the directions; None if no squares are needed.
    """

    needs_positions = True

    def __init__(self, context: FitContext) -> None:
        # A batch is summed in the dtype of the model; the running sums have a different dtype.
        super().__init__(replace(context, factor_dtype=context.dtype))
        self.factors = FactorAccumulator(self.context)
        self.squares: SquaredGradients | None = None

    def begin(self) -> None:
        """Forget the last batch."""
        self.factors = FactorAccumulator(self.context)
        if self.squares is not None:
            self.squares.squares = {}

    @property
    def tables(self) -> Mapping[str, dict]:
        """Return nothing, because the sums of a batch are not saved."""
        return {}

    def measure(self, record: BlockRecord) -> list:
        """Compute the terms of a record for each of the sums."""
        return [sums.measure(record) for sums in self._sums]

    def add(self, block: Block, measured: list) -> None:
        """Add the terms of a block to each of the sums."""
        for sums, value in zip(self._sums, measured, strict=True):
            sums.add(block, value)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Create the sums of a block if they do not exist."""
        for sums in self._sums:
            sums.add_zero(block, num_examples, num_columns)

    def reduce(self) -> None:
        """Check that the sums are finite."""
        for sums in self._sums:
            sums.reduce()

    @property
    def _sums(self) -> list[Accumulator]:
        return [self.factors] if self.squares is None else [self.factors, self.squares]
