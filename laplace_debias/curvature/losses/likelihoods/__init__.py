"""Likelihoods: what the network's outputs mean, and how the loss curves in them."""

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.losses.likelihoods.bernoulli import Bernoulli, MultiLabel
from laplace_debias.curvature.losses.likelihoods.categorical import Categorical
from laplace_debias.curvature.losses.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from laplace_debias.curvature.losses.likelihoods.names import likelihood_from

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MultiLabel",
    "likelihood_from",
]
