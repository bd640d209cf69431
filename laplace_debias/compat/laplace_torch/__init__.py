"""A drop-in replacement for laplace-torch, with its names, arguments and shapes.

Code written for laplace-torch runs with a single changed import:
`from laplace_debias.compat.laplace_torch import Laplace, marglik_training`. Arguments and methods
without an equivalent raise an error; the reference page of this module lists them and their
replacements.
"""

import sys
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
        ImportError: If the statement `from ... import` asks for a class of laplace-torch, because
            Python would replace the message of an `AttributeError`.
        AttributeError: Otherwise, so that `hasattr` returns False.
    """
    if name not in ABSENT_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"{__name__} has no {name}. {ABSENT_CLASSES[name]}"
    # This function of importlib asks for the names in `from ... import`.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ImportError(message)
    raise AttributeError(message)
