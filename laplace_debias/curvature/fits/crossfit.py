"""Cross-fitting: eigenvectors from all examples, and the curvature along them from held-out folds.

With two separate batches, each half of the data serves only one of the two purposes. Cross-fitting
computes the eigenvectors from all examples. The magnitudes come from K folds: the curvature of each
fold is measured along the eigenvectors of the other folds, and the K lists of curvatures, each in
the order of its eigenvalues, are averaged. Therefore, no example measures a direction that it
helped to choose, which would bias the magnitudes.

In the statistics of covariance matrices, this is cross-validated shrinkage of the eigenvalues
(Bartz, 2016, "Advances in high-dimensional covariance matrix estimation"); two separate batches are
the split-sample estimator (Lam, 2016, "Nonparametric eigenvalue-regularized precision or covariance
matrix estimator").
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.shards import first_indices_of_batches
from laplace_debias.curvature.fits.block_tensors import BlockTensors, add_to, owners_of_blocks
from laplace_debias.curvature.fits.context import FactorScales, FitContext
from laplace_debias.curvature.fits.degenerate import average_degenerate, numerical_rank, resolution
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Eigenpairs,
    descending_eigenpairs,
    outer,
)
from laplace_debias.curvature.fits.eigenbases import share_bases
from laplace_debias.curvature.fits.factor_keys import FactorKey, Side
from laplace_debias.curvature.fits.factor_sums import FactorSums, factor_sums
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor, gram
from laplace_debias.curvature.fits.magnitudes import directional_curvature, ekfac_sums
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.directions import Basis, Directions, ThinBasis
from laplace_debias.system.ranks import Ranks

# If the rank of a factor is at most this fraction of its size, the factor is decomposed in the
# subspace that it spans.
_MUCH_SMALLER = 0.7


def split_folds(ranks: Ranks, data: Iterable[Batch], num_folds: int) -> list[list[Batch]]:
    """Split the examples of all processes into K folds: example i is in fold i mod K.

    The examples have the indices that they would have if the folds were read one after the other,
    which determine their Monte Carlo labels.

    Raises:
        ValueError: If there are no examples, K is not between 2 and the number of examples, or all
            examples of a fold have the weight zero.
    """
    batches = list(data)
    first_indices = first_indices_of_batches(ranks, [batch.num_examples for batch in batches])
    num_examples = sum(ranks.exchange(sum(batch.num_examples for batch in batches)))
    if not num_examples:
        raise ValueError("The data contains no examples. Pass at least one batch.")
    if num_examples == 1:
        raise ValueError(
            "Cross-fitting needs at least two examples, but the data contains only one. Use a "
            "larger batch."
        )
    if not 2 <= num_folds <= num_examples:
        raise ValueError(
            f"Cross-fitting {num_examples} examples needs 2 to {num_examples} folds, got "
            f"{num_folds}. Change `folds`."
        )
    if ranks.size == 1:
        # A single process joins all batches, so that each fold is one batch.
        batches = [Batch.joined(batches)]
        first_indices = [0]
    num_before = 0
    folds = []
    for fold_index in range(num_folds):
        fold: list[Batch] = []
        for batch, first_index in zip(batches, first_indices, strict=True):
            examples = _examples_of_fold(batch, first_index, fold_index, num_folds)
            if examples.num_examples:
                fold.append(replace(examples, first_index=num_before + examples.first_index))
        if not sum(ranks.exchange(sum(batch.total_weight for batch in fold))):
            raise ValueError("All examples of one fold have the weight zero. Use fewer folds.")
        folds.append(fold)
        num_before += len(range(fold_index, num_examples, num_folds))
    return folds


def _examples_of_fold(batch: Batch, first_index: int, fold_index: int, num_folds: int) -> Batch:
    """Return the examples of a batch that are in a fold, with their indices in the fold.

    `first_index` is the index of the batch's first example in the data. The fold has the examples
    with the indices `fold_index`, `fold_index` + K, …
    """
    start = (fold_index - first_index) % num_folds
    examples = batch.take(slice(start, None, num_folds))
    return replace(examples, first_index=(first_index + start - fold_index) // num_folds)


def fold_factor_sums(
    context: FitContext, folds: Sequence[Iterable[Batch]]
) -> tuple[list[FactorSums], list[DataTotals]]:
    """Sum the Kronecker factors of each fold, for the blocks that this process owns.

    Returns:
        The factor sums of each fold, and the totals of each fold.
    """
    sums_by_fold: list[FactorSums] = []
    totals_by_fold: list[DataTotals] = []
    for fold in folds:
        sums, totals = factor_sums(context, fold)
        sums_by_fold.append(sums)
        totals_by_fold.append(totals)
    return sums_by_fold, totals_by_fold


def total_of(totals_by_fold: Sequence[DataTotals]) -> DataTotals:
    """Return the totals of all folds together."""
    return reduce(operator.add, totals_by_fold)


def total_factors(sums_by_fold: Sequence[FactorSums]) -> FactorSums:
    """Add the factor sums of all folds for the blocks that this process owns."""
    return {
        block: (_total(sums_by_fold, block, Side.G), _total(sums_by_fold, block, Side.A))
        for block in sums_by_fold[0]
    }


def crossfit_factors(
    context: FitContext, totals_by_fold: Sequence[DataTotals], sums_by_fold: list[FactorSums]
) -> tuple[BlockDiagonal, dict[str, FactorScales]]:
    """Build the cross-fitted K-FAC curvature of all blocks.

    Args:
        context: The blocks, and the processes that share them.
        totals_by_fold: The totals of each fold, over all processes.
        sums_by_fold: The factor sums of each fold, for the blocks that this process owns. They are
            removed to free their memory.

    Returns:
        The curvature, and the scales of the factors by the block's name.
    """
    operators: dict[Block, list[EigenKronecker]] = {}
    traces_A: BlockTensors = {}
    for block in _own_blocks(context, sums_by_fold):
        sizes_G, sizes_A = _fold_sizes(totals_by_fold, block)
        basis = _mean_basis(sums_by_fold, totals_by_fold, block)
        factors_G, factors_A = zip(*[sums.pop(block) for sums in sums_by_fold], strict=True)
        along_G = crossfit_magnitudes(factors_G, sizes_G, basis.G, context.dtype)
        along_A = crossfit_magnitudes(factors_A, sizes_A, basis.A, context.dtype)
        magnitudes = basis.pooled(outer(along_G, along_A), context.dtype)
        operators[block] = [EigenKronecker(basis.G.U, basis.A.U, magnitudes)]
        traces_A[block] = basis.A.directions.trace(along_A)
    (curvature,) = _share_curvatures(context, operators, 1)
    return curvature, _share_scales(context, traces_A, total_of(totals_by_fold))


@dataclass(frozen=True)
class ReplicatedKfac:
    """Cross-fitted K-FAC, with the curvatures from which its error is estimated.

    Attributes:
        crossfitted: The curvature whose magnitudes come from held-out folds.
        plain: The curvature whose magnitudes come from the data of the directions.
        replicates: For each fold, the curvature without this fold, for the jackknife.
        factor_scales: The scales of the cross-fitted factors, by the block's name.
    """

    crossfitted: BlockDiagonal
    plain: BlockDiagonal
    replicates: list[BlockDiagonal]
    factor_scales: dict[str, FactorScales]


def crossfit_with_replicates(
    context: FitContext, totals_by_fold: Sequence[DataTotals], sums_by_fold: Sequence[FactorSums]
) -> ReplicatedKfac:
    """Build cross-fitted K-FAC, plain K-FAC, and for each fold a replicate without this fold.

    A replicate has the eigenbasis of the other folds, which cross-fitting computes anyway.
    Therefore, no further factor is decomposed.

    Args:
        context: The blocks, and the processes that share them.
        totals_by_fold: The totals of each fold, over all processes.
        sums_by_fold: The factor sums of each fold, for the blocks that this process owns.
    """
    operators: dict[Block, list[EigenKronecker]] = {}
    traces_A: BlockTensors = {}
    for block in _own_blocks(context, sums_by_fold):
        sizes_G, sizes_A = _fold_sizes(totals_by_fold, block)
        basis = _mean_basis(sums_by_fold, totals_by_fold, block)
        factors_G, factors_A = zip(*[sums[block] for sums in sums_by_fold], strict=True)
        along_G, replicates_G = _replicates(factors_G, sizes_G, basis.G, context.dtype)
        along_A, replicates_A = _replicates(factors_A, sizes_A, basis.A, context.dtype)
        magnitudes = basis.pooled(outer(along_G, along_A), context.dtype)
        eigenvalues = outer(basis.G.eigenvalues, basis.A.eigenvalues)
        operators[block] = [
            EigenKronecker(basis.G.U, basis.A.U, magnitudes),
            EigenKronecker(basis.G.U, basis.A.U, eigenvalues),
        ]
        traces_A[block] = basis.A.directions.trace(along_A)
        for (values_G, U_G), (values_A, U_A) in zip(replicates_G, replicates_A, strict=True):
            operators[block].append(EigenKronecker(U_G, U_A, outer(values_G, values_A)))
    num_curvatures = 2 + len(totals_by_fold)
    crossfit, plain_kfac, *replicates = _share_curvatures(context, operators, num_curvatures)
    scales = _share_scales(context, traces_A, total_of(totals_by_fold))
    return ReplicatedKfac(crossfit, plain_kfac, replicates, scales)


def _own_blocks(context: FitContext, sums_by_fold: Sequence[FactorSums]) -> list[Block]:
    """Return the blocks whose factors this process has, in the order of `context.blocks`."""
    return [block for block in context.blocks if block in sums_by_fold[0]]


def _fold_sizes(
    totals_by_fold: Sequence[DataTotals], block: Block
) -> tuple[list[float], list[float]]:
    """Return the total weight of each fold's examples that count in a block's G and in its A."""
    weights = [totals.weight for totals in totals_by_fold]
    input_weights = [totals.input_weight(block) for totals in totals_by_fold]
    if not any(input_weights):
        # A is zero, whatever the weights by which it is divided.
        input_weights = weights
    return weights, input_weights


def _mean_basis(
    sums_by_fold: Sequence[FactorSums], totals_by_fold: Sequence[DataTotals], block: Block
) -> Eigenbasis:
    """Compute the eigenbasis of a block's factors over all folds."""
    totals = total_of(totals_by_fold)
    mean_G = _total(sums_by_fold, block, Side.G) / totals.weight
    mean_A = _total(sums_by_fold, block, Side.A) / totals.input_divisor(block)
    pairs_G = descending_eigenpairs(mean_G, str(FactorKey(block, Side.G)))
    pairs_A = descending_eigenpairs(mean_A, str(FactorKey(block, Side.A)))
    return Eigenbasis(pairs_G, pairs_A)


def _total(sums_by_fold: Sequence[FactorSums], block: Block, side: Side) -> Factor:
    return reduce(operator.add, [sums[block][side] for sums in sums_by_fold])


def _share_curvatures(
    context: FitContext,
    operators: Mapping[Block, Sequence[EigenKronecker]],
    num_curvatures: int,
) -> list[BlockDiagonal]:
    """Collect curvatures of all blocks from the processes that own the blocks.

    Args:
        context: The blocks, and the processes.
        operators: For each block of this process, its operators, one for each curvature.
        num_curvatures: The number of curvatures.
    """
    owned = {
        (block, index): (kronecker.U_G, kronecker.U_A, kronecker.magnitudes)
        for block, block_operators in operators.items()
        for index, kronecker in enumerate(block_operators)
    }
    owners = {
        (block, index): rank
        for block, rank in owners_of_blocks(context).items()
        for index in range(num_curvatures)
    }
    shared = context.ranks.share(owned, owners)
    curvatures: list[BlockDiagonal] = []
    for index in range(num_curvatures):
        blocks: dict[str, EigenKronecker] = {}
        for block in context.blocks:
            U_G, U_A, magnitudes = shared.pop((block, index))
            assert magnitudes is not None
            blocks[block.name] = EigenKronecker(U_G, U_A, magnitudes).to(context.dtype)
        curvatures.append(BlockDiagonal(blocks))
    return curvatures


def _share_scales(
    context: FitContext, traces_A: BlockTensors, totals: DataTotals
) -> dict[str, FactorScales]:
    """Collect the scales of all blocks' factors from the processes that own the blocks.

    Args:
        context: The blocks, and the processes.
        traces_A: The trace of A of each block of this process.
        totals: The totals of all folds.
    """
    owned = {block: (trace_A,) for block, trace_A in traces_A.items()}
    shared = context.ranks.share(owned, owners_of_blocks(context))
    scales: dict[str, FactorScales] = {}
    for block in context.blocks:
        (trace_A,) = shared[block]
        assert trace_A is not None
        scales[block.name] = FactorScales(trace_A.to(context.dtype), totals.input_share(block))
    return scales


@dataclass(frozen=True)
class FoldEstimate:
    """Curvature of one fold along the directions of the other folds.

    Attributes:
        eigenvalues: The eigenvalues of the other folds' mean factor, descending.
        directions: The eigenvectors of this factor, in coordinates of the range of all folds.
        magnitudes: The fold's own curvature along the directions, summed over its examples.
    """

    eigenvalues: Float[Tensor, "*groups d"]
    directions: Float[Tensor, "*groups r r"]
    magnitudes: Float[Tensor, "*groups d"]


def crossfit_magnitudes(
    factors: Sequence[Factor],
    sizes: Sequence[float],
    mean_pairs: Eigenpairs,
    dtype: torch.dtype,
) -> Float[Tensor, "*groups d"]:
    """Measure the curvature of one Kronecker factor on held-out folds.

    Magnitude i is the mean over folds, weighted by their sizes, of the fold's mean curvature along
    the i-th eigenvector of the other folds, in descending order of their eigenvalues. If there are
    fewer directions than dimensions, the last magnitude is the mean over all remaining directions.
    Curvature along directions that the other folds do not determine, above all directions without
    curvature, is averaged over the space of these directions; see `degenerate.average_degenerate`.

    The directions of a diagonal factor are the coordinate axes, whatever the data, so its
    magnitudes are its entries even on held-out folds.

    Args:
        factors: The factor of each fold, summed over the fold's examples.
        sizes: The number or weight of each fold's examples.
        mean_pairs: The eigenpairs of the mean factor.
        dtype: The dtype in which the factors were computed; it determines which curvature counts as
            rounding error.
    """
    eigenvalues, U = mean_pairs
    if U is None:
        return eigenvalues
    subspace = _Subspace(eigenvalues, U, dtype)
    magnitudes = torch.zeros_like(eigenvalues)
    for fold in range(len(sizes)):
        estimate = _estimate_fold(factors, sizes, fold, subspace)
        # `estimate.magnitudes` are sums over the fold, so dividing them by the size of all folds
        # weights each fold by its size.
        magnitudes += estimate.magnitudes / sum(sizes)
        # Deleting the estimate frees memory before the next fold.
        del estimate
    return magnitudes


def _replicates(
    factors: Sequence[Factor], sizes: Sequence[float], mean_pairs: Eigenpairs, dtype: torch.dtype
) -> tuple[Float[Tensor, "*groups d"], list[Eigenpairs]]:
    r"""Compute `crossfit_magnitudes`, and for each fold the magnitudes and directions without it.

    Let $\lambda^{(-k)}$ be the eigenvalues of all folds except fold k. The replicate without fold k
    has the magnitudes $\Lambda\,\lambda^{(-k)} / \tfrac1K\sum_j\lambda^{(-j)}$.
    """
    mean_eigenvalues, U = mean_pairs
    pairs: list[Eigenpairs] = []
    if U is None:
        magnitudes = mean_eigenvalues
        pairs = [
            descending_eigenpairs(_other_folds(factors, sizes, fold)) for fold in range(len(sizes))
        ]
    else:
        magnitudes = torch.zeros_like(mean_eigenvalues)
        subspace = _Subspace(mean_eigenvalues, U, dtype)
        for fold in range(len(sizes)):
            estimate = _estimate_fold(factors, sizes, fold, subspace)
            magnitudes += estimate.magnitudes / sum(sizes)
            pairs.append(Eigenpairs(estimate.eigenvalues, subspace.lift(estimate.directions)))
    mean = torch.stack([eigenvalues for eigenvalues, _ in pairs]).mean(0)
    # If the other folds have no curvature, both numbers are rounding errors, so the ratio is set
    # to 1.
    rounding = resolution(dtype) * mean.amax(-1, keepdim=True)
    replicates: list[Eigenpairs] = []
    for eigenvalues, directions in pairs:
        ratios = torch.where(mean > rounding, eigenvalues / mean, 1.0)
        replicates.append(Eigenpairs(magnitudes * ratios, directions))
    return magnitudes, replicates


def _estimate_fold(
    factors: Sequence[Factor], sizes: Sequence[float], fold: int, subspace: "_Subspace"
) -> FoldEstimate:
    """Measure a fold's curvature along the directions of the other folds."""
    eigenvalues, directions = subspace.eigenpairs(_other_folds(factors, sizes, fold))
    curvature = directional_curvature(subspace.project(factors[fold]), Basis(directions))
    magnitudes = subspace.with_remainder(curvature, factors[fold])
    averaged = average_degenerate(magnitudes, eigenvalues, subspace.dtype, subspace.multiplicity)
    return FoldEstimate(eigenvalues, directions, averaged)


def _other_folds(factors: Sequence[Factor], sizes: Sequence[float], fold: int) -> Factor:
    """Compute the mean factor of all folds except the given fold."""
    total = reduce(operator.add, (*factors[:fold], *factors[fold + 1 :]))
    size = sum(sizes) - sizes[fold]
    # The other folds may have no examples. Their total is then zero.
    return total / size if size > 0 else total


class _Subspace:
    """The range of a factor if it is much smaller than the space, and otherwise the whole space.

    Every fold's factor is at most the sum of all factors, so it vanishes where the sum vanishes.
    Therefore, it is enough to decompose the other folds' factors as matrices `[r, r]`, in
    coordinates of the sum's range. The factors of groups are small and have different ranks, so the
    whole space is used for them.

    Attributes:
        dtype: The dtype in which the factors were computed.
        multiplicity: The number of directions that share the last magnitude.
    """

    def __init__(
        self,
        eigenvalues: Float[Tensor, "*groups k"],
        U: Float[Tensor, "*groups d r"],
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        directions = Directions.from_columns(U)
        self.multiplicity = directions.multiplicity
        self._num_magnitudes = eigenvalues.shape[-1]
        # An orthonormal basis of the subspace, `[d, r]`; None for the whole space.
        self._basis: Tensor | None = None
        # A basis of the other directions, `[d, d - r]`; None if there are none, or if they share
        # one magnitude and are not computed.
        self._null_basis: Tensor | None = None
        if isinstance(directions, ThinBasis):
            self._basis = U
        elif U.ndim == 2:
            rank = max(1, numerical_rank(eigenvalues, dtype))
            if rank <= _MUCH_SMALLER * len(eigenvalues):
                self._basis = U[:, :rank]
                self._null_basis = U[:, rank:]

    def project(self, factor: Factor) -> Float[Tensor, "*groups r r"]:
        """Express a factor in coordinates of the subspace."""
        if self._basis is None:
            return gram(factor.rows) if isinstance(factor, GramFactor) else factor
        if isinstance(factor, GramFactor):
            return gram(factor.rows @ self._basis)
        return self._basis.T @ factor @ self._basis

    def eigenpairs(
        self, factor: Factor
    ) -> tuple[Float[Tensor, "*groups d"], Float[Tensor, "*groups r r"]]:
        """Compute the eigenpairs; the last eigenvalue is the mean over any remaining directions."""
        eigenvalues, directions = descending_eigenpairs(self.project(factor))
        assert directions is not None
        return self.with_remainder(eigenvalues, factor), directions

    def with_remainder(
        self, curvature: Float[Tensor, "*groups r"], factor: Factor
    ) -> Float[Tensor, "*groups d"]:
        """Append a factor's mean curvature outside the subspace to its curvature along a basis."""
        remainder = 0.0
        if isinstance(factor, GramFactor) and self.multiplicity > 1:
            trace = factor.rows.square().sum() + factor.residual_trace
            remainder = float((trace - curvature.sum()).clamp_min(0)) / self.multiplicity
        return F.pad(curvature, (0, self._num_magnitudes - curvature.shape[-1]), value=remainder)

    def lift(self, directions: Float[Tensor, "*groups r r"]) -> Float[Tensor, "*groups d columns"]:
        """Return an orthonormal basis, which the null space completes unless the basis is thin."""
        if self._basis is None:
            return directions
        lifted = self._basis @ directions
        if self._null_basis is None:
            return lifted
        return torch.cat([lifted, self._null_basis], dim=1)


def crossfit_ekfac(
    context: FitContext,
    folds: Sequence[Iterable[Batch]],
    totals_by_fold: Sequence[DataTotals],
    sums_by_fold: list[FactorSums],
    mean_bases: Mapping[Block, Eigenbasis],
) -> BlockTensors:
    """Average the magnitudes of EKFAC over the folds, `[*groups, d_out, d_in]`.

    Each fold is measured along the eigenbases of the other folds; `mean_bases` are the eigenbases
    of all folds together.
    """
    weights = [totals.weight for totals in totals_by_fold]
    total_weight = sum(weights)
    magnitudes: BlockTensors = {}
    for index, fold in enumerate(folds):
        other_sums = sums_by_fold[:index] + sums_by_fold[index + 1 :]
        bases: dict[Block, Eigenbasis] = {}
        for block in sums_by_fold[0]:
            bases[block] = _basis_of_folds(
                other_sums,
                block,
                weight=total_weight - weights[index],
                mean_basis=mean_bases[block],
                dtype=context.dtype,
            )
        bases = share_bases(context, bases)
        squares, _ = ekfac_sums(context, bases, fold, 0)
        for block in list(squares):
            averaged = bases.pop(block).pooled(squares.pop(block), context.dtype)
            add_to(magnitudes, block, averaged / total_weight)
    return magnitudes


def _basis_of_folds(
    sums_by_fold: Sequence[FactorSums],
    block: Block,
    *,
    weight: float,
    mean_basis: Eigenbasis,
    dtype: torch.dtype,
) -> Eigenbasis:
    """Compute the eigenbasis of a block's factors over some folds.

    Args:
        sums_by_fold: The factor sums of these folds.
        block: The block.
        weight: The sum of the weights of the examples in these folds.
        mean_basis: The eigenbasis over all folds, which spans the ranges of the factors.
        dtype: The dtype in which the factors were computed.
    """
    # Only the directions and the ratios of eigenvalues are used, so A is also divided by the weight
    # of all examples, even if only some of them have a position in the layer.
    mean_G = _total(sums_by_fold, block, Side.G) / weight
    mean_A = _total(sums_by_fold, block, Side.A) / weight
    return Eigenbasis(
        _eigenpairs_within(mean_G, mean_basis.G, dtype),
        _eigenpairs_within(mean_A, mean_basis.A, dtype),
    )


def _eigenpairs_within(factor: Factor, mean_pairs: Eigenpairs, dtype: torch.dtype) -> Eigenpairs:
    """Compute the eigenpairs of some folds' factor within the range of all folds' factor."""
    eigenvalues, U = mean_pairs
    if U is None:
        return descending_eigenpairs(factor)
    subspace = _Subspace(eigenvalues, U, dtype)
    own_eigenvalues, directions = subspace.eigenpairs(factor)
    return Eigenpairs(own_eigenvalues, subspace.lift(directions))
