"""Parts that `full` and `lowrank` share: one block of all parameters, and its Jacobian rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits import dense
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.degenerate import average_degenerate
from laplace_debias.curvature.fits.dense import DENSE_BLOCK, CountedRows, SquaresAlong
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.structures.base import (
    NO_ROWS,
    BlockBytes,
    CurvatureStructure,
    NumRows,
    TrialPass,
    Workload,
)


@dataclass(frozen=True)
class DenseCurvature(CurvatureStructure):
    """Eigenvectors of the curvature of all parameters together, and the curvature along them."""

    is_dense = True

    def block_names(self, blocks: Sequence[Block]) -> list[str]:
        """Return the name of the only block."""
        return [DENSE_BLOCK]

    def trial_passes(
        self, context: FitContext, data: Iterable[Batch]
    ) -> Sequence[Callable[[], TrialPass]]:
        """Return the pass that computes the Jacobian rows."""
        return [partial(_rows_trial, context, data)]

    def block_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> list[BlockBytes]:
        """Return an empty list, because all parameters form a single block."""
        return []


def measure_along(
    context: FitContext,
    U: Float[Tensor, "parameters k"],
    eigenvalues: Float[Tensor, " k"],
    data: Iterable[Batch] | None,
    totals: DataTotals,
) -> tuple[Float[Tensor, " k"], DataTotals]:
    """Measure the curvature along directions, on separate data if they are passed.

    `totals` covers the data of the directions, and the totals that are returned cover both data
    sets. Without separate data, the eigenvalues and `totals` are returned unchanged.
    """
    if data is None:
        return eigenvalues, totals
    accumulator = SquaresAlong(context, U)
    measured_totals = accumulate(accumulator, data, totals.num_examples)
    mean = accumulator.sums / measured_totals.weight
    return average_degenerate(mean, eigenvalues, context.dtype), totals + measured_totals


def kept_row_bytes(workload: Workload) -> int:
    """Count the bytes of the Jacobian rows that a fit keeps."""
    if workload.num_passes is None:
        return dense.KEPT_ROWS
    return min(dense.KEPT_ROWS, workload.num_passes * workload.row_bytes)


def num_parameters(context: FitContext) -> int:
    """Count the parameters of all blocks."""
    return sum(block.size for block in context.blocks)


def _rows_trial(context: FitContext, data: Iterable[Batch]) -> TrialPass:
    accumulator = CountedRows(context)
    accumulate(accumulator, data)
    return TrialPass(row_bytes=accumulator.num_bytes)
