"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

from laplace_debias.laplace.laplace import Laplace, predict_grids

__all__ = ["Laplace", "predict_grids"]
