"""Algorithms that need only products with a linear operator. Results are exact where possible."""

from laplace_debias.linalg.eigen.eigsh import eigsh
from laplace_debias.linalg.estimators.diagonal import diagonal
from laplace_debias.linalg.estimators.function_trace import logdet, matrix_function_trace
from laplace_debias.linalg.estimators.norms import frobenius_norm, spectral_norm
from laplace_debias.linalg.estimators.spectral_density import spectral_density
from laplace_debias.linalg.estimators.trace import trace
from laplace_debias.linalg.results import (
    DebiasedSolution,
    EigenPairs,
    Estimate,
    Iterate,
    LinearSolution,
    Solution,
    SpectralDensity,
    Status,
)
from laplace_debias.linalg.solvers.conjugate_gradient import cg, debiased_cg, relative_progress
from laplace_debias.linalg.solvers.inverse import inverse
from laplace_debias.linalg.solvers.neumann import neumann
from laplace_debias.linalg.solvers.square_root import inverse_sqrt, sample_gaussian

__all__ = [
    "DebiasedSolution",
    "EigenPairs",
    "Estimate",
    "Iterate",
    "LinearSolution",
    "Solution",
    "SpectralDensity",
    "Status",
    "cg",
    "debiased_cg",
    "diagonal",
    "eigsh",
    "frobenius_norm",
    "inverse",
    "inverse_sqrt",
    "logdet",
    "matrix_function_trace",
    "neumann",
    "relative_progress",
    "sample_gaussian",
    "spectral_density",
    "spectral_norm",
    "trace",
]
