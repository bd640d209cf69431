"""Functions shared by the commands that work on one posterior: checks, saving and notes."""

from pathlib import Path
from typing import Any

from laplace_debias.sources.settings import NOT_COMPARED


def check_output(path: Path, overwrite: bool) -> None:
    """Raise an error if the output cannot be written, or exists and may not be overwritten."""
    from laplace_debias.system.files import check_target

    check_target(path, make_folders=True)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} already exists. Choose a different --output, or add --overwrite."
        )


def not_for(command: str, *names: str) -> dict[str, str]:
    """Return the options without effect in a command on one posterior, each with the reason."""
    return NOT_COMPARED | dict.fromkeys(names, f"`{command}` does not use these examples")


def save(la: Any, output: Path) -> None:
    """Save a posterior, and create its folder if necessary."""
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output, own_likelihood=la.likelihood.name is None)


def print_notes(loaded: Any) -> None:
    """Print the notes about a network and its data, one per line."""
    for note in loaded.notes:
        print(note)
