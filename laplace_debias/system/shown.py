"""Formats for objects, tables and JSON data, and warnings that point to the user's code."""

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

_MOST_SHOWN_VALUES = 3


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Format a number of things, as in `1 row` and `2,000 rows`; the default plural adds an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def first_names(names: Sequence[str], number: int = 3) -> str:
    """Format the first names of a list, as in `a, b, c, …`."""
    if len(names) > number:
        return f"{', '.join(names[:number])}, …"
    return ", ".join(names)


def one_line(value: Any) -> str:
    """Format an object's class and its non-empty attributes in one line.

    For a long tensor, only the shape is shown.
    """
    attributes = []
    for name, attribute in vars(value).items():
        is_empty = attribute is None or (isinstance(attribute, Mapping) and not attribute)
        if not (name.startswith("_") or is_empty):
            attributes.append(f"{name}={_short(attribute)}")
    return f"{type(value).__name__}({', '.join(attributes)})"


def _short(value: Any) -> str:
    """Format a value; a vector as its length and both ends, and a matrix as its shape."""
    if isinstance(value, Tensor):
        return _short_tensor(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        different_texts = dict.fromkeys(map(_short, value))
        if len(different_texts) > _MOST_SHOWN_VALUES:
            return f"[{len(value)}]"
        return ", ".join(different_texts)
    return repr(value)


def _short_tensor(tensor: Tensor) -> str:
    if tensor.ndim == 1 and len(tensor) > 1:
        return f"[{len(tensor)}] {_short(tensor[0].item())} … {_short(tensor[-1].item())}"
    if tensor.ndim == 1 and len(tensor) == 1:
        return f"[1] {_short(tensor.item())}"
    if tensor.numel() == 1:
        return _short(tensor.item())
    return str(list(tensor.shape))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table; the first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for title, *values in rows:
        cells = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        lines.append("  ".join([title.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Format a table for notebooks.

    Real numbers are shown with four digits, and None is shown as an empty cell.
    """
    head = f"<thead>{_line('th', header)}</thead>" if header else ""
    return f"<table>{head}{''.join(_line('td', row) for row in rows)}</table>"


def _line(tag: str, cells: Sequence[object]) -> str:
    """Format a row of an HTML table; `tag` is `th` or `td`."""
    texts = ""
    for cell in cells:
        text = "" if cell is None else str(cell)
        if isinstance(cell, float):
            text = f"{cell:.4g}"
        texts += f"<{tag}>{escape(text)}</{tag}>"
    return f"<tr>{texts}</tr>"


# Packages whose stack frames may lie between the user's code and the call of `warn`.
_PASSED_PACKAGES = {"laplace_debias", "torch", "contextlib", "functools", "beartype", "jaxtyping"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the innermost line of code outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    # Level 1 would be this function, so the search starts at level 2.
    level = 2
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # Also skip the frames of functions that beartype creates, which have no real file name.
        if module not in _PASSED_PACKAGES and not frame.f_code.co_filename.startswith("<@beartype"):
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def plain(value: Any) -> Any:
    """Convert a value to plain JSON data.

    Tensors become numbers and lists, and numbers that are not finite become null.
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
