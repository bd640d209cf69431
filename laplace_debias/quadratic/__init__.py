"""Quadratic models of a loss: slopes, curvatures, cuts, Newton steps."""

from laplace_debias.quadratic.quadratic import Cut, Quadratic

__all__ = ["Cut", "Quadratic"]
