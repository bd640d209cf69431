"""Closed forms: exact results from an operator's structure, computed from its parts.

Every function returns None if the structure has no closed form, so that the caller can fall back on
an iterative method. It raises an error if the result does not exist.
"""

from laplace_debias.operators.exact.entries import (
    exact_diagonal,
    exact_frobenius_norm,
    exact_spectral_norm,
    exact_trace,
)
from laplace_debias.operators.exact.inverse import exact_inverse, exact_logdet
from laplace_debias.operators.exact.spectrum import (
    eigenvalues,
    exact_eigh,
    exact_sqrt,
    least_eigenvalue_bound,
)

__all__ = [
    "eigenvalues",
    "exact_diagonal",
    "exact_eigh",
    "exact_frobenius_norm",
    "exact_inverse",
    "exact_logdet",
    "exact_spectral_norm",
    "exact_sqrt",
    "exact_trace",
    "least_eigenvalue_bound",
]
