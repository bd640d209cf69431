"""A complete run, in the form that the page needs."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from laplace_debias.runs.folder import RunFolder
from laplace_debias.runs.records import (
    DifferenceRow,
    MethodRecord,
    MetricRow,
    Role,
    RunRecord,
    SetRecord,
)


@dataclass(frozen=True, eq=False)
class Run:
    """A complete run.

    Attributes:
        folder: Its folder.
        record: Network, data and methods.
        rows: The metrics, with one row for each `MetricRow`.
        differences: The differences between methods, with one row for each `DifferenceRow`.
    """

    folder: RunFolder
    record: RunRecord
    rows: pd.DataFrame
    differences: pd.DataFrame

    @property
    def methods(self) -> list[MethodRecord]:
        """The methods, the network first."""
        return self.record.methods

    @property
    def test(self) -> SetRecord:
        """The test set."""
        return self.record.test

    @property
    def has_numbers(self) -> bool:
        """Whether the targets are numbers."""
        return self.record.has_numbers

    def sets(self, role: Role) -> list[SetRecord]:
        """Return the sets with the given role, ordered by severity."""
        return self.record.sets_of(role)

    def column(self, method: str, set_name: str, name: str) -> np.ndarray | None:
        """Return a column of a table of predictions, or None if it is missing or not finite."""
        if not self.folder.predictions(method, set_name).is_file():
            return None
        values = self.folder.read_predictions(method, set_name, name).get(name)
        if values is None or not len(values) or not np.isfinite(values.astype(float)).all():
            return None
        return values.astype(float)

    def probabilities(self, method: str, set_name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return class probabilities and labels, or None if examples have several labels."""
        probs = self.column(method, set_name, "probs")
        labels = self.column(method, set_name, "label")
        if self.has_numbers or probs is None or labels is None or labels.ndim != 1:
            return None
        return probs, labels.astype(int)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a complete run from its folder."""
    folder = RunFolder(path)
    record = folder.read_complete_record()
    measurements = folder.read_measurements()
    return Run(
        folder,
        record,
        _frame(measurements.rows, MetricRow),
        _frame(measurements.differences, DifferenceRow),
    )


def _frame(rows: Sequence[MetricRow], kind: type[MetricRow]) -> pd.DataFrame:
    """Convert rows to a data frame in which values and ends of intervals are floats."""
    columns = [column.name for column in dataclasses.fields(kind)]
    frame = pd.DataFrame([dataclasses.asdict(row) for row in rows], columns=columns)
    numbers = {name: pd.to_numeric(frame[name]) for name in ("value", "low", "high")}
    return frame.assign(**numbers)
