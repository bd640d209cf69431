"""Tables of results as text, on the terminal and as CSV.

A table is a sequence of rows; a row maps the names of columns to numbers, strings, booleans or
None. Rows may lack columns.
"""

import csv
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from laplace_debias.system.atomic import written_atomically

if TYPE_CHECKING:
    from rich.console import Console

Row = Mapping[str, object]

_MISSING = "–"


def markdown_table(
    rows: Sequence[Row], columns: Sequence[str] | None = None, digits: int = 3
) -> str:
    """Table in GitHub's Markdown, columns of numbers aligned to the right.

    Args:
        rows: The rows.
        columns: Which columns, in which order; all in order of appearance if None.
        digits: Decimal places of real numbers; those that would vanish, or have more than six
            digits before the point, appear in scientific notation.

    Returns:
        The table, without a newline at its end. Missing values and None appear as a dash.

    Raises:
        ValueError: There are no rows, or no row has one of the `columns`.

    Example:
        >>> print(markdown_table([{"method": "MAP", "nll": 0.61803}], digits=2))
        | method |  nll |
        | :----- | ---: |
        | MAP    | 0.62 |
    """
    columns = _checked_columns(rows, columns)
    header, *body = [list(map(_escape, line)) for line in (columns, *_cells(rows, columns, digits))]
    widths = [max(3, *map(len, column)) for column in zip(header, *body, strict=True)]
    right = [_is_numeric(rows, column) for column in columns]
    dashes = ["-" * (width - 1) for width in widths]
    ruler = [f"{d}:" if is_right else f":{d}" for d, is_right in zip(dashes, right, strict=True)]
    lines = [
        [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        for line in (header, ruler, *body)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_table(
    rows: Sequence[Row],
    title: str,
    columns: Sequence[str] | None = None,
    digits: int = 3,
    console: "Console | None" = None,
) -> None:
    """Prints a table to the terminal.

    Args:
        rows: The rows.
        title: Line above the table.
        columns: Which columns, in which order; all in order of appearance if None.
        digits: Decimal places of real numbers, as in `markdown_table`.
        console: Where to print; the standard output if None.

    Raises:
        ValueError: There are no rows, or no row has one of the `columns`.
    """
    # Here, as CSV and Markdown do without it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = _checked_columns(rows, columns)
    body = _cells(rows, columns, digits)
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in columns:
        table.add_column(Text(column), justify="right" if _is_numeric(rows, column) else "left")
    for line in body:
        table.add_row(*map(Text, line))
    (console or Console()).print(table)


def write_csv(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a table as CSV, real numbers in full precision, None and missing values as nothing.

    The file appears at once and whole; missing parent folders are made. Texts are `not_a_formula`.

    Args:
        rows: The rows; the columns are all that appear, in order of appearance.
        path: The file.

    Raises:
        ValueError: There are no rows, or a value is neither number, string, boolean nor None.
    """
    columns = _checked_columns(rows, None)
    lines = [[_plain(row.get(column), column) for column in columns] for row in rows]
    with (
        written_atomically(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(not_a_formula, columns))
        writer.writerows([not_a_formula(cell) for cell in line] for line in lines)


def not_a_formula(value: Any) -> Any:
    """A cell of a CSV file; a text that a spreadsheet would compute has an apostrophe before it.

    Such texts begin with `=`, `+`, `-` or `@`; numbers with a sign stay as they are.
    """
    computed = isinstance(value, str) and re.match(r"[=+@-](?![\d.]*$)", value)
    return f"'{value}" if computed else value


def _checked_columns(rows: Sequence[Row], columns: Sequence[str] | None) -> list[str]:
    if not rows:
        raise ValueError("the table has no rows; expected at least one. Did the run give results?")
    known = list(dict.fromkeys(column for row in rows for column in row))
    if columns is None:
        return known
    unknown = [column for column in columns if column not in known]
    if unknown or not columns:
        raise ValueError(
            f"`columns` has {unknown or 'no names'}; expected some of {known}. Correct the names."
        )
    return list(columns)


def _cells(rows: Sequence[Row], columns: Sequence[str], digits: int) -> list[list[str]]:
    return [
        [_formatted(_plain(row.get(column), column), digits) for column in columns] for row in rows
    ]


def _plain(value: object, column: str) -> str | bool | int | float | None:
    """A value as one of Python's own types; scalars of torch and NumPy are converted."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        f"column {column!r} holds a {type(value).__name__}; expected a number, string, boolean or "
        "None. Convert it with `str(...)` or leave the column out."
    )


def _formatted(value: str | bool | int | float | None, digits: int) -> str:
    if value is None:
        return _MISSING
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    vanishes = value != 0 and abs(value) < 0.5 * 10**-digits
    if vanishes or abs(value) >= 1e6:
        return f"{value:.{max(digits - 1, 0)}e}"
    return f"{value:.{digits}f}"


def _is_numeric(rows: Sequence[Row], column: str) -> bool:
    values = [_plain(row.get(column), column) for row in rows if row.get(column) is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _escape(cell: str) -> str:
    return cell.replace("|", r"\|").replace("\n", " ")
