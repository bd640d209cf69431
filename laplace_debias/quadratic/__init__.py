"""Quadratic models of a loss: slopes, curvatures, cuts, Newton steps."""

from laplace_debias.quadratic.cut import Cut
from laplace_debias.quadratic.quadratic import Quadratic

__all__ = ["Cut", "Quadratic"]
