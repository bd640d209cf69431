"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

from laplace_debias.laplace.auto import Auto
from laplace_debias.laplace.laplace import Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.mixture import Mixture
from laplace_debias.laplace.plan import Plan
from laplace_debias.laplace.schemes import CrossFit, Full, Split

__all__ = ["Auto", "CrossFit", "Full", "Laplace", "Link", "Mixture", "Plan", "Split"]
