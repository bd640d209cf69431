"""The leading eigenvectors of the curvature of all parameters together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.dense import (
    DENSE_BLOCK,
    LeadingRows,
    crossfit_folds,
    decompose_on_first,
    leading_pairs,
)
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.structures.base import NO_ROWS, CurvatureBlock, NumRows, Workload
from laplace_debias.curvature.structures.dense import (
    DenseCurvature,
    kept_row_bytes,
    measure_along,
    num_parameters,
)
from laplace_debias.operators import BlockDiagonal, LowRankPlusDiagonal
from laplace_debias.system.checks import whole

_DEFAULT_RANK = 20


@dataclass(frozen=True)
class LowRankCurvature(DenseCurvature):
    """The leading eigenvectors; in all other directions, the posterior equals the prior.

    Attributes:
        rank: The number of directions; None selects 20. There are at most as many directions as
            Jacobian rows.
    """

    name = "lowrank"
    takes_rank = True

    def __post_init__(self) -> None:
        if self.rank is not None:
            whole(self.rank, "rank")

    @property
    def num_directions(self) -> int:
        """The largest number of directions."""
        return _DEFAULT_RANK if self.rank is None else int(self.rank)

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set, and measure magnitudes on another or on the same.

        If there are at most `8 rank` Jacobian rows, or all of them fit in 1 GiB, they are kept, and
        the eigenvectors are exact. Otherwise, rows are compressed to their `4 rank` leading
        directions during the pass.
        """
        rank = self.num_directions
        accumulator = LeadingRows(context, rank)
        totals = accumulate(accumulator, directions)
        eigenvalues, U = decompose_on_first(
            context,
            [accumulator.take_rows()],
            lambda rows: leading_pairs(rows[0], rank, context.dtype),
        )
        eigenvalues = eigenvalues / totals.weight
        values, totals = measure_along(context, U, eigenvalues, data=magnitudes, totals=totals)
        return _assemble(context, values, U, totals)

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds.

        The Jacobian rows of all folds are kept in memory.
        """
        folds = split_folds(context.ranks, data, num_folds)
        values, U, totals = crossfit_folds(context, folds, self.num_directions)
        return _assemble(context, values, U, totals)

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the rows of new data to the earlier directions, and keep the leading directions.

        The earlier directions, scaled to the lengths of Jacobian rows, take the place of the
        earlier data's rows. Curvature outside these directions is not recovered. The result equals
        a fit to all data if the rank is at least the number of rows.
        """
        rank = self.num_directions
        accumulator = LeadingRows(context, rank)
        totals = accumulate(accumulator, data)
        counts = ExampleCounts.for_update(information, num_data, totals)
        rows = [accumulator.take_rows() * counts.scale**0.5]
        if context.ranks.rank == 0:
            earlier = information.curvature.blocks[DENSE_BLOCK]
            lengths = (counts.num_earlier * earlier.magnitudes.to(rows[0])).sqrt()
            rows.append((earlier.U.to(rows[0]) * lengths).T)
        eigenvalues, U = decompose_on_first(
            context,
            [torch.cat(rows)],
            lambda rows_of_all: leading_pairs(rows_of_all[0], rank, context.dtype),
        )
        return _assemble(context, eigenvalues / counts.total, U, totals)

    def posterior_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> int:
        """Count the bytes of the directions and magnitudes."""
        size = num_parameters(context)
        return context.dtype.itemsize * min(self.num_directions, size) * (size + 1)

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the rows, and of the directions during their computation."""
        rows = kept_row_bytes(workload)
        row_bytes = context.factor_dtype.itemsize * num_parameters(context)
        directions = min(row_bytes * self.num_directions, rows)
        if workload.num_passes == 1:
            # The working memory of the only pass already contains the rows.
            working_bytes = workload.working_bytes - workload.row_bytes
        else:
            # Joining the rows of several batches needs memory for a copy of the rows.
            working_bytes = max(workload.working_bytes, rows)
        # While the directions are computed, there are two copies of them, or three in
        # cross-fitting.
        row_copies = 1
        direction_copies = 2
        if workload.is_crossfit:
            row_copies = 2
            direction_copies = 3
        return {
            "Jacobian rows": rows + max(0, working_bytes),
            "directions": row_copies * rows + direction_copies * directions,
        }

    def tensors(self, block: CurvatureBlock) -> dict[str, Tensor]:
        """Return the directions and magnitudes that a file stores for a block."""
        assert isinstance(block, LowRankPlusDiagonal)
        return {"U": block.directions, "magnitudes": block.magnitudes}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> CurvatureBlock:
        """Rebuild a block from its `tensors`."""
        return LowRankPlusDiagonal(tensors["U"], tensors["magnitudes"], 0.0)


def _assemble(
    context: FitContext,
    magnitudes: Float[Tensor, " k"],
    U: Float[Tensor, "parameters k"],
    totals: DataTotals,
) -> CurvatureFit:
    """Build a fit from directions and their magnitudes, in the dtype of the posterior."""
    U = U.to(context.dtype)
    magnitudes = magnitudes.to(context.dtype).clamp_min(0)
    block = LowRankPlusDiagonal(U, magnitudes, 0.0)
    return CurvatureFit(BlockDiagonal({DENSE_BLOCK: block}), totals)
