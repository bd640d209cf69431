"""Shared by the commands `report` and `evaluate`: what makes a run, and what they print."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from laplace_debias.assessment import RunFolder
from laplace_debias.assessment.table import rows_to_print
from laplace_debias.commands.network import plain
from laplace_debias.report.run_folder import read_json, read_meta
from laplace_debias.report.tables import print_table
from laplace_debias.sources import SourceSettings
from laplace_debias.system.console import Printer

_PLACES = {
    *("output", "from_run", "overwrite", "title", "json", "progress"),
    *("device", "workers", "checkpoint"),
}
"""Settings that do not change what is found. Of a checkpoint the content counts, not the path."""


def identity_of(settings: SourceSettings) -> dict[str, Any]:
    """Settings that change what is found, without the ones that methods have themselves."""
    return {
        name: value
        for name, value in plain(dataclasses.asdict(settings)).items()
        if name not in _PLACES
    }


def config_of(settings: SourceSettings) -> str:
    """The text of a file that `--config` takes; the folder is given beside it."""
    import yaml

    left_out = {"output", "from_run", "overwrite", "json"}
    values = {
        name: value
        for name, value in plain(dataclasses.asdict(settings)).items()
        if name not in left_out
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def found_in(folder: RunFolder) -> dict[str, Any]:
    """The results of a run, as `--json` prints them."""
    run = read_meta(folder.path)
    told = {name: run[name] for name in ("task", "sets", "methods", "conclusion", "notes")}
    return {**told, **read_json(folder.path / "metrics.json")}


def tell(folder: RunFolder, console: Printer) -> None:
    """Print the table of a run and what it shows."""
    run, found = read_meta(folder.path), read_json(folder.path / "metrics.json")
    test = next(part for part in run["sets"] if part["role"] == "test")
    rows = rows_to_print(run, found)
    title = f"{test['num_examples']:,} test {run['input_name']}s, 95 % intervals"
    if _width(rows) > shutil.get_terminal_size().columns:
        rows = rows_to_print(run, found, with_intervals=False)
        title += " on the page or in a wider terminal"
    print_table(rows, title)
    for sentence in [*run["conclusion"], *run["notes"]]:
        console.print(sentence)


def _width(rows: Sequence[Mapping[str, str]]) -> int:
    """Columns of a terminal that a table of one line a row takes."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for name, text in row.items():
            texts.setdefault(name, name.split("\n")).append(text)
    return 2 + sum(2 + max(map(len, column)) for column in texts.values())
