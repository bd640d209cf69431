"""Laplace approximations of trained PyTorch networks, debiased."""

from laplace_debias.laplace import Laplace

__all__ = ["Laplace"]
