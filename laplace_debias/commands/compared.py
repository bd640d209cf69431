"""What the commands `report` and `evaluate` share: what makes a run, and what they print."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laplace_debias.assessment import RunFolder
from laplace_debias.assessment.run_folder import read_json
from laplace_debias.assessment.table import rows_to_print
from laplace_debias.report.tables import print_table
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.console import Printer

_PLACES = {
    *("output", "from_run", "overwrite", "title", "json", "progress"),
    *("device", "workers", "cache", "download", "checkpoint"),
}
"""Settings that do not change what is found. Of a checkpoint the content counts, not the path."""


class Nothing:
    """Prints nothing: the standard output belongs to one JSON object."""

    def print(self, *objects: object, soft_wrap: bool | None = None) -> None:
        """As `Printer.print`."""


def plain(settings: SourceSettings) -> dict[str, Any]:
    """The settings as YAML and JSON have them."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def identity_of(settings: SourceSettings) -> dict[str, Any]:
    """Those settings that change what is found, without the ones that methods have themselves."""
    return {name: value for name, value in plain(settings).items() if name not in _PLACES}


def config_of(settings: SourceSettings) -> str:
    """The text of a file that `--config` takes; the folder is given beside it."""
    import yaml

    left_out = {"output", "from_run", "overwrite", "json"}
    values = {name: value for name, value in plain(settings).items() if name not in left_out}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def run_in(path: Path) -> RunFolder:
    """A folder with a complete run.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the run was broken off.
    """
    folder = RunFolder(path)
    run = folder.read_run() if path.is_dir() else None
    if run is None:
        raise FileNotFoundError(
            f"{path} holds no run: give the --output of `laplace-debias report`"
        )
    if run["status"] != "complete":
        raise ValueError(
            f"the run in {path} was broken off: give the command that began it again, which goes "
            "on from what is complete"
        )
    return folder


def tell(folder: RunFolder, console: Printer, as_json: bool, also: Mapping[str, Any]) -> None:
    """Print the table and the conclusion, or one JSON object.

    Args:
        folder: The run.
        console: Where to print.
        as_json: Whether the standard output gets a JSON object instead.
        also: More for that object.
    """
    run, found = folder.read_run(), read_json(folder.path / "metrics.json")
    assert run is not None
    if as_json:
        told = {name: run[name] for name in ("task", "sets", "methods", "conclusion", "notes")}
        sys.stdout.write(f"{json.dumps({**also, **told, **found}, ensure_ascii=False)}\n")
        return
    test = next(part for part in run["sets"] if part["role"] == "test")
    title = f"{test['num_examples']:,} test {run['input_name']}s, 95 % intervals"
    print_table(rows_to_print(run, found), title)
    for sentence in [*run["conclusion"], *run["notes"]]:
        console.print(sentence)
