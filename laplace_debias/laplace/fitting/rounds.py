"""A round of an automatic fit: the posterior so far, and an estimate of its error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.context import CurvatureFit
from laplace_debias.curvature.fits.crossfit import crossfit_with_replicates
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.laplace.fitting.fit import build_posterior
from laplace_debias.laplace.fitting.importance_sampler import SampledSums
from laplace_debias.laplace.fitting.prepared import PreparedFit
from laplace_debias.laplace.functional.context import map_outputs, prediction_context
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.operators import BlockDiagonal

CURVE = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Prior precisions at which the error is estimated, relative to the prior precision of the fit."""
NUM_ERRORS = 1.9
"""The reported error in standard errors, chosen such that the true error rarely exceeds it."""
# For each input, the standard deviations of this many of its largest outputs are compared.
_NUM_OUTPUTS = 4
# A block whose prior precision is multiplied by this factor has practically no variance.
_FROZEN = 1e12


@dataclass(frozen=True)
class Round:
    """A fit to the examples drawn so far, and its error.

    Attributes:
        fitted: The posterior.
        totals: The totals of the examples that have been read.
        replicates: The jackknife replicates: the curvatures that leave out one fold each.
        spread: The relative standard error of the mean curvature with respect to the outputs.
        curve: The error at each prior precision of `CURVE`.
    """

    fitted: FittedPosterior
    totals: DataTotals
    replicates: list[BlockDiagonal]
    spread: float
    curve: list[float]

    @property
    def error(self) -> float:
        """The largest error of the curve, which decides whether the fit stops."""
        return max(self.curve)


def fit_round(sums: SampledSums, prepared: PreparedFit) -> Round:
    """Fit the posterior to the examples that have been read, and estimate its error."""
    context = prepared.context
    mean_curvature = float(sums.curvatures.mean())
    factors = [fold.factors(mean_curvature) for fold in sums.folds]
    totals = [fold.totals for fold in sums.folds]
    kfac = crossfit_with_replicates(context, totals, factors)
    curvature_fit = CurvatureFit(kfac.crossfitted, sums.totals, kfac.factor_scales)
    fitted = build_posterior(prepared, curvature_fit)
    deltas = fitted.posterior.deltas() * fitted.posterior.mean.new_tensor(CURVE)[:, None]
    # All folds use the same mean curvature, so its error is estimated from all examples read.
    curvatures = sums.curvatures
    spread = float(curvatures.std() / curvatures.mean()) / len(curvatures) ** 0.5
    variances, statistical_errors = _variances_with_errors(
        fitted, kfac.replicates, spread, sums.probes, deltas
    )
    in_fold_variances = _variances(fitted, kfac.plain, sums.probes, deltas)
    # Magnitudes from held-out folds are biased, too, but much less than in-fold magnitudes.
    bias = (in_fold_variances / variances).log() / 8
    relative = torch.hypot(statistical_errors / (2 * variances), bias).nan_to_num(0.0)
    errors = relative.square().mean((1, 2)).sqrt().tolist()
    # All processes use bit-identical numbers, so that they make the same decision.
    curve = context.ranks.from_rank(errors, 0)
    return Round(fitted, sums.totals, kfac.replicates, spread, curve)


def errors_by_block(last_round: Round, x: Inputs) -> list[float]:
    """Compute the contribution of each block to the error of a round at inputs x."""
    fitted = last_round.fitted
    deltas = fitted.posterior.deltas()
    is_own_block = torch.eye(len(deltas), device=deltas.device).bool()
    # Only one block at a time has variance, because a large precision freezes all others.
    deltas_by_block = torch.where(is_own_block, deltas, _FROZEN * deltas)
    variances = _variances(fitted, fitted.posterior.curvature, x, deltas[None])
    _, statistical_errors = _variances_with_errors(
        fitted, last_round.replicates, last_round.spread, x, deltas_by_block
    )
    relative = (statistical_errors / (2 * variances)).nan_to_num(0.0)
    return relative.square().mean((1, 2)).sqrt().tolist()


def _variances_with_errors(
    fitted: FittedPosterior,
    replicates: Sequence[BlockDiagonal],
    spread: float,
    x: Inputs,
    deltas: Float[Tensor, "grid blocks"],
) -> tuple[Float[Tensor, "grid inputs outputs"], Float[Tensor, "grid inputs outputs"]]:
    """Compute the variances of the outputs, and `NUM_ERRORS` times their standard errors.

    Args:
        fitted: The posterior.
        replicates: The jackknife replicates of its curvature.
        spread: The relative standard error of the mean curvature with respect to the outputs.
        x: Inputs.
        deltas: δ of every block at every grid point.
    """
    # A curvature that is larger by the factor s gives the precision N s C + δ = s (N C + δ / s).
    scale = 1 + spread
    curvature = fitted.posterior.curvature
    variances = _variances(fitted, curvature, x, deltas)
    from_mean_curvature = _variances(fitted, curvature, x, deltas / scale) / scale - variances
    by_replicate = [_variances(fitted, replicate, x, deltas) for replicate in replicates]
    from_folds = jackknife(torch.stack(by_replicate))
    return variances, NUM_ERRORS * torch.hypot(from_mean_curvature, from_folds)


def _variances(
    fitted: FittedPosterior,
    curvature: BlockDiagonal,
    x: Inputs,
    deltas: Float[Tensor, "grid blocks"],
) -> Float[Tensor, "grid inputs outputs"]:
    """Compute the variances of the largest outputs for a given curvature and prior precisions."""
    fitted = replace(fitted, posterior=fitted.posterior.changed(curvature=curvature))
    with prediction_context(fitted, take(x, slice(0, 1))) as context:
        size = map_outputs(context.network, context.x).numel()
    _, variances = moments(fitted, x, deltas, kind="variances", outputs=min(_NUM_OUTPUTS, size))
    return variances.double()


def jackknife(replicates: Float[Tensor, "folds *values"]) -> Float[Tensor, "*values"]:
    """Compute the standard error of values from their jackknife replicates."""
    return (replicates.var(0, correction=0) * (len(replicates) - 1)).sqrt()
