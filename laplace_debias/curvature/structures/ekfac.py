"""EKFAC: K-FAC's directions, and the exact curvature along each of these directions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.block_tensors import BlockTensors
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import (
    crossfit_ekfac,
    fold_factor_sums,
    split_folds,
    total_factors,
    total_of,
)
from laplace_debias.curvature.fits.directions import Eigenbasis, Eigenpairs
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.magnitudes import assemble, ekfac_sums
from laplace_debias.curvature.structures.base import TrialPass, Workload, squares_trial
from laplace_debias.curvature.structures.factored import FactoredCurvature, factor_trial
from laplace_debias.operators import EigenKronecker


@dataclass(frozen=True)
class EkfacCurvature(FactoredCurvature):
    """K-FAC's directions, with the exact curvature along each direction."""

    name = "ekfac"
    reads_data_twice = True

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set, and measure magnitudes on another or on the same."""
        factors, totals = factor_sums(context, directions)
        bases = eigenbases(context, factors, totals)
        if magnitudes is None:
            sums, measured_totals = ekfac_sums(context, bases, directions, 0)
        else:
            sums, measured_totals = ekfac_sums(context, bases, magnitudes, totals.num_examples)
            totals = totals + measured_totals
        measured: BlockTensors = {}
        for block in list(sums):
            mean = sums.pop(block).div_(measured_totals.weight)
            measured[block] = bases[block].pooled(mean, context.dtype)
        return self.leading(CurvatureFit(assemble(context, bases, measured), totals))

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds.

        Cross-fitting reads the data twice and keeps the factors of all folds in memory.
        """
        folds = split_folds(context.ranks, data, num_folds)
        sums_by_fold, totals_by_fold = fold_factor_sums(context, folds)
        totals = total_of(totals_by_fold)
        bases = eigenbases(context, total_factors(sums_by_fold), totals)
        measured = crossfit_ekfac(context, folds, totals_by_fold, sums_by_fold, mean_bases=bases)
        sums_by_fold.clear()
        for block, magnitudes in measured.items():
            measured[block] = bases[block].pooled(magnitudes, context.dtype)
        return self.leading(CurvatureFit(assemble(context, bases, measured), totals))

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the exact curvature of new data along the earlier directions, which do not change.

        The magnitudes are then the exact curvature of all data along these directions, if the
        earlier magnitudes are the exact curvature of the earlier data. Along directions that the
        earlier data do not determine, such as the directions of a null space, the earlier and the
        new magnitudes are means over the eigenspace.
        """
        earlier = information.curvature.blocks
        bases = {}
        for block in context.blocks:
            kronecker = earlier[block.name]
            assert isinstance(kronecker, EigenKronecker)
            bases[block] = _earlier_basis(kronecker, context.factor_dtype)
        sums, totals = ekfac_sums(context, bases, data, 0)
        counts = ExampleCounts.for_update(information, num_data, totals)
        magnitudes: BlockTensors = {}
        for block in list(sums):
            mean = bases[block].pooled(sums.pop(block).div_(totals.weight), context.dtype)
            magnitudes[block] = counts.mean(earlier[block.name].magnitudes, totals.weight * mean)
        return CurvatureFit(assemble(context, bases, magnitudes), totals)

    def trial_passes(
        self, context: FitContext, data: Iterable[Batch]
    ) -> Sequence[Callable[[], TrialPass]]:
        """Return the pass that sums the factors, and the pass that measures the magnitudes."""
        return [partial(factor_trial, context, data), partial(squares_trial, context, data)]

    def num_trials(self, is_debiased: bool) -> int:
        """Return 1, because each pass reads one of the two data sets of a debiased fit."""
        return 1

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the factors, of their decompositions, and of the magnitudes."""
        stages = super().stage_bytes(context, workload)
        blocks = self.block_bytes(context, workload.num_rows)
        factors = sum(block.factors for block in blocks)
        bases = factors
        if workload.is_crossfit:
            # The factors of all folds, the bases of their means, and the bases without one fold.
            bases = workload.num_folds * factors + 2 * factors
        # The copies of the directions in the model's dtype, which rotations use, are also counted.
        copies = 0
        if context.factor_dtype.itemsize != context.dtype.itemsize:
            copies = factors * context.dtype.itemsize // context.factor_dtype.itemsize
        magnitudes = sum(block.magnitudes for block in blocks)
        stages["magnitudes"] = bases + copies + magnitudes + workload.working_bytes
        return stages


def _earlier_basis(curvature: EigenKronecker, dtype: torch.dtype) -> Eigenbasis:
    """Return the directions of an earlier curvature, with the eigenvalues of its partial traces.

    The factors from which the directions were computed are not kept, but the partial traces of a
    Kronecker product are its factors, up to scale. The traces of the exact curvature have the same
    eigenspaces: where eigenvalues of a factor coincide, the magnitudes are means over the
    eigenspace, so the traces coincide too. Unlike the directions, the traces depend only on the
    curvature.
    """
    magnitudes = curvature.magnitudes.to(dtype)
    traces_G = curvature.input_directions.trace(magnitudes)
    traces_A = curvature.output_directions.trace(magnitudes.mT)
    # After this division, products of the two sides' eigenvalues have the unit of the curvature.
    trace = curvature.output_directions.trace(traces_G).unsqueeze(-1)
    traces_A = (traces_A / trace).nan_to_num(0.0)
    return Eigenbasis(Eigenpairs(traces_G, curvature.U_G), Eigenpairs(traces_A, curvature.U_A))
