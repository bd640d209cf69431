"""K-FAC: directions and magnitudes from Kronecker factors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import (
    crossfit_factors,
    fold_factor_sums,
    split_folds,
    total_of,
)
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.fits.information import (
    ExampleCounts,
    Information,
    add_earlier_factors,
)
from laplace_debias.curvature.fits.magnitudes import (
    assemble,
    assemble_eigenvalues,
    curvature_along,
)
from laplace_debias.curvature.structures.base import TrialPass, Workload
from laplace_debias.curvature.structures.factored import FactoredCurvature, factor_trial


@dataclass(frozen=True)
class KfacCurvature(FactoredCurvature):
    """Kronecker-factored curvature, whose magnitudes are products of the factors' curvatures."""

    name = "kfac"

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set, and measure magnitudes on another (Eq. 9) or on the same.

        The factors of a second data set are projected and freed one block at a time.
        """
        factors, totals = factor_sums(context, directions)
        bases = eigenbases(context, factors, totals)
        if magnitudes is None:
            curvature, scales = assemble_eigenvalues(context, bases, totals)
            return self.leading(CurvatureFit(curvature, totals, scales))
        products = curvature_along(context, bases, magnitudes, totals.num_examples)
        curvature = assemble(context, bases, products.values)
        totals = totals + products.totals
        return self.leading(CurvatureFit(curvature, totals, products.factor_scales))

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds.

        Cross-fitting reads the data once and keeps the factors of all folds in memory. A factor of
        full rank is decomposed K + 1 times. A factor of low rank r, such as a linear layer's factor
        from few examples, is decomposed once, and then only K matrices `[r, r]` are decomposed.
        """
        folds = split_folds(context.ranks, data, num_folds)
        sums_by_fold, totals_by_fold = fold_factor_sums(context, folds)
        curvature, scales = crossfit_factors(context, totals_by_fold, sums_by_fold)
        return self.leading(CurvatureFit(curvature, total_of(totals_by_fold), scales))

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        r"""Recover the factors of earlier data, and add the factors of new data.

        A sum of two Kronecker products is not a Kronecker product, so it is approximated by the
        product of the two means, as K-FAC approximates the sum over examples:
        $\tfrac1N(N_1 G_1 + N_2 G_2) \otimes \tfrac1N(N_1 A_1 + N_2 A_2)$. The product is the K-FAC
        of all data if the earlier curvature comes from a fit to one data set, without a rank.
        """
        sums, totals = factor_sums(context, data)
        counts = ExampleCounts.for_update(information, num_data, totals)
        all_totals = add_earlier_factors(sums, information, counts, totals)
        bases = eigenbases(context, sums, all_totals)
        curvature, scales = assemble_eigenvalues(context, bases, all_totals)
        return self.leading(CurvatureFit(curvature, totals, scales))

    def trial_passes(
        self, context: FitContext, data: Iterable[Batch]
    ) -> Sequence[Callable[[], TrialPass]]:
        """Return the pass that sums the factors."""
        return [partial(factor_trial, context, data)]

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the factors of one or two data sets, and of their decompositions."""
        stages = super().stage_bytes(context, workload)
        if workload.is_debiased:
            blocks = self.block_bytes(context, workload.num_rows)
            factors = sum(block.factors for block in blocks)
            stages["magnitudes"] = 2 * factors + workload.working_bytes
        return stages
