"""What the algorithms return: one vocabulary for why they stopped, what they found and how well."""

from laplace_debias.linalg.results.eigenpairs import EigenPairs
from laplace_debias.linalg.results.estimates import Estimate, SpectralDensity
from laplace_debias.linalg.results.solutions import (
    DebiasedSolution,
    Iterate,
    LinearSolution,
    Solution,
)
from laplace_debias.linalg.results.status import Status

__all__ = [
    "DebiasedSolution",
    "EigenPairs",
    "Estimate",
    "Iterate",
    "LinearSolution",
    "Solution",
    "SpectralDensity",
    "Status",
]
