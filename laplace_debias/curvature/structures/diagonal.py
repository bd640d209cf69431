"""The diagonal of the curvature: exact curvature along the coordinate axes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.magnitudes import (
    assemble,
    coordinate_axes,
    ekfac_sums,
)
from laplace_debias.curvature.structures.base import (
    NO_ROWS,
    BlockBytes,
    CurvatureStructure,
    NumRows,
    TrialPass,
    Workload,
    squares_trial,
)
from laplace_debias.operators import BlockDiagonal, EigenKronecker


@dataclass(frozen=True)
class DiagonalCurvature(CurvatureStructure):
    """The exact diagonal.

    The axes do not depend on data, so measuring the curvature along them has no bias.
    """

    name = "diag"
    reads_folds_together = True

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Measure the diagonal; a debiased fit reads only the data of the magnitudes."""
        bases = {block: coordinate_axes(block) for block in context.blocks}
        data = directions if magnitudes is None else magnitudes
        table, totals = ekfac_sums(context, bases, data, 0)
        for squares in table.values():
            squares.div_(totals.weight)
        return CurvatureFit(assemble(context, bases, table), totals)

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Measure the diagonal on all folds, because held-out folds give the same result."""
        folds = split_folds(context.ranks, data, num_folds)
        return self.fit(context, chain.from_iterable(folds))

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the diagonal of new data to the diagonal of earlier data, which is exact."""
        new = self.fit(context, data)
        counts = ExampleCounts.for_update(information, num_data, new.totals)
        blocks = {}
        for name, block in new.curvature.blocks.items():
            earlier = information.curvature.blocks[name].magnitudes
            sums = counts.weight_read * block.magnitudes.double()
            magnitudes = counts.mean(earlier, sums).to(context.dtype)
            blocks[name] = EigenKronecker(None, None, magnitudes)
        return replace(new, curvature=BlockDiagonal(blocks))

    def trial_passes(
        self, context: FitContext, data: Iterable[Batch]
    ) -> Sequence[Callable[[], TrialPass]]:
        """Return the pass that measures the squares of the gradients."""
        return [partial(squares_trial, context, data)]

    def num_trials(self, is_debiased: bool) -> int:
        """Return 1, because a debiased fit reads only one of its two data sets."""
        return 1

    def block_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> list[BlockBytes]:
        """Count the bytes of each block's entries."""
        return [
            BlockBytes(
                block.name,
                0,
                context.factor_dtype.itemsize * block.size,
                context.dtype.itemsize * block.size,
            )
            for block in context.blocks
        ]

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the only pass."""
        magnitudes = sum(block.magnitudes for block in self.block_bytes(context))
        return {"curvature along the axes": magnitudes + workload.working_bytes}
