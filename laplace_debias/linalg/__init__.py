"""Algorithms on any linear operator: they need its products and nothing else."""

from laplace_debias.linalg.conjugate_gradient import cg, debiased_cg, relative_progress, replay
from laplace_debias.linalg.diagonal import diagonal
from laplace_debias.linalg.eigen import EigenPairs, eigsh
from laplace_debias.linalg.estimate import Estimate
from laplace_debias.linalg.inverse import inverse, solve
from laplace_debias.linalg.linear_solution import LinearSolution
from laplace_debias.linalg.logdet import logdet
from laplace_debias.linalg.lsmr import lsmr
from laplace_debias.linalg.neumann import neumann
from laplace_debias.linalg.norms import frobenius_norm, spectral_norm
from laplace_debias.linalg.quadrature import matrix_function_trace
from laplace_debias.linalg.solution import DebiasedSolution, Iterate, Solution, Status
from laplace_debias.linalg.spectrum import SpectralDensity, spectral_density
from laplace_debias.linalg.square_root import sqrt
from laplace_debias.linalg.subspaces import overlaps
from laplace_debias.linalg.trace import trace

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
    "logdet",
    "lsmr",
    "matrix_function_trace",
    "neumann",
    "overlaps",
    "relative_progress",
    "replay",
    "solve",
    "spectral_density",
    "spectral_norm",
    "sqrt",
    "trace",
]
