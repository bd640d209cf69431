"""Curvature along a training run, and hyper-parameters by the marginal likelihood."""

from laplace_debias.training.online import OnlineCurvature

__all__ = ["OnlineCurvature"]
