"""The results of a run as a table on the terminal."""

from collections.abc import Mapping
from typing import Any

_METRICS = {
    "classification": ("accuracy", "nll", "brier", "smooth_ece"),
    "binary": ("accuracy", "nll", "brier", "smooth_ece"),
    "multilabel": ("accuracy", "nll", "brier", "ece"),
    "regression": ("nll", "rmse", "crps", "coverage"),
}
_SCORES = ("entropy", "variance")


def rows_to_print(
    run: Mapping[str, Any], found: Mapping[str, Any], with_intervals: bool = True
) -> list[dict[str, str]]:
    """A row for each method: metrics on the test set, and how well OOD sets are told from it.

    Args:
        run: `run.json`.
        found: `metrics.json`.
        with_intervals: Whether the ends of its interval follow each value.

    Returns:
        By the column's name a value with the ends of its interval. OOD sets are told apart by the
        entropy, of a regression by the variance.
    """
    table = []
    of = {
        (row["method"], row["set"], row["metric"], row.get("score")): row for row in found["rows"]
    }
    for method in run["methods"]:
        line = {"method": method["label"]}
        for metric in _METRICS[run["task"]]:
            if row := of.get((method["key"], "test", metric, None)):
                line[metric] = _cell(row, with_intervals)
        for part in run["sets"]:
            for score in _SCORES:
                row = of.get((method["key"], part["name"], "auroc", score))
                if row and (score == "entropy" or run["task"] == "regression"):
                    line[f"AUROC\n{part['name']}"] = _cell(row, with_intervals)
        line["examples"] = f"{of[method['key'], 'test', 'nll', None]['num_examples']:,}"
        table.append(line)
    return table


def _cell(row: Mapping[str, Any], with_interval: bool) -> str:
    if not with_interval or row["low"] is None or row["high"] is None:
        return f"{row['value']:.3f}"
    return f"{row['value']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
