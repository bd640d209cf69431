"""Tables of results, on the terminal and as CSV.

A table is a sequence of rows; a row maps the names of columns to numbers, strings, booleans or
None. Rows may lack columns.
"""

import csv
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from laplace_debias.system.files import written_atomically

Row = Mapping[str, object]
_MOST_COLUMNS = 1000


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print a table to the terminal.

    Real numbers have three decimals. They are in scientific notation if they would round to zero,
    or if they have more than six digits before the point. Missing values and None are shown as a
    dash.
    """
    # rich is imported here, because CSV and Markdown do not need it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns, lines = _cells(rows)
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column, cells in zip(columns, zip(*lines, strict=True), strict=True):
        kinds = {type(cell) for cell in cells if cell is not None}
        is_numeric = kinds and kinds <= {bool, int, float}
        table.add_column(Text(column), justify="right" if is_numeric else "left")
    for line in lines:
        table.add_row(*(Text(_format_entry(cell)) for cell in line))
    # In a file or a pipe, a row is one line, however long.
    width = None if sys.stdout.isatty() else _MOST_COLUMNS
    Console(width=width).print(table)


def write_csv(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write a table as CSV, keeping the full precision of real numbers.

    The file is written atomically, and missing parent folders are created. Strings are passed
    through `not_a_formula`.
    """
    columns, lines = _cells(rows)
    with (
        written_atomically(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(not_a_formula, columns))
        writer.writerows([not_a_formula(cell) for cell in line] for line in lines)


def not_a_formula(value: Any) -> Any:
    """Return a cell of a CSV file so that a spreadsheet does not read it as a formula.

    A string is changed if it begins with `=`, `+`, `-` or `@`, unless it is a number with a sign.
    """
    computed = isinstance(value, str) and re.match(r"[=+@-](?![\d.]*$)", value)
    return f"'{value}" if computed else value


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the columns, and rows of plain values."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    values = ([row.get(column) for column in columns] for row in rows)
    return columns, [
        [v.item() if isinstance(v, Tensor | np.generic) else v for v in row] for row in values
    ]


def _format_entry(value: str | bool | int | float | None) -> str:
    """Return an entry of a table as text; very small and large numbers get an exponent."""
    if value is None:
        return "–"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 0.0005 or abs(value) >= 1e6 else f"{value:.3f}"
