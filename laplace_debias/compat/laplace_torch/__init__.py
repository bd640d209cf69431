"""The names, arguments and shapes of laplace-torch.

Code that was written for laplace-torch runs with one changed import:
`from laplace_debias.compat.laplace_torch import Laplace, marglik_training`. Arguments and methods
without an equivalent raise an error. The reference of this module lists them, with replacements.
"""

from typing import NoReturn

from laplace_debias.compat.laplace_torch.absent import ABSENT_CLASSES
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


def __getattr__(name: str) -> NoReturn:
    """Explain what to use instead of a class of laplace-torch that this module does not have.

    Raises:
        ImportError: For such a class. Python replaces an `AttributeError` by its own message.
        AttributeError: For any other name.
    """
    if name in ABSENT_CLASSES:
        raise ImportError(f"{__name__} has no {name}. {ABSENT_CLASSES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
