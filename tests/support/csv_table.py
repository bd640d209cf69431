"""CSV as the package writes it, read again."""

import csv
import re
from pathlib import Path

_INTEGER = re.compile(r"[+-]?\d+")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf|nan", re.IGNORECASE)
_WORDS: dict[str, object] = {"": None, "True": True, "False": False}


def read_csv(path) -> list[dict[str, object]]:
    """The rows: what looks like a number, `True` or `False` becomes one; nothing becomes None."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        columns, *body = csv.reader(file)
    return [dict(zip(columns, map(_parse, line), strict=True)) for line in body]


def _parse(cell: str) -> object:
    if cell in _WORDS:
        return _WORDS[cell]
    if _INTEGER.fullmatch(cell):
        return int(cell)
    return float(cell) if _REAL.fullmatch(cell) else cell
