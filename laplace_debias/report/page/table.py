"""The tables of the page: metrics by method, and differences between methods."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from laplace_debias.metrics.descriptions import Description
from laplace_debias.report.page.charts.ood import main_score
from laplace_debias.report.page.names import (
    MOST_DECIMALS,
    SCORES,
    decimals,
    known_first,
    metric_name,
    number,
)
from laplace_debias.report.page.run_folder import Method, Run

_MAIN = (
    *("accuracy", "nll", "brier", "smooth_ece", "ece", "aurc"),
    *("rmse", "crps", "coverage", "quantile_calibration_error"),
)
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclass(frozen=True)
class Column:
    """A metric on a set.

    Attributes:
        name: What is known of the metric.
        arrow: To where it is better, may be empty.
        where: The set if it is not the test set, and the score of an out-of-distribution metric.
    """

    name: Description
    arrow: str
    where: str


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Attributes:
        value: The figure as text, a dash where there is none.
        interval: `low … high`, empty where it is not known.
        is_best: Whether no other method that was judged on as many examples has a better one.
        verdict: Of a difference beyond chance `better` or `worse` (`higher` or `lower` where
            neither is better), `not told apart` of others, empty where nothing is compared.
    """

    value: str
    interval: str = ""
    is_best: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class Table:
    """Rows are methods.

    Attributes:
        columns: What is measured.
        rows: Methods with their cells.
        reference: Label of the method that verdicts compare with.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Method, tuple[Cell, ...]], ...]
    reference: str


def main_table(run: Run) -> Table:
    """The most telling metrics of the test set, and AUROC of each out-of-distribution set."""
    return _table(run, _main_columns(run))


def full_tables(run: Run, data: str) -> list[Table]:
    """Every metric of a set; of an out-of-distribution set a table for each score."""
    rows = run.rows[run.rows["set"] == data]
    scores: list[str | None] = [name for name in SCORES if (rows["score"] == name).any()]
    metrics = known_first(rows["metric"])
    tables = [
        _table(run, [(data, metric) for metric in metrics], score=score)
        for score in scores or [None]
    ]
    return [table for table in tables if table.columns]


def difference_tables(run: Run) -> list[Table]:
    """What the methods do better or worse than each reference, on the same examples."""
    used = set(run.differences["reference"])
    references = [method.key for method in run.methods if method.key in used]
    tables = [_table(run, _main_columns(run), reference) for reference in references]
    return [table for table in tables if table.columns]


def _main_columns(run: Run) -> list[tuple[str, str]]:
    """Pairs of a set and a metric."""
    names = known_first(run.rows[run.rows["set"] == run.test]["metric"])
    chosen = [name for name in names if name in _MAIN] or names
    if "smooth_ece" in chosen:  # the other one tells the same, less exactly
        chosen = [name for name in chosen if name != "ece"]
    return [(run.test, name) for name in chosen] + [(data.name, "auroc") for data in run.ood]


def _table(
    run: Run,
    chosen: Sequence[tuple[str, str]],
    reference: str | None = None,
    score: str | None = None,
) -> Table:
    """Metrics of every method, or what they differ by from a reference."""
    against = run.methods[0].key if reference is None else reference
    methods = [method for method in run.methods if method.key != reference]
    columns, cells = [], []
    for data, metric in chosen:
        differences = run.differences[run.differences["reference"] == against]
        differences = _of(differences, data, metric, score)
        rows = _of(run.rows, data, metric, score) if reference is None else differences
        rows = rows[rows.index.isin([method.key for method in methods])]
        if rows.empty:
            continue
        columns.append(_column(run, data, metric, rows))
        cells.append(_cells(rows, differences, methods, metric_name(metric), reference is not None))
    label = next((m.label for m in run.methods if m.key == against), against)
    by_method = tuple(zip(methods, zip(*cells, strict=True), strict=True)) if cells else ()
    return Table(tuple(columns), by_method, label)


def _of(rows: pd.DataFrame, data: str, metric: str, score: str | None) -> pd.DataFrame:
    """The rows of a metric on a set by method, by default of the score that is shown first."""
    found = rows[(rows["set"] == data) & (rows["metric"] == metric) & rows["value"].notna()]
    score = score or main_score(found)
    if score is not None:
        found = found[found["score"] == score]
    return found.drop_duplicates("method").set_index("method")


def _column(run: Run, data: str, metric: str, rows: pd.DataFrame) -> Column:
    name = metric_name(metric)
    score = rows["score"].iloc[0]
    where = [] if data == run.test else [data]
    where += [SCORES.get(score, score)] if isinstance(score, str) else []
    return Column(name, _ARROWS.get(name.better or "", ""), ", ".join(where))


def _cells(
    rows: pd.DataFrame,
    differences: pd.DataFrame,
    methods: Sequence[Method],
    name: Description,
    is_difference: bool,
) -> list[Cell]:
    shown = rows[["value", "low", "high"]]
    places = int(
        pd.Series(
            [decimals(row.low, row.high, row.value) for row in shown.itertuples(index=False)]
        ).median()
    )
    if is_difference:  # its sign is what is looked for: no end of an interval becomes 0.000
        smallest = shown[["low", "high"]].abs().replace(0, math.nan).min(axis=None)
        while places < MOST_DECIMALS and smallest < 0.5 * 10.0**-places:
            places += 1
    best = _best(rows, name)
    cells = []
    for method in methods:
        if method.key not in shown.index:
            cells.append(Cell("–"))
            continue
        value, low, high = shown.loc[method.key]
        text = number(value, places)
        cells.append(
            Cell(
                f"+{text}" if is_difference and value > 0 and text.strip("0.") else text,
                f"{number(low, places)} … {number(high, places)}" if high >= low else "",
                is_best=not is_difference and method.key in best,
                verdict=_verdict(differences, method.key, name),
            )
        )
    return cells


def _best(rows: pd.DataFrame, name: Description) -> set[str]:
    """The methods with the best value, of those that were judged on the most examples."""
    counts = rows["num_examples"].fillna(0)
    values = rows["value"][counts == counts.max()]
    if name.better not in ("higher", "lower") or values.nunique() < 2:
        return set()
    best = values.max() if name.better == "higher" else values.min()
    return set(values.index[values == best])


def _verdict(differences: pd.DataFrame, method: str, name: Description) -> str:
    if method not in differences.index:
        return ""
    low, high = differences.loc[method, ["low", "high"]]
    if not high >= low:  # the interval is not known
        return ""
    if low <= 0 <= high:
        return "not told apart"
    way = "higher" if low > 0 else "lower"
    if name.better not in ("higher", "lower"):
        return way
    return "better" if way == name.better else "worse"
