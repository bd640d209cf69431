"""Curvature measured during training, and hyper-parameters from the marginal likelihood."""

from laplace_debias.training.marginal_likelihood import (
    MarginalLikelihoodRun,
    marginal_likelihood_training,
)
from laplace_debias.training.online import OnlineCurvature

__all__ = ["MarginalLikelihoodRun", "OnlineCurvature", "marginal_likelihood_training"]
