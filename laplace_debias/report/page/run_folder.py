"""A run folder as the page sees it: methods, sets, metrics, predictions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

AGAIN = "run `laplace-debias report` again with the same settings, which goes on where it stopped"
"""What to do where a file is missing or damaged."""


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
        rows: `rows` of `metrics.json`: `method`, `set`, `metric`, `value`, `low`, `high`, `score`,
            `num_examples`.
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
            raise damaged(path, error) from error

    def num_predicted(self, method: str, data: str) -> int | None:
        """How many examples of a set a method has predicted, None where it has no file."""
        path = self.folder / "predictions" / method / f"{data}.parquet"
        try:
            return pq.read_metadata(path).num_rows if path.is_file() else None
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, error) from error

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
        return read_json(self.folder / name) if (self.folder / name).is_file() else None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """The error that tells of a file that cannot be read, and why."""
    told = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"{path} is damaged ({told}): delete it and {AGAIN}.")
