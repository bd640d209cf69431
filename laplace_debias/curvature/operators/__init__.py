"""Curvature matrices and Jacobians of networks as linear operators."""

from laplace_debias.curvature.operators.jacobian import Jacobian
from laplace_debias.curvature.operators.kfac import EKFAC, KFAC
from laplace_debias.curvature.operators.matrix_free import (
    GGN,
    CurvatureOperator,
    EmpiricalFisher,
    Fisher,
    Hessian,
)

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "CurvatureOperator",
    "EmpiricalFisher",
    "Fisher",
    "Hessian",
    "Jacobian",
]
