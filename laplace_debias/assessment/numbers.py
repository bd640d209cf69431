"""Table columns that describe a predictive distribution of numbers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace import links
from laplace_debias.laplace.prediction.decomposition import uncertainty_of_draws
from laplace_debias.laplace.prediction.intervals import (
    interval_ends,
    interval_levels,
    single_targets,
)
from laplace_debias.operators.eigh import eigh

LEVEL = 0.95
"""Level of the intervals whose lower and upper ends are columns of the table."""


def number_columns(
    likelihood: Likelihood,
    mean: Float[Tensor, "n outputs"],
    covariance: Float[Tensor, "n outputs outputs"] | Float[Tensor, "n outputs"] | None,
    targets: Tensor | None,
) -> dict[str, Tensor]:
    """Compute the columns of the predictive from the moments of the outputs.

    They are `mean`, `standard_deviation` and `epistemic`, `[n, C]`. A predictive that is not normal
    also has `log_prob` `[n]` and `interval_level` `[n, C]` of the targets, if there are any, and
    `lower` and `upper` `[n, C]`, the ends of its 95 % interval, as far as it has a distribution
    function and quantiles.

    Args:
        likelihood: The likelihood.
        mean: Means of the outputs.
        covariance: Their covariances, or only variances; None for outputs that are certain.
        targets: The true targets.
    """
    predictive = _predictive(likelihood, mean, covariance)
    columns = predictive_columns(predictive, targets)
    columns["epistemic"] = torch.zeros_like(columns["mean"])
    if covariance is not None:
        epistemic = _epistemic_variance(likelihood, mean, covariance)
        columns["epistemic"] = epistemic.double().cpu().sqrt()
    return columns


def predictive_columns(predictive: Any, targets: Tensor | None = None) -> dict[str, Tensor]:
    """Compute the columns of `number_columns`, except `epistemic`, for a distribution."""
    predictive = single_targets(predictive)
    columns = {
        "mean": predictive.mean.double().cpu(),
        "standard_deviation": predictive.variance.double().cpu().sqrt(),
    }
    if isinstance(predictive, Normal | MultivariateNormal):
        return columns
    ends = interval_ends(predictive, LEVEL)
    if ends is not None:
        columns["lower"], columns["upper"] = (end.double().cpu() for end in ends)
    if targets is not None:
        columns |= _columns_of_targets(predictive, targets.reshape(columns["mean"].shape))
    return columns


def _predictive(likelihood: Likelihood, mean: Tensor, covariance: Tensor | None) -> Distribution:
    """The distributions of single targets, where they have a closed form; else the predictive."""
    if not likelihood.has_marginals:
        return likelihood.predictive(mean, covariance)
    variances = torch.zeros_like(mean) if covariance is None else _variances(mean, covariance)
    return likelihood.marginals(mean, variances)


def _variances(mean: Tensor, covariance: Tensor) -> Tensor:
    is_matrix = covariance.ndim > mean.ndim
    return covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance


def _epistemic_variance(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor
) -> Float[Tensor, "n targets"]:
    """The variance of the targets' means, in closed form or over Sobol points."""
    if likelihood.has_marginals:
        return likelihood.epistemic_variances(mean, _variances(mean, covariance))
    return uncertainty_of_draws([likelihood], [gaussian_draws(mean, covariance)]).epistemic


def gaussian_draws(
    mean: Float[Tensor, "n outputs"],
    covariance: Float[Tensor, "n outputs outputs"] | Float[Tensor, "n outputs"],
) -> Float[Tensor, "samples n outputs"]:
    """Draw Gaussian outputs by the Sobol points that links use, float64 on the CPU."""
    if covariance.ndim == mean.ndim:
        covariance = torch.diag_embed(covariance)
    values, vectors = eigh(covariance.double().cpu(), "the functional covariance")
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    points = links.normal_points(mean.shape[1])
    return mean.double().cpu() + torch.einsum("bij,sj->sbi", root, points)


def _columns_of_targets(predictive: Any, targets: Tensor) -> dict[str, Tensor]:
    """Log-probabilities of targets, and the levels of the intervals that they lie in."""
    targets = targets.to(predictive.mean)
    log_prob = predictive.log_prob(targets).double().cpu()
    columns = {"log_prob": log_prob.reshape(len(targets), -1).sum(1)}
    levels = interval_levels(predictive, targets)
    if levels is not None:
        columns["interval_level"] = levels.cpu()
    return columns
