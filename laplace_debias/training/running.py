"""Exponentially weighted sums of blocks' factors, and of curvature along directions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Factor,
    GramFactor,
    add_moments,
    directional_curvature,
    outer,
)
from laplace_debias.curvature.fits.factor_sums import FactorAccumulator
from laplace_debias.curvature.fits.magnitudes import SquaredGradients
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.records import BlockRecord

# The parts of each block: G and A, or those of the magnitudes.
BlockParts = Mapping[Block, Sequence[Factor]]
# Per block and side, the squares of the products of new with old directions `[*groups, d, d]`.
Overlaps = Sequence[Tensor | None]


class RunningSum:
    r"""A sum over batches that forgets: $S \leftarrow \beta S + s$, $w \leftarrow \beta w + n$.

    $S/w$ is the mean per example, whatever the number of batches so far.

    Attributes:
        decay: β, in (0, 1]; 1 for the plain sum.
        parts: S of every block, one tensor per part.
        weight: w, the number of examples, each discounted as often as a batch came after it.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.parts: dict[Block, list[Tensor]] = {}
        self.weight = 0.0

    def update(self, parts: BlockParts, num_examples: float) -> None:
        """Add a batch's sums over its examples; of rows, their products."""
        for block, values in parts.items():
            if block not in self.parts:
                self.parts[block] = [_zeros(value) for value in values]
            for total, value in zip(self.parts[block], values, strict=True):
                total.mul_(self.decay)
                if isinstance(value, GramFactor):
                    add_moments(total, value.rows)
                else:
                    total.add_(value)
        self.weight = self.decay * self.weight + num_examples


def _zeros(value: Factor) -> Tensor:
    """The sum of no such values."""
    if isinstance(value, GramFactor):
        *groups, d = value.rows.shape[1:]
        return value.rows.new_zeros(*groups, d, d)
    return torch.zeros_like(value)


class RunningMagnitudes(ABC):
    """Measures the magnitudes of batches, and keeps their running sum.

    Attributes:
        num_parts: The number of tensors of a block.
    """

    num_parts: ClassVar[int]

    def __init__(self, decay: float) -> None:
        self.sums = RunningSum(decay)

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients | None:
        """The sums along the directions that a batch needs besides its factors, or none."""
        return None

    @abstractmethod
    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Compute a batch's curvature along the directions, summed over its examples."""

    @abstractmethod
    def rotate(self, block: Block, overlaps: Overlaps) -> None:
        """Project a block's running sum onto new directions."""

    @abstractmethod
    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """A block's curvature along the directions, per example."""


class FactorMagnitudes(RunningMagnitudes):
    """K-FAC: curvature of the factors of present batches along the directions (Eq. 9)."""

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
            along_G = directional_curvature(G, bases[block].U_G)
            along_A = directional_curvature(A, bases[block].U_A)
            measured[block] = [along_G, along_A]
        return measured

    def rotate(self, block: Block, overlaps: Overlaps) -> None:
        """Project the curvature of G and of A, each onto its new directions."""
        along = self.sums.parts[block]
        for side, overlap in enumerate(overlaps):
            if overlap is not None:
                along[side] = (overlap @ along[side].unsqueeze(-1)).squeeze(-1)

    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """The product of the factors' mean curvatures."""
        along_G, along_A = self.sums.parts[block]
        return outer(along_G / self.sums.weight, along_A / self.sums.weight)


class GradientMagnitudes(RunningMagnitudes):
    """EKFAC: squares of the coordinates of gradients along the directions."""

    num_parts = 1

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients:
        """The squares of a batch."""
        return SquaredGradients(context, bases)

    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Return the squares of a batch."""
        return {block: [total] for block, total in squares.items()}

    def rotate(self, block: Block, overlaps: Overlaps) -> None:
        """Project the curvature onto the new directions of both sides."""
        overlap_G, overlap_A = overlaps
        (squares,) = self.sums.parts[block]
        if overlap_G is not None:
            squares = overlap_G @ squares
        if overlap_A is not None:
            squares = squares @ overlap_A.mT
        self.sums.parts[block] = [squares]

    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """The mean of the squares."""
        (squares,) = self.sums.parts[block]
        return squares / self.sums.weight


RUNNING_MAGNITUDES: Mapping[str, type[RunningMagnitudes]] = {
    "ekfac": GradientMagnitudes,
    "kfac": FactorMagnitudes,
}


def overlaps_of_bases(new: Eigenbasis, old: Eigenbasis) -> Overlaps:
    """The squares of the products of new with old eigenvectors; None where both are the axes."""
    overlaps: list[Tensor | None] = []
    for U_new, U_old in ((new.U_G, old.U_G), (new.U_A, old.U_A)):
        if U_new is None or U_old is None:
            overlaps.append(None)
        else:
            overlaps.append((U_new.mT @ U_old).square())
    return overlaps


class BatchSums(Accumulator):
    """The sums of one batch: its factors, and the squares along the directions.

    Attributes:
        factors: Sums the factors.
        squares: Sums the squares along the directions; None if none are needed.
    """

    needs_positions = True

    def __init__(self, context: FitContext) -> None:
        super().__init__(context)
        self.factors = FactorAccumulator(context)
        self.squares: SquaredGradients | None = None

    def begin(self) -> None:
        """Forget the last batch."""
        self.factors = FactorAccumulator(self.context)
        if self.squares is not None:
            self.squares.squares = {}

    @property
    def tables(self) -> Mapping[str, dict]:
        """Nothing: a batch's sums are not saved."""
        return {}

    def measure(self, record: BlockRecord) -> list:
        """Compute what each of the sums adds for a record."""
        return [sums.measure(record) for sums in self._sums]

    def add(self, block: Block, measured: list) -> None:
        """Add to each of the sums."""
        for sums, value in zip(self._sums, measured, strict=True):
            sums.add(block, value)

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Begin the block's sums if there are none."""
        for sums in self._sums:
            sums.add_zero(block, num_examples, num_columns)

    def reduce(self) -> None:
        """Check that the sums are finite."""
        for sums in self._sums:
            sums.reduce()

    @property
    def _sums(self) -> list[Accumulator]:
        return [self.factors] if self.squares is None else [self.factors, self.squares]
