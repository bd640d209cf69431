"""The uncertainty of a predictive taken apart: what the data leave open, what the parameters do."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent

from laplace_debias.curvature.losses.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from laplace_debias.metrics import Uncertainty, uncertainty


def has_variance_in_closed_form(likelihood: Likelihood) -> bool:
    """Whether `of_moments` knows the likelihood."""
    return isinstance(likelihood, Gaussian | HeteroscedasticGaussian)


def of_moments(
    likelihood: Likelihood,
    mean: Float[Tensor, "*batch outputs"],
    variances: Float[Tensor, "*batch outputs"],
) -> Uncertainty:
    """The variances of each target of a regression with Gaussian outputs, exact.

    Args:
        likelihood: A `Gaussian` or `HeteroscedasticGaussian`.
        mean: Of the outputs, `[B, C]`.
        variances: Of the outputs, of the same shape.
    """
    total = likelihood.marginals(mean, variances).variance
    # The outputs that are means of targets come first; there may be log-variances behind them.
    epistemic = variances[..., : total.shape[-1]].to(total.dtype)
    return Uncertainty(total, total - epistemic, epistemic)


def of_draws(likelihood: Likelihood, draws: Float[Tensor, "samples *batch outputs"]) -> Uncertainty:
    """The entropies, or variances, over samples of the outputs.

    Args:
        likelihood: What outputs mean.
        draws: Samples of the outputs, `[S, B, ..., C]`.
    """
    each = likelihood.predictive(draws, None)
    if isinstance(each, Categorical):
        shape = each.batch_shape[1:]
        found = uncertainty(each.probs.flatten(1, -2))
        return Uncertainty(*(part.view(shape) for part in found))
    if isinstance(each, Bernoulli):
        shape = each.batch_shape[1:]
        found = uncertainty(each.probs.flatten(1))
        return Uncertainty(*(part.view(shape) for part in found))
    if isinstance(each, Independent) and isinstance(each.base_dist, Bernoulli):
        shape = each.base_dist.batch_shape[1:]
        found = uncertainty(each.mean.flatten(1))
        return Uncertainty(*(part.view(shape).sum(-1) for part in found))
    aleatoric = each.variance.mean(0)
    epistemic = torch.var(each.mean, dim=0, unbiased=False)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
