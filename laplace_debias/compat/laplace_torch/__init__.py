"""A drop-in replacement for laplace-torch, with its names, arguments and shapes.

Code written for laplace-torch runs with a single changed import:
`from laplace_debias.compat.laplace_torch import Laplace, marglik_training`. Arguments and methods
without an equivalent raise an error; the reference page of this module lists them and their
replacements.
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
    """Raise an error that explains what to use instead of a missing class of laplace-torch.

    Raises:
        ImportError: For a class of laplace-torch, because Python would replace the message of an
            `AttributeError`.
        AttributeError: For any other name.
    """
    if name in ABSENT_CLASSES:
        raise ImportError(f"{__name__} has no {name}. {ABSENT_CLASSES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
