"""Curvature matrices and Jacobians of networks as linear operators."""

from laplace_debias.curvature.operators.kfac import EKFAC, KFAC
from laplace_debias.curvature.operators.matrix_free import (
    GGN,
    CurvatureOperator,
    EmpiricalFisher,
    Fisher,
    Hessian,
)
from laplace_debias.curvature.operators.network_operator import Jacobian

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
