"""Markdown tables of the results, with means over seeds or differences paired by seed."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Row = dict[str, Any]
"""A line of a file of results: a `problem`, a `seed`, and `methods`, with their measures."""

REFERENCE = "temperature"
POSTERIORS_AND_ENSEMBLES = ("last layer", "all", "ensemble, tempered", "mixture")
IDENTITY = "all, identity"
WITHOUT_POSTERIOR = ("network", "vector", "platt", "isotonic", "ensemble")


@dataclass(frozen=True)
class Measure:
    """A measure of a method; `score` is the score of uncertainty that an AUROC belongs to."""

    method: str
    name: str
    score: str | None = None

    def value(self, row: Row) -> float:
        """Return the value in a row, or NaN if the row does not have it."""
        measures = row["methods"].get(self.method, {})
        if self.score is None:
            return measures.get(self.name, np.nan)
        return measures.get(self.name, {}).get(self.score, np.nan)


@dataclass(frozen=True)
class Column:
    """A column of a table: a measure, or its difference from a reference."""

    heading: str
    measure: Measure
    reference: Measure | None = None

    def values(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the value of each row that has one."""
        values = np.array([self.measure.value(row) for row in rows])
        if self.reference is not None:
            values = values - np.array([self.reference.value(row) for row in rows])
        return values[~np.isnan(values)]


def read(file: Path) -> list[Row]:
    """Read the complete lines of a file; none if the file does not exist."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def half_width(values: np.ndarray) -> float:
    """Compute the half width of the 95 % t interval of the mean; infinite for a single value."""
    n = len(values)
    if n == 1:
        return np.inf
    return stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5


def significant_sign(differences: np.ndarray) -> int:
    """Return the sign of the mean difference if its 95 % interval excludes 0, otherwise 0."""
    if len(differences) == 0 or abs(differences.mean()) <= half_width(differences):
        return 0
    return int(np.sign(differences.mean()))


def cell(rows: Sequence[Row], column: Column) -> str:
    """Write the mean over seeds, or the mean difference with the half width of its interval.

    A mean difference is bold if its interval excludes 0. If no row has a value, the text is a dash.
    """
    values = column.values(rows)
    if len(values) == 0:
        return "–"
    if column.reference is None:
        text = f"{values.mean():.3f}"
    else:
        text = f"{values.mean():+.3f}"
        if len(values) > 1:
            text += f"±{half_width(values):.3f}"
        if significant_sign(values) != 0:
            text = f"**{text}**"
    return text.replace("-", "−")


def table(
    title: str, rows: Sequence[Row], columns: Sequence[Column], larger_is_better: bool = False
) -> str:
    """Make a table with a line per problem; the last line counts better and worse problems."""
    if not rows:
        return ""
    rows_by_problem = defaultdict(list)
    for row in rows:
        rows_by_problem[row["problem"]].append(row)
    headings = " | ".join(column.heading for column in columns)
    lines = [f"### {title}", "", f"| problem | {headings} |", "|---" * (len(columns) + 1) + "|"]
    for problem, problem_rows in rows_by_problem.items():
        cells = " | ".join(cell(problem_rows, column) for column in columns)
        lines.append(f"| {problem} | {cells} |")
    if any(column.reference is not None for column in columns):
        counts = " | ".join(
            count_better_and_worse(column, list(rows_by_problem.values()), larger_is_better)
            for column in columns
        )
        lines.append(f"| better, worse | {counts} |")
    return "\n".join([*lines, ""])


def count_better_and_worse(
    column: Column, problems: Sequence[Sequence[Row]], larger_is_better: bool
) -> str:
    """Count the problems with significantly better and worse values than the reference."""
    if column.reference is None:
        return ""
    signs = [significant_sign(column.values(rows)) for rows in problems]
    if larger_is_better:
        return f"{signs.count(1)}, {signs.count(-1)}"
    return f"{signs.count(-1)}, {signs.count(1)}"


def all_tables(rows: Sequence[Row]) -> str:
    """Return all tables; scores for classes are only tabulated for classification."""
    classification = [row for row in rows if "accuracy" in row["methods"]["network"]]
    regression = [row for row in rows if "accuracy" not in row["methods"]["network"]]
    tables = [
        table_against_temperature("NLL, minus that of temperature scaling", rows, "nll"),
        table_against_temperature("NLL of shifted inputs, likewise", rows, "nll shifted"),
        table_against_temperature("Brier score (numbers: CRPS), likewise", rows, "brier"),
        table_against_temperature(
            "Smooth ECE (numbers: error of quantiles), likewise", rows, "calibration"
        ),
        *auroc_tables(classification),
        table_of_variance(regression),
        table_without_posteriors(rows),
        table_of_variants(rows),
        table_of_seconds(rows),
    ]
    return "\n".join(text for text in tables if text)


def table_against_temperature(title: str, rows: Sequence[Row], name: str) -> str:
    """Return the table of a measure of posteriors and ensembles."""
    reference = Measure(REFERENCE, name)
    columns = [
        Column(REFERENCE, reference),
        *(Column(method, Measure(method, name), reference) for method in POSTERIORS_AND_ENSEMBLES),
        Column("identity minus K-FAC", Measure(IDENTITY, name), Measure("all", name)),
    ]
    return table(title, rows, columns)


def auroc_tables(rows: Sequence[Row]) -> list[str]:
    """Return the tables of the AUROC of foreign inputs, by scores of a classification."""
    reference = Measure(REFERENCE, "auroc", "entropy")

    def column(heading: str, method: str, score: str) -> Column:
        return Column(heading, Measure(method, "auroc", score), reference)

    overview = [
        Column(REFERENCE, reference),
        column("entropy", "all", "entropy"),
        column("mutual information", "all", "mutual_information"),
        column("entropy of the mixture", "mixture", "entropy"),
        Column(
            "identity minus K-FAC",
            Measure(IDENTITY, "auroc", "mutual_information"),
            Measure("all", "auroc", "mutual_information"),
        ),
    ]
    title = "AUROC of foreign inputs by a score, minus that of temperature scaling's entropy"
    tables = [table(title, rows, overview, larger_is_better=True)]
    scores = dict.fromkeys(score for row in rows for score in row["methods"]["all"]["auroc"])
    for method in ("last layer", "all", IDENTITY, "mixture"):
        columns = [column(score, method, score) for score in scores]
        title = f"The same by every score of {method}"
        tables.append(table(title, rows, columns, larger_is_better=True))
    return tables


def table_of_variance(rows: Sequence[Row]) -> str:
    """Return the table of the AUROC of foreign inputs by the variance of a regression."""
    methods = ("last layer", "all", IDENTITY, "ensemble, tempered", "mixture")
    columns = [Column(method, Measure(method, "auroc", "variance")) for method in methods]
    return table("AUROC of foreign inputs by the variance", rows, columns)


def table_without_posteriors(rows: Sequence[Row]) -> str:
    """Return the table of networks and their recalibrations."""
    reference = Measure(REFERENCE, "nll")
    columns = [
        Column(REFERENCE, reference),
        *(Column(method, Measure(method, "nll"), reference) for method in WITHOUT_POSTERIOR),
    ]
    return table("NLL without a posterior, minus that of temperature scaling", rows, columns)


def table_of_variants(rows: Sequence[Row]) -> str:
    """Return the table of posteriors with another curvature, link or way of tuning."""
    columns = [
        Column(
            f"{method}, {variant}",
            Measure(f"{method}, {variant}", "nll"),
            reference=Measure(method, "nll"),
        )
        for variant in ("identity", "T = 1", "evidence")
        for method in ("last layer", "all")
    ]
    return table("NLL with one part replaced, minus that of the posterior", rows, columns)


def table_of_seconds(rows: Sequence[Row]) -> str:
    """Return the table of times."""
    methods = (REFERENCE, "last layer", "all", "mixture")
    columns = [Column(method, Measure(method, "seconds")) for method in methods]
    return table("Seconds after the training", rows, columns)
