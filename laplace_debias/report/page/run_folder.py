"""What a page needs from a run folder, read and checked."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

_FORMAT = 1
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NEEDED = ("format", "status", "title", "task", "methods", "sets")
_AGAIN = "run `laplace-debias report` again with the same settings, which goes on where it stopped"


@dataclass(frozen=True)
class Method:
    """One of the compared methods, as `run.json` tells it.

    Attributes:
        key: Names its files.
        label: Its name for people.
        describes: A sentence on it, may be empty.
        seconds: By stage; the stage of a single number is `total`.
        num_bytes: Memory of what it keeps, None where it is not known.
        prior_precision: The tuned one, None if there is none, or one a block.
        temperature: Of the predictive, None if there is none.
    """

    key: str
    label: str
    describes: str
    seconds: Mapping[str, float]
    num_bytes: float | None
    prior_precision: float | None
    temperature: float | None


@dataclass(frozen=True)
class DataSet:
    """A set of examples on which the methods were compared.

    Attributes:
        name: Names its files.
        role: `test`, `shift` or `ood`.
        severity: Of a shift, 1 … 5.
        kind: Of an out-of-distribution set, `near` or `far`.
        num_examples: How many it has, None where that is not told.
    """

    name: str
    role: str
    severity: int | None
    kind: str | None
    num_examples: int | None


@dataclass(frozen=True, eq=False)
class Run:
    """A complete run folder.

    Attributes:
        folder: Where it is.
        meta: `run.json`.
        methods: The methods in the order in which they are shown.
        sets: The sets of examples.
        rows: `rows` of `metrics.json`: `method`, `set`, `metric`, `value`, `low`, `high`, `score`.
        differences: Its `differences`: the same with `reference`.
    """

    folder: Path
    meta: Mapping[str, Any]
    methods: tuple[Method, ...]
    sets: tuple[DataSet, ...]
    rows: pd.DataFrame
    differences: pd.DataFrame

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers."""
        return self.meta["task"] in ("regression", "heteroscedastic")

    @property
    def shifts(self) -> list[DataSet]:
        """The shifted test sets by severity."""
        shifts = [data for data in self.sets if data.role == "shift"]
        return sorted(shifts, key=lambda data: data.severity or 0)

    @property
    def ood(self) -> list[DataSet]:
        """The out-of-distribution sets, near ones first."""
        return sorted(
            (data for data in self.sets if data.role == "ood"), key=lambda data: data.kind != "near"
        )

    @property
    def test(self) -> str:
        """The name of the test set."""
        return next(data.name for data in self.sets if data.role == "test")

    def column(self, method: str, data: str, name: str) -> np.ndarray | None:
        """One column of the predictions of a method on a set.

        Args:
            method: Key of the method.
            data: Name of the set.
            name: Of the column.

        Returns:
            Numbers `[n]`, or `[n, width]` where each entry is a list; None where the method has no
            predictions on that set, the column is missing, or an entry is null or not finite.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.folder / "predictions" / method / f"{data}.parquet"
        if not path.is_file():
            return None
        try:
            if name not in pq.read_schema(path).names:
                return None
            column = pq.read_table(path, columns=[name])[name]
            if not len(column) or column.null_count:
                return None
            if pa.types.is_nested(column.type):
                values = np.stack(column.to_numpy()).astype(float)
            else:
                values = column.to_numpy().astype(float)
            return values if np.isfinite(values).all() else None
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise _damaged(path, error) from error

    def num_predicted(self, method: str, data: str) -> int | None:
        """How many examples of a set a method has predicted, None where it has no file."""
        path = self.folder / "predictions" / method / f"{data}.parquet"
        try:
            return pq.read_metadata(path).num_rows if path.is_file() else None
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from error

    def probabilities(self, method: str, data: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Probabilities `[n, classes]` and labels `[n]`; None where an example has not one label.

        Raises:
            ValueError: If the file is damaged.
        """
        probs, labels = (self.column(method, data, name) for name in ("probs", "label"))
        if self.is_regression or probs is None or labels is None or labels.ndim != 1:
            return None
        if probs.ndim == 1:
            probs = probs[:, None]
        if probs.shape[1] == 1:
            probs = np.concatenate([1 - probs, probs], axis=1)
        return probs, labels.astype(int)

    def json(self, name: str) -> Any:
        """A JSON file of the folder, None where it is missing.

        Raises:
            ValueError: If it is damaged.
        """
        return _read_json(self.folder / name) if (self.folder / name).is_file() else None


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
    meta = _read_json(folder / "run.json")
    _check_meta(meta, folder)
    if not (folder / "metrics.json").is_file():
        raise FileNotFoundError(f"{folder} has no metrics.json: {_AGAIN}.")
    metrics = _read_json(folder / "metrics.json")
    methods = tuple(_method(entry, folder) for entry in meta["methods"])
    sets = tuple(_data_set(entry, folder) for entry in meta["sets"])
    columns = ["method", "set", "metric", "value", "low", "high", "score"]
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
        raise ValueError(f"{path} is no run's description: {_AGAIN}.")
    missing = [key for key in _NEEDED if key not in meta]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: {_AGAIN}.")
    if meta["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {meta['format']!r}, and this version reads format {_FORMAT}: "
            "draw the page with the version that wrote the run."
        )
    if meta["status"] != "complete":
        raise ValueError(f"The run in {folder} is not complete ({meta['status']}): {_AGAIN}.")
    for name in ("methods", "sets"):
        if not isinstance(meta[name], list) or not meta[name]:
            raise ValueError(f"{path} has no {name}: {_AGAIN}.")
    if not any(isinstance(data, dict) and data.get("role") == "test" for data in meta["sets"]):
        raise ValueError(f"{path} has no set with the role test: {_AGAIN}.")


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
            f"or ood: {_AGAIN}."
        )
    return DataSet(name, role, entry.get("severity"), entry.get("kind"), entry.get("num_examples"))


def _checked_key(entry: Any, field: str, folder: Path) -> str:
    """A name that names files and parts of pictures."""
    key = entry.get(field) if isinstance(entry, Mapping) else None
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(
            f"{folder / 'run.json'} has the {field} {key!r}; expected letters, digits, '.', '_' "
            f"and '-', since it names files: {_AGAIN}."
        )
    return key


def _table(metrics: Any, name: str, columns: list[str], path: Path) -> pd.DataFrame:
    rows = metrics.get(name) if isinstance(metrics, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no list {name!r}: delete it and {_AGAIN}.")
    needed = set(columns) - {"score"}
    for row in rows:
        if needed - set(row):
            missing = ", ".join(sorted(needed - set(row)))
            raise ValueError(f"{path} has an entry in {name!r} without {missing}: {_AGAIN}.")
    frame = pd.DataFrame(rows, columns=columns)
    numbers = ["value", "low", "high"]
    return frame.assign(**{column: pd.to_numeric(frame[column]) for column in numbers})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    told = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"{path} is damaged ({told}): delete it and {_AGAIN}.")
