"""The tables of the page: metrics by method, and differences between methods."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from laplace_debias.metrics import METRICS, Metric
from laplace_debias.report.page.run import Run
from laplace_debias.runs.records import MethodRecord
from laplace_debias.runs.relevance import matters
from laplace_debias.runs.wording import SCORE_LABELS, decimals, in_order, most_decimals, number


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a number, its interval and the verdict, as strings that may be empty."""

    value: str
    interval: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class MetricTable:
    """A table of metrics by method, or of differences from the method labelled `reference`.

    Each of the `columns` is a metric and the set on which it was computed; "" means the test set.
    """

    columns: Sequence[tuple[Metric, str]]
    rows: Sequence[tuple[MethodRecord, tuple[Cell, ...]]]
    reference: str


def main_table(run: Run) -> MetricTable:
    """Make the table of the main metrics, on the test set and for OOD detection."""
    return _table(run, _main_columns(run))


def full_tables(run: Run, data: str) -> list[MetricTable]:
    """Make a table of all metrics on a set; for an OOD set, make one table per score."""
    rows = run.rows[run.rows["set_name"] == data]
    scores: list[str | None] = [name for name in SCORE_LABELS if (rows["score"] == name).any()]
    metrics = [(data, metric) for metric in in_order(rows["metric"])]
    tables = [_table(run, metrics, score=score) for score in scores or [None]]
    return [table for table in tables if table.columns]


def difference_tables(run: Run) -> list[MetricTable]:
    """Make one table of differences from each method that has no posterior."""
    simple = [method.key for method in run.methods if not method.is_laplace]
    tables = [_table(run, _main_columns(run), reference) for reference in simple]
    return [table for table in tables if table.columns]


def _main_columns(run: Run) -> list[tuple[str, str]]:
    """Return the columns of the main table, as pairs of a set and a metric."""
    test = run.test.name
    names = in_order(run.rows[run.rows["set_name"] == test]["metric"])
    main_names = [name for name in names if METRICS[name].is_main] or names
    on_ood_sets = [(dataset.name, "auroc") for dataset in run.sets("ood")]
    return [(test, name) for name in main_names] + on_ood_sets


def _table(
    run: Run,
    metrics: Sequence[tuple[str, str]],
    reference: str | None = None,
    score: str | None = None,
) -> MetricTable:
    """Make a table of the metrics of every method, or of their differences from a reference.

    Args:
        run: The run.
        metrics: The columns, as pairs of a set and a metric.
        reference: The key of the method from which the differences are shown. By default, the table
            shows the metrics, with verdicts on their differences from the first method.
        score: The uncertainty score of OOD detection; by default, the first one.
    """
    labels = {method.key: method.label for method in run.methods}
    compared_with = reference or run.methods[0].key
    all_differences = run.differences[run.differences["reference"] == compared_with]
    methods = run.methods
    if reference is not None:
        # A method is compared only with earlier methods.
        compared_keys = set(all_differences["method"])
        methods = [method for method in run.methods if method.key in compared_keys]
    keys = [method.key for method in methods]
    columns = []
    cells = []
    reference_rows = run.rows[(run.rows["method"] == compared_with) & run.rows["score"].isna()]
    for data, name in metrics:
        reference_metrics = reference_rows[reference_rows["set_name"] == data]
        differences = rows_of_metric(all_differences, data, name, score)
        rows = differences
        if reference is None:
            rows = rows_of_metric(run.rows, data, name, score)
        rows = rows[rows.index.isin(keys)]
        if rows.empty:
            continue
        metric = METRICS[name]
        score_shown = rows["score"].iloc[0]
        labels_of_column = [] if data == run.test.name else [data]
        if isinstance(score_shown, str):
            labels_of_column.append(SCORE_LABELS.get(score_shown, score_shown))
        unit = metric.unit.replace("the target", run.record.target or "the target")
        columns.append((replace(metric, unit=unit), ", ".join(labels_of_column)))
        verdicts = _verdicts(differences, metric, reference_metrics)
        cells.append(_cells(rows, verdicts, keys, is_difference=reference is not None))
    by_method: list[tuple[MethodRecord, tuple[Cell, ...]]] = []
    if cells:
        # Until here, the cells are grouped by column.
        by_method = list(zip(methods, zip(*cells, strict=True), strict=True))
    return MetricTable(columns, by_method, labels[compared_with])


def rows_of_metric(
    rows: pd.DataFrame, data: str, metric: str, score: str | None = None
) -> pd.DataFrame:
    """Return the rows of a metric on a set, indexed by method. The default is the first score."""
    rows = rows[(rows["set_name"] == data) & (rows["metric"] == metric) & rows["value"].notna()]
    scores = set(rows["score"].dropna())
    score = score or next((name for name in ("entropy", "variance") if name in scores), None)
    if score is not None:
        rows = rows[rows["score"] == score]
    return rows.drop_duplicates("method").set_index("method")


def _cells(
    rows: pd.DataFrame,
    verdicts: Mapping[str, str],
    methods: Sequence[str],
    is_difference: bool,
) -> list[Cell]:
    """Return the cells of a column, all with the same number of decimals.

    Args:
        rows: The value and the interval for each method, indexed by its key.
        verdicts: The verdict on each method's difference from the reference, keyed by method.
        methods: The keys of the methods, one for each cell.
        is_difference: Whether the values are differences, which are shown with a sign.
    """
    shown = rows[["value", "low", "high"]]
    max_places = most_decimals(shown.abs().max(axis=None))
    places_by_method = [decimals(low, high, value) for value, low, high in shown.to_numpy()]
    places = min(max_places, int(statistics.median(places_by_method)))
    if is_difference:  # Readers look for the sign, so no end of an interval may become 0.000.
        smallest = shown[["low", "high"]].abs().replace(0, math.nan).min(axis=None)
        while places < max_places and smallest < 0.5 * 10.0**-places:
            places += 1
    cells = []
    for key in methods:
        if key not in shown.index:
            cells.append(Cell("–"))
            continue
        value, low, high = shown.loc[key]
        text = number(value, places)
        sign = "+" if is_difference and value > 0 and text.strip("0.") else ""
        interval = f"{number(low, places)} … {number(high, places)}" if high >= low else ""
        cells.append(Cell(sign + text, interval, verdicts.get(key, "")))
    return cells


def _verdicts(
    differences: pd.DataFrame, metric: Metric, reference_metrics: pd.DataFrame
) -> dict[str, str]:
    """Return a verdict for each method whose difference from the reference has an interval."""
    values_by_metric = dict(
        zip(reference_metrics["metric"], reference_metrics["value"], strict=True)
    )
    verdicts = {}
    with_intervals = differences[["value", "low", "high"]].dropna().itertuples()
    for key, value, low, high in with_intervals:
        is_significant = low > 0 or high < 0
        if is_significant and not matters(metric.name, value, values_by_metric):
            verdicts[key] = "negligible difference"
        else:
            verdicts[key] = _verdict(low, high, metric.better)
    return verdicts


def _verdict(low: float, high: float, better: str | None) -> str:
    """Describe whether a difference with this interval is significant, and in whose favour."""
    if low <= 0 <= high:
        return "no clear difference"
    direction = "higher" if low > 0 else "lower"
    if better not in ("higher", "lower", "ideal"):
        return direction
    # If a metric has an ideal value, its difference is that of distances, so lower is better.
    return "better" if direction == better.replace("ideal", "lower") else "worse"
