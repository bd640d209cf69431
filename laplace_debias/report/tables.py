"""Print tables of results to the terminal, or write them as CSV.

A table is a sequence of rows. A row maps the names of columns to numbers, strings, booleans or
None, and need not contain all columns.
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

    Real numbers are shown with three decimals, or in scientific notation if they would round to
    zero or have more than six digits before the point. Missing values and None are shown as a dash.
    """
    # Import rich only here, because it is not needed for CSV.
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
    # In a file or a pipe, print each row on one line, no matter how long it is.
    width = None if sys.stdout.isatty() else _MOST_COLUMNS
    # With NO_COLOR, rich would still print bold text.
    color_system: Any = None if os.environ.get("NO_COLOR") else "auto"
    Console(width=width, color_system=color_system).print(table)


def write_csv(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write a table as CSV, keeping the full precision of real numbers.

    The file is written atomically, and missing parent folders are created. `not_a_formula` is
    applied to all strings.
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
    """Change a cell of a CSV file if a spreadsheet would mistake it for a formula.

    An apostrophe is put before strings that begin with `=`, `+`, `-` or `@`, except signed numbers.
    """
    computed = isinstance(value, str) and re.match(r"[=+@-](?![\d.]*$)", value)
    return f"'{value}" if computed else value


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the names of all columns, and the rows as lists of plain values."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    values = ([row.get(column) for column in columns] for row in rows)
    return columns, [
        [v.item() if isinstance(v, Tensor | np.generic) else v for v in row] for row in values
    ]


def _format_entry(value: str | bool | int | float | None) -> str:
    """Format an entry of a table; very small and very large numbers get an exponent."""
    if value is None:
        return "–"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 0.0005 or abs(value) >= 1e6 else f"{value:.3f}"
