"""Reads a run folder and checks it before anything is drawn."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from laplace_debias.report.page.run_folder import AGAIN, DataSet, Method, Run, read_json

_FORMAT = 1
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NEEDED = ("format", "status", "title", "task", "methods", "sets")


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the run folder that a page is drawn from.

    Args:
        folder: A folder as `docs/run-folder.md` describes it.

    Raises:
        FileNotFoundError: If it is missing, is no run folder, or lacks its metrics.
        ValueError: If the run is not complete, or a file is damaged or of another format.
    """
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        told = "is no run folder, it has no run.json" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {told}: give a folder that `laplace-debias report --output` wrote."
        )
    meta = read_json(folder / "run.json")
    _check_meta(meta, folder)
    if not (folder / "metrics.json").is_file():
        raise FileNotFoundError(f"{folder} has no metrics.json: {AGAIN}.")
    metrics = read_json(folder / "metrics.json")
    methods = tuple(_method(entry, folder) for entry in meta["methods"])
    sets = tuple(_data_set(entry, folder) for entry in meta["sets"])
    columns = ["method", "set", "metric", "value", "low", "high", "score", "num_examples"]
    where = folder / "metrics.json"
    return Run(
        folder,
        meta,
        methods,
        sets,
        _table(metrics, "rows", columns, where),
        _table(metrics, "differences", [*columns, "reference"], where),
    )


def _check_meta(meta: Any, folder: Path) -> None:
    path = folder / "run.json"
    if not isinstance(meta, dict):
        raise ValueError(f"{path} is no run's description: {AGAIN}.")
    missing = [key for key in _NEEDED if key not in meta]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: {AGAIN}.")
    if meta["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {meta['format']!r}, and this version reads format {_FORMAT}: "
            "draw the page with the version that wrote the run."
        )
    if meta["status"] != "complete":
        raise ValueError(f"The run in {folder} is not complete ({meta['status']}): {AGAIN}.")
    for name in ("methods", "sets"):
        if not isinstance(meta[name], list) or not meta[name]:
            raise ValueError(f"{path} has no {name}: {AGAIN}.")
    if not any(isinstance(data, dict) and data.get("role") == "test" for data in meta["sets"]):
        raise ValueError(f"{path} has no set with the role test: {AGAIN}.")


def _method(entry: Mapping[str, Any], folder: Path) -> Method:
    seconds = entry.get("seconds")
    if not isinstance(seconds, Mapping):
        seconds = {} if seconds is None else {"total": seconds}
    precision = entry.get("prior_precision")
    return Method(
        key=_checked_key(entry, "key", folder),
        label=str(entry.get("label") or entry["key"]),
        describes=str(entry.get("describes") or ""),
        seconds={str(stage): float(value) for stage, value in seconds.items()},
        num_bytes=entry.get("bytes"),
        prior_precision=float(precision) if isinstance(precision, int | float) else None,
        temperature=entry.get("temperature"),
    )


def _data_set(entry: Mapping[str, Any], folder: Path) -> DataSet:
    name = _checked_key(entry, "name", folder)
    role = entry.get("role")
    if role not in ("test", "shift", "ood"):
        raise ValueError(
            f"{folder / 'run.json'} gives the set {name!r} the role {role!r}; expected test, shift "
            f"or ood: {AGAIN}."
        )
    return DataSet(name, role, entry.get("severity"), entry.get("kind"), entry.get("num_examples"))


def _checked_key(entry: Any, field: str, folder: Path) -> str:
    """A name that names files and parts of pictures."""
    key = entry.get(field) if isinstance(entry, Mapping) else None
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(
            f"{folder / 'run.json'} has the {field} {key!r}; expected letters, digits, '.', '_' "
            f"and '-', since it names files: {AGAIN}."
        )
    return key


def _table(metrics: Any, name: str, columns: list[str], path: Path) -> pd.DataFrame:
    rows = metrics.get(name) if isinstance(metrics, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no list {name!r}: delete it and {AGAIN}.")
    needed = set(columns) - {"score", "num_examples"}
    for row in rows:
        if needed - set(row):
            missing = ", ".join(sorted(needed - set(row)))
            raise ValueError(f"{path} has an entry in {name!r} without {missing}: {AGAIN}.")
    frame = pd.DataFrame(rows, columns=columns)
    numbers = ["value", "low", "high", "num_examples"]
    return frame.assign(**{column: pd.to_numeric(frame[column]) for column in numbers})
