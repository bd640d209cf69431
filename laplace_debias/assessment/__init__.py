"""Is a network's uncertainty any good: methods compared, and what a run leaves behind."""

from laplace_debias.assessment.assessing import assess
from laplace_debias.assessment.methods import Method, PosteriorChoice, default_methods
from laplace_debias.assessment.temperature import fit_temperature

__all__ = [
    "Method",
    "PosteriorChoice",
    "assess",
    "default_methods",
    "fit_temperature",
]
