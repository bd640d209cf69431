"""Lines on the terminal, where nothing is drawn: a command that prints no table needs no rich."""

import sys
from typing import Protocol, runtime_checkable


@runtime_checkable
class Printer(Protocol):
    """A place that commands print lines on: rich's console, or `Lines`."""

    def print(self, *objects: object, soft_wrap: bool | None = None) -> None:
        """Print objects as a line; `soft_wrap` leaves it to the terminal to break it."""


class Lines:
    """The standard output; the terminal breaks the lines."""

    def print(self, *objects: object, soft_wrap: bool | None = None) -> None:
        """As `Printer.print`."""
        sys.stdout.write(f"{' '.join(map(str, objects))}\n")
