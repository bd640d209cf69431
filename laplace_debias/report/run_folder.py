"""A run folder, read and checked: the one reader of what `assessment` writes."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

FORMAT = 1
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COLUMNS = ["method", "set", "metric", "value", "low", "high", "score", "reference"]
_AGAIN = "run `laplace-debias report` again with the same settings, which goes on where it stopped"


@dataclass(frozen=True)
class Method:
    """One of the compared methods, as `run.json` tells it; None for what it does not have."""

    key: str
    label: str
    describes: str
    is_laplace: bool
    seconds: Mapping[str, float]
    num_bytes: float | None
    prior_precision: float | None
    temperature: float | None
    link: str | None


@dataclass(frozen=True)
class DataSet:
    """Examples whose role is `test`, `shift` (with a severity) or `ood`."""

    name: str
    role: str
    severity: int | None
    num_examples: int | None


@dataclass(frozen=True, eq=False)
class Run:
    """A complete run folder: `run.json` in `meta`, and the parts of `metrics.json`."""

    folder: Path
    meta: Mapping[str, Any]
    methods: tuple[Method, ...]
    sets: tuple[DataSet, ...]
    test: DataSet
    rows: pd.DataFrame
    differences: pd.DataFrame

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers."""
        return self.meta["task"] == "regression"

    @property
    def shifts(self) -> list[DataSet]:
        """The shifted test sets by severity."""
        shifts = [data for data in self.sets if data.role == "shift"]
        return sorted(shifts, key=lambda data: data.severity or 0)

    @property
    def ood(self) -> list[DataSet]:
        """The out-of-distribution sets."""
        return [data for data in self.sets if data.role == "ood"]

    def column(self, method: str, data: str, name: str) -> np.ndarray | None:
        """One column of predictions, `[n]` or `[n, width]`; None if missing, null or not finite."""
        path = predictions_path(self.folder, method, data)
        values = read_table(path, name).get(name) if path.is_file() else None
        if values is None or not len(values):
            return None
        values = values.astype(float)
        return values if np.isfinite(values).all() else None

    def num_predicted(self, method: str, data: str) -> int | None:
        """How many examples of a set a method has predicted, None where it has no file."""
        path = predictions_path(self.folder, method, data)
        with _telling_of(path):
            return pq.read_metadata(path).num_rows if path.is_file() else None

    def probabilities(self, method: str, data: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Probabilities and labels; None where an example has not one label."""
        probs, labels = (self.column(method, data, name) for name in ("probs", "label"))
        if self.is_regression or probs is None or labels is None or labels.ndim != 1:
            return None
        return probs, labels.astype(int)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, empty where it is missing."""
        path = self.folder / name
        return read_json(path) if path.is_file() else {}


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the run folder that a page is drawn from."""
    folder = Path(folder)
    path, measured = folder / "run.json", folder / "metrics.json"
    meta = read_meta(folder)
    if meta.get("status") != "complete":
        raise ValueError(f"The run in {folder} is not complete ({meta.get('status')}): {_AGAIN}.")
    if not measured.is_file():
        raise FileNotFoundError(f"{folder} has no metrics.json: {_AGAIN}.")
    with _telling_of(path):
        methods = tuple(map(_method, meta["methods"]))
        sets = tuple(map(_data_set, meta["sets"]))
        tests = [data for data in sets if data.role == "test"]
        if not methods or not tests:
            raise ValueError("it has no methods, or no set with the role test")
    metrics = read_json(measured)
    with _telling_of(measured):
        tables = [_table(metrics[name]) for name in ("rows", "differences")]
    return Run(folder, meta, methods, sets, tests[0], *tables)


def predictions_path(folder: Path, method: str, data: str) -> Path:
    """The file of one method's predictions for one set."""
    return folder / "predictions" / method / f"{data}.parquet"


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads `run.json` of a run that may be under way."""
    path = folder / "run.json"
    if not path.is_file():
        state = "is no run folder, it has no run.json" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {state}: give a folder that `laplace-debias report --output` wrote."
        )
    meta = read_json(path)
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {meta.get('format')!r}, and this version reads format {FORMAT}: "
            "use the version that wrote the run, or give another folder."
        )
    return meta


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    with _telling_of(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is no JSON object")
    return content


def read_table(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read columns of a Parquet table, all if none is named, `[n]` or `[n, k]`; nulls are NaN."""
    columns = {}
    with _telling_of(path):
        there = pq.read_schema(path).names
        table = pq.read_table(path, columns=[n for n in there if n in names or not names])
        for name in table.column_names:
            column = table[name].combine_chunks()
            is_list = pa.types.is_nested(column.type)
            values = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
            columns[name] = np.array(values).reshape(len(column), -1) if is_list else values
    return columns


def _method(entry: Mapping[str, Any]) -> Method:
    precision = entry.get("prior_precision")
    return Method(
        key=_checked_key(entry["key"]),
        label=str(entry.get("label") or entry["key"]),
        describes=str(entry.get("describes") or ""),
        is_laplace=bool(entry.get("is_laplace")),
        seconds=entry.get("seconds") or {},
        num_bytes=entry.get("bytes"),
        prior_precision=float(precision) if isinstance(precision, int | float) else None,
        temperature=entry.get("temperature"),
        link=entry.get("link"),
    )


def _data_set(entry: Mapping[str, Any]) -> DataSet:
    more = (entry.get(name) for name in ("severity", "num_examples"))
    return DataSet(_checked_key(entry["name"]), entry["role"], *more)


def _checked_key(key: str) -> str:
    """A name that names files and parts of pictures."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"the name {key!r} has more than letters, digits, '.', '_' and '-'")
    return key


def _table(entries: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(entries, columns=_COLUMNS)
    if frame[["method", "set", "metric"]].isna().any(axis=None):
        raise ValueError("an entry lacks its method, set or metric")
    return frame.assign(**{name: pd.to_numeric(frame[name]) for name in ("value", "low", "high")})


@contextmanager
def _telling_of(path: Path) -> Iterator[None]:
    """Says which file is damaged, and what to do, where reading it fails."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"{reason} is missing" if isinstance(error, KeyError) else reason
        raise ValueError(f"{path} is damaged ({reason}): delete it and {_AGAIN}.") from error
