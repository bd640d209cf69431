"""The names, arguments and shapes of laplace-torch.

Code that was written for laplace-torch runs with one changed import:
`from laplace_debias.compat.laplace_torch import Laplace, marglik_training`. Arguments and methods
without an equivalent raise an error. The reference of this module lists them, with replacements.
"""

from laplace_debias.compat.laplace_torch.marglik import marglik_training
from laplace_debias.compat.laplace_torch.posteriors import Laplace
from laplace_debias.compat.laplace_torch.structured import (
    DiagLaplace,
    DiagLLLaplace,
    FullLaplace,
    FullLLLaplace,
    KronLaplace,
    KronLLLaplace,
    LowRankLaplace,
    StructuredLaplace,
)

__all__ = [
    "DiagLLLaplace",
    "DiagLaplace",
    "FullLLLaplace",
    "FullLaplace",
    "KronLLLaplace",
    "KronLaplace",
    "Laplace",
    "LowRankLaplace",
    "StructuredLaplace",
    "marglik_training",
]
