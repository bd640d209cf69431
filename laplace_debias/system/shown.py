"""Objects in one line or as a table, warnings, lines on the terminal: shown to a user."""

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

_FEW = 3


def one_line(value: Any) -> str:
    """The class of an object and its attributes but for empty ones, long tensors by shape alone."""
    parts = [
        f"{name}={_short(part)}"
        for name, part in vars(value).items()
        if not (name.startswith("_") or part is None or (isinstance(part, Mapping) and not part))
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _short(value: Any) -> str:
    """A value; of a vector its length and both ends, of a matrix the shape."""
    if isinstance(value, Tensor):
        if value.ndim != 1 or not len(value):
            return _short(value.item()) if value.numel() == 1 else str(list(value.shape))
        ends = value[[0, -1]].tolist() if len(value) > 1 else value.tolist()
        return f"[{len(value)}] {' … '.join(map(_short, ends))}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = dict.fromkeys(map(_short, value))
        return ", ".join(parts) if len(parts) <= _FEW else f"[{len(value)}]"
    return repr(value)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows with columns of one width; the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for first, *others in rows
    )


def html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table for notebooks: a real number with four digits, None as nothing."""
    head = f"<thead>{_line('th', header)}</thead>" if header else ""
    return f"<table>{head}{''.join(_line('td', row) for row in rows)}</table>"


def _line(tag: str, cells: Sequence[object]) -> str:
    texts = ""
    for cell in cells:
        text = f"{cell:.4g}" if isinstance(cell, float) else str("" if cell is None else cell)
        texts += f"<{tag}>{escape(text)}</{tag}>"
    return f"<tr>{texts}</tr>"


# What may lie between that line and the one that warns: this package, and what wraps functions.
_WITHIN = {"laplace_debias", "torch", "contextlib", "functools", "beartype", "jaxtyping"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of a line of the user's code: the nearest one that is not within this package."""
    frame: FrameType | None = sys._getframe(1)
    # Level 1 is this function.
    level = 2
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # Functions that beartype makes have names of no file.
        if module not in _WITHIN and not frame.f_code.co_filename.startswith("<@beartype"):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def plain(value: Any) -> Any:
    """A value as JSON has it: lists and numbers for tensors, null for what is not finite."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
