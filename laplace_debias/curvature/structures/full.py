"""The curvature of all parameters together as a matrix `[D, D]`."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.dense import DENSE_BLOCK, MomentMatrix, are_few, crossfit_folds
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.structures.base import EIGH_MATRICES, NO_ROWS, NumRows, Workload
from laplace_debias.curvature.structures.dense import (
    DenseCurvature,
    kept_row_bytes,
    measure_along,
    num_parameters,
)
from laplace_debias.operators import BlockDiagonal, EigenKronecker

_QR_MATRICES = 3
"""Number of `[D, D]` matrices in memory, including the directions, while few Jacobian rows are
decomposed."""

_CROSSFIT_MATRICES = EIGH_MATRICES + 2
"""Number of `[D, D]` matrices in memory while the kept Jacobian rows of all folds are
decomposed."""


@dataclass(frozen=True)
class FullCurvature(DenseCurvature):
    """All eigenvectors of the curvature of all parameters."""

    name = "full"

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set, and measure magnitudes on another or on the same."""
        accumulator = MomentMatrix(context)
        totals = accumulate(accumulator, directions)
        eigenvalues, U = accumulator.decompose(totals.weight)
        values, totals = measure_along(context, U, eigenvalues, data=magnitudes, totals=totals)
        return _assemble(context, values, U, totals)

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds.

        The Jacobian rows of all folds are kept in memory.
        """
        folds = split_folds(context.ranks, data, num_folds)
        values, U, totals = crossfit_folds(context, folds, None)
        return _assemble(context, values, U, totals)

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Decompose the sum of the earlier and the new data's matrices; the result is exact."""
        accumulator = MomentMatrix(context)
        totals = accumulate(accumulator, data)
        counts = ExampleCounts.for_update(information, num_data, totals)
        earlier = information.curvature.blocks[DENSE_BLOCK]
        accumulator.scale_and_add(counts.scale, counts.num_earlier, earlier)
        eigenvalues, U = accumulator.decompose(counts.total)
        return _assemble(context, eigenvalues, U, totals)

    def posterior_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> int:
        """Count the bytes of all directions and magnitudes."""
        size = num_parameters(context)
        return context.dtype.itemsize * size * (size + 1)

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the matrix or of all rows, and of the decomposition."""
        size = num_parameters(context)
        row = context.factor_dtype.itemsize * size
        matrix = row * size
        rows = kept_row_bytes(workload)
        if workload.is_crossfit:
            return {
                "curvature": max(rows, matrix) + workload.working_bytes,
                "eigendecomposition": rows + _CROSSFIT_MATRICES * matrix,
            }
        if context.ranks.size == 1 and are_few(rows // row, size):
            return {
                "curvature": rows + workload.working_bytes,
                "eigendecomposition": rows + _QR_MATRICES * matrix,
            }
        return {
            "curvature": matrix + workload.working_bytes,
            "eigendecomposition": EIGH_MATRICES * matrix,
        }


def _assemble(
    context: FitContext,
    magnitudes: Float[Tensor, " D"],
    U: Float[Tensor, "D D"],
    totals: DataTotals,
) -> CurvatureFit:
    """Build a fit from eigenvectors and their magnitudes, in the dtype of the posterior."""
    block = EigenKronecker(U, None, magnitudes.unsqueeze(1)).to(context.dtype)
    return CurvatureFit(BlockDiagonal({DENSE_BLOCK: block}), totals)
