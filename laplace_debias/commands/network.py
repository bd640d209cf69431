"""Shared by the commands on a network: posteriors, an output that is checked, notes, JSON."""

from pathlib import Path

from laplace_debias.laplace import Laplace
from laplace_debias.sources import Loaded
from laplace_debias.sources.settings import OF_COMPARISONS
from laplace_debias.system.files import check_target


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse an output that cannot be written or must not be replaced, before any work."""
    check_target(path, make_folders=True)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another --output, or give --overwrite")


def not_for(command: str, *names: str) -> dict[str, str]:
    """Options that a command on one posterior has no use for, and why."""
    return {
        **dict.fromkeys(OF_COMPARISONS, "for `report` and `evaluate`"),
        **dict.fromkeys(names, f"`{command}` does not read these examples"),
    }


def save(la: Laplace, output: Path) -> None:
    """Save a posterior, in a new folder if there is none."""
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output)


def print_notes(loaded: Loaded) -> None:
    """Print what a reader should know of a network and its data, a line each."""
    for note in loaded.notes:
        print(note)
