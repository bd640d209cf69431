"""Functions shared by `report` and `evaluate`: the identity of a run and its printed output."""

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace_debias.report.tables import print_table
from laplace_debias.runs.folder import RunFolder
from laplace_debias.runs.records import Measurements, MetricRow, RunRecord, to_json
from laplace_debias.runs.wording import brief
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.shown import counted, plain

_WITHOUT_INFLUENCE = {
    "output",
    "from_run",
    "overwrite",
    "title",
    "json",
    "progress",
    "device",
    "workers",
    "checkpoint",
    "more_checkpoints",
}
"""Settings that do not change the results, or are identified in another way: a checkpoint by its
content instead of its path."""

_METRICS = {
    "class": ("accuracy", "nll", "brier", "smooth_ece"),
    "labels": ("accuracy", "nll", "brier", "ece"),
    "numbers": ("nll", "rmse", "mae", "crps", "coverage"),
}
_SCORES = ("entropy", "variance")


def identity_of(settings: SourceSettings) -> dict[str, Any]:
    """Return the settings that change the results of every method."""
    values = plain(dataclasses.asdict(settings))
    return {name: value for name, value in values.items() if name not in _WITHOUT_INFLUENCE}


def results_of(path: Path) -> dict[str, Any]:
    """Return the results of a run as the JSON object that `--json` prints."""
    folder = RunFolder(path)
    record = to_json(folder.read_record())
    names = ("task", "sets", "methods", "conclusion", "notes")
    return {name: record[name] for name in names} | to_json(folder.read_measurements())


def print_results(path: Path, has_page: bool = True) -> None:
    """Print the table of a run and its conclusion.

    Intervals are left out if the terminal is too narrow for them. Files and pipes always contain
    them.
    """
    folder = RunFolder(path)
    record = folder.read_record()
    measurements = folder.read_measurements()
    rows = _rows(record, measurements)
    assert record.test.num_examples is not None  # The run is complete.
    title = f"{counted(record.test.num_examples, f'test {record.input_name}')}, 95 % intervals"
    if sys.stdout.isatty() and _table_width(rows) > shutil.get_terminal_size().columns:
        rows = _rows(record, measurements, with_intervals=False)
        title += " on the page or in a wider terminal" if has_page else " in a wider terminal"
    print_table(rows, title)
    for sentence in [*record.conclusion, *record.notes]:
        print(sentence)


def _table_width(rows: Sequence[Mapping[str, str]]) -> int:
    """Compute the width of the printed table in characters. Headings may span several lines."""
    columns: dict[str, list[str]] = {}
    for row in rows:
        for name, text in row.items():
            if name not in columns:
                columns[name] = name.split("\n")
            columns[name].append(text)
    return 2 + sum(2 + max(map(len, texts)) for texts in columns.values())


def _rows(
    record: RunRecord, measurements: Measurements, with_intervals: bool = True
) -> list[dict[str, str]]:
    """Return each method's metrics on the test set and for the detection of OOD sets as a row.

    The OOD score is the entropy; for a regression, it is the variance.
    """
    by_key = {(row.method, row.set_name, row.metric, row.score): row for row in measurements.rows}
    table = []
    for method in record.methods:
        line = {"method": method.label}
        for metric in _METRICS[record.target_kind]:
            row = by_key.get((method.key, "test", metric, None))
            if row is not None:
                line[metric] = _cell(row, with_intervals)
        for dataset in record.sets:
            for score in _SCORES:
                row = by_key.get((method.key, dataset.name, "auroc", score))
                if row and (score == "entropy" or record.has_numbers):
                    line[f"AUROC\n{dataset.name}"] = _cell(row, with_intervals)
        line["examples"] = f"{by_key[method.key, 'test', 'nll', None].num_examples:,}"
        table.append(line)
    return table


def _cell(row: MetricRow, with_interval: bool) -> str:
    if not with_interval or row.low is None or row.high is None:
        return brief(row.value)
    return f"{brief(row.value)} ({brief(row.low)}–{brief(row.high)})"
