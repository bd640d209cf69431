"""Parts that K-FAC and EKFAC share: Kronecker factors, their rank and their memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.factor_keys import FactorKey, factor_keys
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.structures.base import (
    EIGH_MATRICES,
    NO_ROWS,
    BlockBytes,
    CurvatureStructure,
    NumRows,
    TrialPass,
    Workload,
)
from laplace_debias.system.checks import whole


@dataclass(frozen=True)
class FactoredCurvature(CurvatureStructure):
    """Directions from Kronecker factors, `U_G ⊗ U_A`.

    Attributes:
        rank: The number of directions of each factor or, if below 1, the fraction of the trace that
            the directions contain. None keeps all directions.
    """

    has_factors = True
    takes_rank = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, float):
            if not 0 < self.rank < 1:
                raise ValueError(
                    f"`rank` is {self.rank}. Pass the number of eigenvectors to keep (a whole "
                    "number), or the fraction of the trace to keep (a number below 1, such "
                    "as 0.99)."
                )
        elif self.rank is not None:
            whole(self.rank, "rank")

    @property
    def directions_per_factor(self) -> int | None:
        """The rank, unless it is None or a fraction."""
        return None if self.rank is None or isinstance(self.rank, float) else int(self.rank)

    def leading(self, fit: CurvatureFit) -> CurvatureFit:
        """Truncate each factor of a fit to the number of directions that the rank allows."""
        rank = self.rank
        if rank is None:
            return fit
        return replace(fit, curvature=fit.curvature.map(lambda _, block: block.leading(rank)))

    def decomposed_sizes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> list[int]:
        """List the sizes of the factors of each group, or the numbers of their rows."""
        sizes = []
        for block in context.blocks:
            for key in factor_keys(block):
                if not _is_axes(key):
                    factor_rows = _stored_size(key, num_rows).num_rows
                    size = key.size if factor_rows is None else factor_rows
                    sizes += [size] * block.num_groups
        return sizes

    def block_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> list[BlockBytes]:
        """Count the bytes of each block's factors, magnitudes and posterior."""
        return [_factored_bytes(block, context, num_rows) for block in context.blocks]

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the passes for the factors, and of their decompositions."""
        blocks = self.block_bytes(context, workload.num_rows)
        sums = workload.num_folds * sum(block.factors for block in blocks)
        decomposed = [
            block_bytes.factors
            + (EIGH_MATRICES - 1) * _largest_matrix(block, context, workload.num_rows)
            for block, block_bytes in zip(context.blocks, blocks, strict=True)
        ]
        return {
            "factors": sums + workload.working_bytes,
            "eigendecompositions": sums + max(decomposed),
        }


def factor_trial(context: FitContext, data: Iterable[Batch]) -> TrialPass:
    """Sum the factors over the data of a trial."""
    sums, _ = factor_sums(context, data)
    sum_bytes = 0
    num_rows: dict[Block, list[int | None]] = {}
    for block, factors in sums.items():
        num_rows[block] = []
        for factor in factors:
            is_thin = isinstance(factor, GramFactor) and factor.has_thin_directions
            num_rows[block].append(len(_entries(factor)) if is_thin else None)
            sum_bytes += _entries(factor).nbytes
    return TrialPass(sum_bytes, 0, num_rows)


def _entries(factor: Factor) -> torch.Tensor:
    return factor.rows if isinstance(factor, GramFactor) else factor


class _StoredSize(NamedTuple):
    """The size of a factor that is stored as a matrix, as a diagonal or as rows.

    Attributes:
        num_entries: The number of entries.
        num_rows: The number of rows; None for a matrix or a diagonal.
    """

    num_entries: int
    num_rows: int | None


def _stored_size(key: FactorKey, num_rows: NumRows) -> _StoredSize:
    """Return the size of a factor, given the numbers of rows of a trial."""
    if key.is_streamed:
        factor_rows = key.max_rows
    else:
        factor_rows = num_rows.get(key.block, (None, None))[key.side]
    if factor_rows is not None:
        return _StoredSize(factor_rows * key.size, factor_rows)
    if not key.shape:
        return _StoredSize(0, None)
    return _StoredSize(prod(key.shape), None)


def _is_axes(key: FactorKey) -> bool:
    """Whether the directions of a factor are the coordinate axes."""
    return key.is_diagonal or not key.shape


def _factored_bytes(block: Block, context: FitContext, num_rows: NumRows) -> BlockBytes:
    """Count the bytes of a block during a fit, and of the part that the posterior keeps."""
    factors = 0
    directions = 0
    magnitudes = block.num_groups
    kept_magnitudes = block.num_groups
    for key in factor_keys(block):
        d = key.size
        num_entries, factor_rows = _stored_size(key, num_rows)
        factors += num_entries
        num_directions = d
        num_magnitudes = d
        if factor_rows is not None:
            # The directions that the rows do not span share one magnitude.
            num_directions = factor_rows
            num_magnitudes = factor_rows + 1
        magnitudes *= num_magnitudes
        if not _is_axes(key):
            if block.rank is not None and 2 * block.rank < d:
                num_directions = min(num_directions, block.rank)
            directions += block.num_groups * num_directions * d
        kept_magnitudes *= min(num_directions + 1, d)
    return BlockBytes(
        block.name,
        context.factor_dtype.itemsize * factors,
        context.factor_dtype.itemsize * magnitudes,
        context.dtype.itemsize * (kept_magnitudes + directions),
    )


def _largest_matrix(block: Block, context: FitContext, num_rows: NumRows) -> int:
    """Count the bytes of the largest matrix, or rows, that is decomposed for a block."""
    keys = [key for key in factor_keys(block) if not _is_axes(key)]
    nums_entries = [_stored_size(key, num_rows).num_entries for key in keys]
    return context.factor_dtype.itemsize * max(nums_entries, default=0)
