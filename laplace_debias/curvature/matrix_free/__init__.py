"""Curvature matrices and Jacobians of networks as operators that are only ever multiplied."""

from laplace_debias.curvature.matrix_free.jacobian import Jacobian
from laplace_debias.curvature.matrix_free.operators import (
    GGN,
    CurvatureOperator,
    EmpiricalFisher,
    Fisher,
    Hessian,
)

__all__ = [
    "GGN",
    "CurvatureOperator",
    "EmpiricalFisher",
    "Fisher",
    "Hessian",
    "Jacobian",
]
