"""Operators of networks: what curvature is, and how it is factored."""

from laplace_debias.curvature.operators import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
    RowSpectrum,
    ggn_spectrum,
)

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "EmpiricalFisher",
    "Fisher",
    "Hessian",
    "Jacobian",
    "RowSpectrum",
    "ggn_spectrum",
]
