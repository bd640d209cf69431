"""Shared by the commands `report` and `evaluate`: what makes a run, and what they print."""

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laplace_debias.report.names import brief
from laplace_debias.report.run_folder import read_json, read_meta
from laplace_debias.report.tables import print_table
from laplace_debias.sources import SourceSettings
from laplace_debias.sources.task import REGRESSIONS
from laplace_debias.system.shown import plain

_PLACES = {
    *("output", "from_run", "overwrite", "title", "json", "progress"),
    *("device", "workers", "checkpoint", "more_checkpoints"),
}
"""Settings that do not change what is found. Of a checkpoint the content counts, not the path."""

_METRICS = {
    "classification": ("accuracy", "nll", "brier", "smooth_ece"),
    "binary": ("accuracy", "nll", "brier", "smooth_ece"),
    "multilabel": ("accuracy", "nll", "brier", "ece"),
    "regression": ("nll", "rmse", "crps", "coverage"),
    "heteroscedastic": ("nll", "rmse", "crps", "coverage"),
}
_SCORES = ("entropy", "variance")


def identity_of(settings: SourceSettings) -> dict[str, Any]:
    """Settings that change what is found, without the ones that methods have themselves."""
    return {n: v for n, v in plain(dataclasses.asdict(settings)).items() if n not in _PLACES}


def found_in(folder: Path) -> dict[str, Any]:
    """The results of a run, as `--json` prints them."""
    run = read_meta(folder)
    told = ("task", "sets", "methods", "conclusion", "notes")
    return {name: run[name] for name in told} | read_json(folder / "metrics.json")


def tell(folder: Path, has_page: bool = True) -> None:
    """Print the table of a run and its conclusion.

    Intervals are left out where a terminal is too narrow for them; files and pipes have them.
    """
    run, found = read_meta(folder), read_json(folder / "metrics.json")
    test = next(part for part in run["sets"] if part["role"] == "test")
    rows = _rows(run, found)
    title = f"{test['num_examples']:,} test {run['input_name']}s, 95 % intervals"
    texts: dict[str, list[str]] = {}
    for row in rows:
        for name, text in row.items():
            texts.setdefault(name, name.split("\n")).append(text)
    width = 2 + sum(2 + max(map(len, column)) for column in texts.values())
    if sys.stdout.isatty() and width > shutil.get_terminal_size().columns:
        rows = _rows(run, found, with_intervals=False)
        title += " on the page or in a wider terminal" if has_page else " in a wider terminal"
    print_table(rows, title)
    for sentence in [*run["conclusion"], *run["notes"]]:
        print(sentence)


def _rows(
    run: Mapping[str, Any], found: Mapping[str, Any], with_intervals: bool = True
) -> list[dict[str, str]]:
    """A row for each method: metrics on the test set, and how well OOD sets are told from it.

    OOD sets are told apart by the entropy, of a regression by the variance.
    """
    table = []
    of = {
        (row["method"], row["set"], row["metric"], row.get("score")): row for row in found["rows"]
    }
    for method in run["methods"]:
        line = {"method": method["label"]}
        for metric in _METRICS[run["task"]]:
            if row := of.get((method["key"], "test", metric, None)):
                line[metric] = _cell(row, with_intervals)
        for part in run["sets"]:
            for score in _SCORES:
                row = of.get((method["key"], part["name"], "auroc", score))
                if row and (score == "entropy" or run["task"] in REGRESSIONS):
                    line[f"AUROC\n{part['name']}"] = _cell(row, with_intervals)
        line["examples"] = f"{of[method['key'], 'test', 'nll', None]['num_examples']:,}"
        table.append(line)
    return table


def _cell(row: Mapping[str, Any], with_interval: bool) -> str:
    if not with_interval or row["low"] is None or row["high"] is None:
        return brief(row["value"])
    return f"{brief(row['value'])} ({brief(row['low'])}–{brief(row['high'])})"
