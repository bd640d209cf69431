"""Algorithms on any linear operator, by its products alone; exact where its structure allows."""

from laplace_debias.linalg.eigen.eigsh import eigsh
from laplace_debias.linalg.eigen.subspaces import overlaps
from laplace_debias.linalg.estimators.diagonal import diagonal
from laplace_debias.linalg.estimators.function_trace import matrix_function_trace
from laplace_debias.linalg.estimators.logdet import logdet
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
from laplace_debias.linalg.solvers.conjugate_gradient import cg, debiased_cg
from laplace_debias.linalg.solvers.gaussian import sample_gaussian
from laplace_debias.linalg.solvers.inverse import inverse, solve
from laplace_debias.linalg.solvers.lsmr import lsmr
from laplace_debias.linalg.solvers.neumann import neumann
from laplace_debias.linalg.solvers.replay import replay
from laplace_debias.linalg.solvers.square_root import inverse_sqrt, sqrt
from laplace_debias.linalg.solvers.stopping import relative_progress

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
    "lsmr",
    "matrix_function_trace",
    "neumann",
    "overlaps",
    "relative_progress",
    "replay",
    "sample_gaussian",
    "solve",
    "spectral_density",
    "spectral_norm",
    "sqrt",
    "trace",
]
