"""Exponentially weighted sums of the factors of blocks, and of curvature along directions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.degenerate import average_degenerate
from laplace_debias.curvature.fits.directions import Eigenbasis, outer
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor, gram
from laplace_debias.curvature.fits.magnitudes import SquaredGradients, directional_curvature
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.training.batch_sums import SquaredSums

# The tensors of each block that are summed: G and A, or the parts of the magnitudes.
BlockParts = Mapping[Block, Sequence[Factor]]
# For each side of a block, the squared inner products of new and old directions, `[*groups, d, d]`.
Overlaps = Sequence[Tensor | None]


class RunningSum:
    r"""A discounted sum over batches: $S \leftarrow \beta S + s$, $w \leftarrow \beta w + n$.

    $S/w$ is the mean per example after any number of batches.

    Args:
        decay: β, in (0, 1]; 1 for the plain sum.
        dtype: The dtype of S.

    Attributes:
        parts: S for each block, one tensor per part.
        totals: Totals of the examples, discounted once for each later batch. Their weight is w.
    """

    def __init__(self, decay: float, dtype: torch.dtype) -> None:
        self.decay = decay
        self.dtype = dtype
        self.parts: dict[Block, list[Tensor]] = {}
        self.totals = DataTotals()

    def update(self, parts: BlockParts, totals: DataTotals) -> None:
        """Add the sums over a batch, after multiplying out factors that are stored as rows."""
        for block, batch_sums in _matrices(parts).items():
            if block not in self.parts:
                self.parts[block] = [torch.zeros_like(s, dtype=self.dtype) for s in batch_sums]
            for total, batch_sum in zip(self.parts[block], batch_sums, strict=True):
                total.mul_(self.decay).add_(batch_sum)
        self.totals = self.totals.discounted(self.decay) + totals.as_numbers()


def _matrices(parts: BlockParts) -> dict[Block, list[Tensor]]:
    """Return the parts of each block, with factors in rows replaced by their products.

    If a layer has one position per example, its weight and its bias have the same rows of G, so
    their products are computed only once.
    """
    matrices: dict[Block, list[Tensor]] = {}
    # For each layer, the rows of G of its last block, and their product.
    G_by_layer: dict[str, tuple[Tensor, Tensor]] = {}

    def multiplied(factor: Factor, layer: str) -> Tensor:
        if not isinstance(factor, GramFactor):
            return factor
        if layer in G_by_layer:
            rows, product = G_by_layer[layer]
            if torch.equal(rows, factor.rows):
                return product
        return gram(factor.rows)

    for block, factors in parts.items():
        matrices[block] = [multiplied(factor, block.layer) for factor in factors]
        G = factors[0]
        if isinstance(G, GramFactor):
            G_by_layer[block.layer] = G.rows, matrices[block][0]
    return matrices


class RunningMagnitudes(ABC):
    """A way to measure the magnitudes of batches, and their running sum.

    Attributes:
        num_parts: The number of tensors per block.
    """

    num_parts: ClassVar[int]

    def __init__(self, decay: float, dtype: torch.dtype) -> None:
        self.sums = RunningSum(decay, dtype)

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients | None:
        """Return the accumulator that a batch needs in addition to its factors, or None."""
        return None

    @abstractmethod
    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Compute the curvature along the directions, summed over the examples of a batch."""

    @abstractmethod
    def rotate(self, block: Block, old: Eigenbasis, new: Eigenbasis, dtype: torch.dtype) -> None:
        """Project a block's running sum onto new directions.

        The sum is first averaged over each old eigenspace, because the data do not determine a
        basis of an eigenspace, such as the null space, and the projection must not depend on its
        choice.

        Args:
            block: The block.
            old: The directions along which the sum was measured.
            new: The directions along which the next batches are measured.
            dtype: The dtype in which the directions were computed.
        """

    @abstractmethod
    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """Return a block's mean curvature per example along the directions."""


class FactorMagnitudes(RunningMagnitudes):
    """K-FAC magnitudes: the curvature of the current factors along the directions (Eq. 9)."""

    num_parts = 2

    def measure(
        self,
        bases: Mapping[Block, Eigenbasis],
        factors: BlockParts,
        squares: Mapping[Block, Tensor],
    ) -> dict[Block, list[Tensor]]:
        """Project the factors of a batch onto the directions."""
        measured = {}
        for block, (G, A) in factors.items():
            basis = bases[block].to(_dtype(G))
            along_G = directional_curvature(G, basis.G.directions)
            along_A = directional_curvature(A, basis.A.directions)
            measured[block] = [along_G, along_A]
        return measured

    def rotate(self, block: Block, old: Eigenbasis, new: Eigenbasis, dtype: torch.dtype) -> None:
        """Project the curvatures of G and of A onto the respective new directions."""
        curvatures = self.sums.parts[block]
        overlaps = overlaps_of_bases(new, old)
        for side, (overlap, pairs) in enumerate(zip(overlaps, old, strict=True)):
            if overlap is None:
                continue
            multiplicity = pairs.directions.multiplicity
            earlier = curvatures[side]
            curvature = average_degenerate(earlier, pairs.eigenvalues, dtype, multiplicity)
            curvature = curvature.to(overlap.dtype).unsqueeze(-1)
            curvatures[side] = (overlap @ curvature).squeeze(-1).to(earlier.dtype)

    def mean(self, block: Block) -> Float[Tensor, "*groups d_out d_in"]:
        """Return the outer product of the mean curvatures of the two factors."""
        along_G, along_A = self.sums.parts[block]
        totals = self.sums.totals
        return outer(along_G / totals.weight, along_A / totals.input_divisor(block))


class GradientMagnitudes(RunningMagnitudes):
    """EKFAC magnitudes: the squared components of the gradients along the directions."""

    num_parts = 1

    def accumulator(
        self, context: FitContext, bases: Mapping[Block, Eigenbasis]
    ) -> SquaredGradients:
        """Return an accumulator of squared gradients, or of squared sums for random labels."""
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
    """Square the inner products of new and old eigenvectors; None for a side without any."""
    overlaps: list[Tensor | None] = []
    for (_, U_new), (_, U_old) in zip(new, old, strict=True):
        if U_new is None or U_old is None:
            overlaps.append(None)
        else:
            overlaps.append((U_new.mT @ U_old).square())
    return overlaps
