"""Laplace approximations of trained networks, debiased for mini-batches."""

from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.network.inputs import OneArgument
from laplace_debias.curvature.network.shards import ShardedBatches
from laplace_debias.laplace import Auto, CrossFit, Full, Laplace, Link, Mixture, Plan, Split
from laplace_debias.quadratic import Quadratic
from laplace_debias.system.ranks import alone

__all__ = [
    "Auto",
    "Bernoulli",
    "Categorical",
    "CrossFit",
    "Full",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "Link",
    "Mixture",
    "MultiLabel",
    "OneArgument",
    "Plan",
    "Quadratic",
    "ShardedBatches",
    "Split",
    "alone",
]
