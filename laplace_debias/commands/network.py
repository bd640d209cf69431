"""Functions shared by the commands that work on one posterior: checks, saving and notes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS
from laplace_debias.sources.settings import NOT_COMPARED, SourceSettings

if TYPE_CHECKING:
    from laplace_debias.curvature.losses.likelihoods import Likelihood


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


def likelihood_of(settings: SourceSettings, posteriors: Sequence[Path]) -> "Likelihood | None":
    """Return the likelihood of saved posteriors, whose files are read completely.

    A likelihood of ordered classes has the thresholds of the posteriors. All others have default
    options, because options such as the noise belong to each posterior. The result is None if the
    settings determine the likelihood, because there is no posterior, or because `task` is an import
    path.

    Raises:
        ValueError: If a posterior was fitted with a different task or different thresholds, or with
            a user-defined likelihood, which is not in the file, and there is no `task`. Also raises
            the errors of `Laplace.load` about the file.
    """
    from laplace_debias.curvature.losses.likelihoods import Ordinal
    from laplace_debias.laplace.saving import file

    likelihood = None
    for path in posteriors:
        header, _ = file.read(path)
        task = header.likelihood["name"]
        if task not in LIKELIHOODS:
            if settings.task is None:
                raise ValueError(
                    f"{path} was fitted with the likelihood {header.likelihood['class']}, which is "
                    "not in the file. Pass its import path as --task."
                )
            continue
        if settings.task is not None and settings.task not in LIKELIHOODS:
            # The object at an import path may be of this task with other options. `Loaded` compares
            # its name, once it has been imported.
            continue
        expected = settings.task if likelihood is None else likelihood.name
        if expected not in (None, task):
            raise ValueError(
                f"{path} was fitted with --task={task}, but this command uses "
                f"--task={expected}. Leave out --task, and pass posteriors of one task."
            )
        if task != Ordinal.name:
            likelihood = LIKELIHOODS[task]()
            continue
        ordinal = file.likelihood_from_json(header.likelihood)
        if likelihood is not None and likelihood.options() != ordinal.options():
            raise ValueError(
                f"{path} was fitted with the thresholds {ordinal.options()['thresholds']}, but "
                f"{posteriors[0]} with {likelihood.options()['thresholds']}. Pass posteriors with "
                "the same thresholds."
            )
        likelihood = ordinal
    return likelihood


def save(la: Any, output: Path) -> None:
    """Save a posterior, and create its folder if necessary."""
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output, own_likelihood=la.likelihood.name is None)


def print_notes(loaded: Any) -> None:
    """Print the notes about a network and its data, one per line."""
    for note in loaded.notes:
        print(note)
