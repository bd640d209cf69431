"""Operators of networks: what curvature is, and how it is factored."""

from laplace_debias.curvature.network.inputs import OneArgument
from laplace_debias.curvature.operators import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
)

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "EmpiricalFisher",
    "Fisher",
    "Hessian",
    "Jacobian",
    "OneArgument",
]
