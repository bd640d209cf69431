"""What an experiment of the paper is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the paper: settings in; a table, pictures and sentences out.

    Attributes:
        name: Its name on the command line.
        figure: The figures of the paper that it repeats.
        help: What it measures, in one line.
        settings: The dataclass of its settings, an `ExperimentSettings`.
        run: Runs it with an instance of these, and perhaps a console to print on.
    """

    name: str
    figure: str
    help: str
    settings: type
    run: Callable[..., Any]
