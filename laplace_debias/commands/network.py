"""Parts shared by the commands for one posterior: checks, saving, notes."""

from pathlib import Path
from typing import Any

from laplace_debias.sources.settings import NOT_COMPARED


def check_output(path: Path, overwrite: bool) -> None:
    """Require an output that can be written and may be replaced."""
    from laplace_debias.system.files import check_target

    check_target(path, make_folders=True)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} already exists. Choose a different --output, or add --overwrite."
        )


def not_for(command: str, *names: str) -> dict[str, str]:
    """Return the options that have no effect in a command on one posterior, and the reasons."""
    return NOT_COMPARED | dict.fromkeys(names, f"`{command}` does not use these examples")


def save(la: Any, output: Path) -> None:
    """Save a posterior, and create its folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output, own_likelihood=la.likelihood.name is None)


def print_notes(loaded: Any) -> None:
    """Print each note on a network and its data on a separate line."""
    for note in loaded.notes:
        print(note)
