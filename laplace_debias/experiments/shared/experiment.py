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
        settings: The dataclass of its settings, an `ExperimentSettings`; `comparison`, which cannot
            be resumed, has its own.
        run: Runs it with an instance of these, and perhaps a console to print on (the standard
            output if None). Refuses data, checkpoints or an output folder that are not as expected
            by a ValueError, other results in the folder by a FileExistsError, before any work;
            raises a FloatingPointError if a training diverges. Nothing is overwritten.
    """

    name: str
    figure: str
    help: str
    settings: type
    run: Callable[..., Any]
