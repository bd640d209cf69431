"""Warnings that name the line of the user's code that led to them."""

import sys
import warnings
from types import FrameType

# What may lie between that line and the one that warns: this package, and what wraps functions.
_WITHIN = {"laplace_debias", "torch", "contextlib", "functools", "beartype", "jaxtyping"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of a line of the user's code: the nearest one that is not within this package.

    Args:
        message: The text.
        category: The kind of warning.
    """
    frame: FrameType | None = sys._getframe(1)
    # Level 1 is this function.
    level = 2
    while frame is not None and _is_within(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_within(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    # Functions that beartype makes have names of no file.
    return module.partition(".")[0] in _WITHIN or frame.f_code.co_filename.startswith("<@beartype")
