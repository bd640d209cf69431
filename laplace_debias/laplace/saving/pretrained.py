"""A posterior and its model card in a folder or a repository of the Hugging Face Hub."""

import re
from collections.abc import Mapping
from pathlib import Path

from laplace_debias.laplace.saving import file
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.metrics import Report
from laplace_debias.system.checks import check_extra, check_is
from laplace_debias.system.files import check_target, written_atomically
from laplace_debias.system.ranks import process_group

POSTERIOR = "posterior.safetensors"
CARD = "README.md"

_FRONT_MATTER = """\
---
library_name: laplace-debias
tags:
- laplace-approximation
- uncertainty
- calibration
---

"""
_BEGIN = "<!-- laplace-debias: begin -->"
_END = "<!-- laplace-debias: end -->"
_SECTION = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", re.DOTALL)


def check_card(card: bool, evaluation: Report | None) -> None:
    """Require that the evaluation is a report, and that a card is written that can show it."""
    check_is(evaluation, "evaluation", Report, type(None))
    if evaluation is not None and not card:
        raise ValueError("`evaluation=` has no effect with `card=False`. Remove one of them.")


def check_folder(folder: Path) -> None:
    """Create the folder for a posterior if it does not exist; raise an error if it is a file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file. Pass the path of a folder.")
    check_target(folder / POSTERIOR, make_folders=True)


def save_posterior(folder: Path, fitted: FittedPosterior, own_likelihood: bool) -> None:
    """Save a posterior in a folder, which rank 0 creates if it does not exist."""
    if process_group().rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    file.save(folder / POSTERIOR, fitted, own_likelihood)


def write_card(folder: Path, facts: Mapping[str, str], evaluation: Report | None) -> None:
    """Write the section on a posterior into a folder's model card.

    Args:
        folder: The folder.
        facts: Facts about the posterior, keyed by name.
        evaluation: Metrics on held-out data, with their intervals.
    """
    path = folder / CARD
    section = f"{_BEGIN}\n{_section(facts, evaluation)}{_END}\n"
    text = _FRONT_MATTER + section
    if path.exists():
        earlier = path.read_text(encoding="utf-8")
        if _SECTION.search(earlier):
            text = _SECTION.sub(lambda _: section, earlier, count=1)
        else:
            text = f"{earlier.rstrip()}\n\n{section}"
    with written_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _section(facts: Mapping[str, str], evaluation: Report | None) -> str:
    """Describe a posterior in Markdown."""
    lines = [
        "## Posterior",
        "",
        "A Laplace approximation of this network's posterior, made with laplace-debias. It is "
        f"a Gaussian around the trained weights. The file `{POSTERIOR}` contains it, without code "
        "and without the network.",
        "",
        "| | |",
        "|---|---|",
    ]
    for name, fact in facts.items():
        lines.append(f"| {name} | {_cell(fact)} |")
    lines += ["", "### Calibration", ""]
    lines += _calibration_lines(evaluation)
    lines += [
        "",
        "### Use",
        "",
        "```python",
        "from laplace_debias import Laplace",
        "",
        "# `folder` is this folder or repository; `model` is the network that was fitted.",
        "la = Laplace.from_pretrained(folder, model)",
        "predictive = la.predict(inputs)",
        "```",
        "",
    ]
    return "\n".join(lines)


def _calibration_lines(evaluation: Report | None) -> list[str]:
    """Describe an evaluation in lines of Markdown."""
    if evaluation is None:
        return ["It was not evaluated when it was saved."]
    lines = [
        f"Metrics on held-out data, with {100 * evaluation.level:g} % intervals.",
        "",
        "| metric | value | low | high |",
        "|---|---:|---:|---:|",
    ]
    for row in evaluation.rows():
        numbers = [_number(row[key]) for key in ("value", "low", "high")]
        lines.append(f"| {_cell(row['metric'])} | {' | '.join(numbers)} |")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _cell(text: str) -> str:
    """Escape a string for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def posterior_file(folder_or_repository: str, revision: str | None, token: str | None) -> Path:
    """Return the path of a posterior file, after downloading it unless a folder is given.

    Raises:
        FileNotFoundError: If neither a folder nor a repository of this name has a posterior.
        ImportError: If no folder has this name, and huggingface_hub is not installed.
    """
    folder = Path(folder_or_repository)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(
                f"`revision={revision!r}` applies only to a repository, but {folder} is a "
                "folder. Remove `revision=`."
            )
        path = folder / POSTERIOR
        if not path.is_file():
            raise FileNotFoundError(
                f"The folder {folder} has no {POSTERIOR}. Write it with la.save_pretrained(folder)."
            )
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", folder_or_repository):
        raise FileNotFoundError(
            f"There is no folder {folder}, and this is not the name of a repository "
            'either ("user/name"). Check the path, or pass the name of a repository.'
        )
    check_extra("hub", "huggingface_hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(
            hf_hub_download(folder_or_repository, POSTERIOR, revision=revision, token=token)
        )
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no folder {folder}, and no repository with this name that you may read. "
            "Check the name, or pass `token=`."
        ) from error
    except RemoteEntryNotFoundError as error:
        raise FileNotFoundError(
            f"The repository {folder_or_repository} has no {POSTERIOR}. Write it with "
            "la.push_to_hub(repository)."
        ) from error


def push(
    folder: Path,
    repository: str,
    *,
    private: bool | None,
    token: str | None,
    message: str | None,
) -> str:
    """Upload a folder to a repository, which is created if it is missing, and return its URL."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    url = api.create_repo(repository, private=private, exist_ok=True)
    message = message or "Upload the posterior of laplace-debias"
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    return str(url)


def download_card(folder: Path, repository: str, token: str | None) -> None:
    """Download the model card of a repository, if there is one, into a folder."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    if api.file_exists(repository, CARD):
        path = api.hf_hub_download(repository, CARD, token=token)
        text = Path(path).read_text(encoding="utf-8")
        (folder / CARD).write_text(text, encoding="utf-8")
