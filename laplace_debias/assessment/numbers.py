"""Predictions of numbers, computed from the moments of the outputs or from a predictive."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from laplace_debias.assessment.predictions import NumberPredictions
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.likelihoods.base import variances_of
from laplace_debias.laplace import links
from laplace_debias.laplace.prediction.decomposition import uncertainty_of_draws
from laplace_debias.laplace.prediction.intervals import (
    interval_ends,
    interval_levels,
    single_targets,
)
from laplace_debias.operators.eigh import eigh

LEVEL = 0.95
"""The level of the intervals whose ends are columns of the table of predictions."""


def number_predictions(
    likelihood: Likelihood,
    mean: Float[Tensor, "n outputs"],
    covariance: Float[Tensor, "n outputs outputs"] | Float[Tensor, "n outputs"] | None,
    targets: Tensor | None,
) -> NumberPredictions:
    """Predict numbers from the moments of the outputs.

    Args:
        likelihood: The likelihood.
        mean: Means of the outputs.
        covariance: The covariances of the outputs, or only their variances; None if the outputs are
            certain.
        targets: The true targets.
    """
    epistemic = None
    if covariance is not None:
        epistemic = _epistemic_variance(likelihood, mean, covariance).double().cpu().sqrt()
    return describe_predictive(_predictive(likelihood, mean, covariance), epistemic, targets)


def describe_predictive(
    predictive: Any, epistemic: Float[Tensor, "n outputs"] | None, targets: Tensor | None = None
) -> NumberPredictions:
    """Compute the table's numbers, such as means and intervals, from a predictive.

    Args:
        predictive: The predictive.
        epistemic: Standard deviations without the noise; None if they are zero.
        targets: The true targets.
    """
    predictive = single_targets(predictive)
    mean = predictive.mean.double().cpu()
    if epistemic is None:
        epistemic = torch.zeros_like(mean)
    lower = None
    upper = None
    log_prob = None
    interval_level = None
    # For a normal predictive, these follow from the mean and the standard deviation.
    if not isinstance(predictive, Normal | MultivariateNormal):
        ends = interval_ends(predictive, LEVEL)
        if ends is not None:
            lower, upper = (end.double().cpu() for end in ends)
        if targets is not None:
            targets = targets.reshape(mean.shape).to(predictive.mean)
            log_prob = predictive.log_prob(targets).double().cpu().reshape(len(targets), -1).sum(1)
            interval_level = interval_levels(predictive, targets)
            if interval_level is not None:
                interval_level = interval_level.cpu()
    return NumberPredictions(
        mean=mean,
        standard_deviation=predictive.variance.double().cpu().sqrt(),
        lower=lower,
        upper=upper,
        log_prob=log_prob,
        interval_level=interval_level,
        epistemic=epistemic,
    )


def _predictive(likelihood: Likelihood, mean: Tensor, covariance: Tensor | None) -> Distribution:
    """Return the marginal distribution of each target in closed form, or else the predictive."""
    if not likelihood.has_marginals:
        return likelihood.predictive(mean, covariance)
    variances = torch.zeros_like(mean)
    if covariance is not None:
        variances = variances_of(mean, covariance)
    return likelihood.marginals(mean, variances)


def _epistemic_variance(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor
) -> Float[Tensor, "n targets"]:
    """Compute the variance of the targets' means in closed form, or else over Sobol points."""
    if likelihood.has_marginals:
        return likelihood.epistemic_variances(mean, variances_of(mean, covariance))
    return uncertainty_of_draws([likelihood], [gaussian_draws(mean, covariance)]).epistemic


def gaussian_draws(
    mean: Float[Tensor, "n outputs"],
    covariance: Float[Tensor, "n outputs outputs"] | Float[Tensor, "n outputs"],
) -> Float[Tensor, "samples n outputs"]:
    """Draw Gaussian outputs, in float64 on the CPU, at the same Sobol points as the links."""
    if covariance.ndim == mean.ndim:
        covariance = torch.diag_embed(covariance)
    values, vectors = eigh(covariance.double().cpu(), "the functional covariance")
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    points = links.normal_points(mean.shape[1])
    return mean.double().cpu() + torch.einsum("bij,sj->sbi", root, points)
