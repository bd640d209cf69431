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
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COLUMNS = ["method", "set", "metric", "value", "low", "high", "score", "reference"]
_AGAIN = "run `laplace-debias report` again with the same settings, which goes on where it stopped"


@dataclass(frozen=True, eq=False)
class Run:
    """A complete run folder: `run.json`, with its methods and sets, and parts of `metrics.json`."""

    folder: Path
    meta: Mapping[str, Any]
    test: Mapping[str, Any]
    rows: pd.DataFrame
    differences: pd.DataFrame

    @property
    def methods(self) -> list[dict[str, Any]]:
        """The methods as `run.json` has them, the network first."""
        return self.meta["methods"]

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers."""
        return self.meta["task"] in ("regression", "heteroscedastic")

    def sets(self, role: str) -> list[dict[str, Any]]:
        """The sets of a role as `run.json` has them, by severity."""
        sets = [data for data in self.meta["sets"] if data["role"] == role]
        return sorted(sets, key=lambda data: data.get("severity", 0))

    def column(self, method: str, data: str, name: str) -> np.ndarray | None:
        """One column of predictions, `[n]` or `[n, width]`; None if missing, null or not finite."""
        path = predictions_path(self.folder, method, data)
        values = read_table(path, name).get(name) if path.is_file() else None
        if values is None or not len(values) or not np.isfinite(values.astype(float)).all():
            return None
        return values.astype(float)

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
        tests = [data for data in meta["sets"] if data["role"] == "test"]
        if not meta["methods"] or not tests:
            raise ValueError("it has no methods, or no set with the role test")
        # They name files and parts of pictures.
        for name in [
            *(m["key"] for m in meta["methods"]),
            *(data["name"] for data in meta["sets"]),
        ]:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name!r} has more than letters, digits, '.', '_' and '-'"
                )
    metrics, tables = read_json(measured), []
    with _telling_of(measured):
        for name in ("rows", "differences"):
            table = pd.DataFrame(metrics[name], columns=_COLUMNS)
            numbers = {end: pd.to_numeric(table[end]) for end in ("value", "low", "high")}
            tables.append(table.assign(**numbers))
    return Run(folder, meta, tests[0], *tables)


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


@contextmanager
def _telling_of(path: Path) -> Iterator[None]:
    """Says which file is damaged, and what to do, where reading it fails."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"{reason} is missing" if isinstance(error, KeyError) else reason
        raise ValueError(f"{path} is damaged ({reason}): delete it and {_AGAIN}.") from error
