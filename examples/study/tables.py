"""Markdown tables of the results, paired by seed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Row = dict[str, Any]
Measure = Callable[[Row], float]
REFERENCE = "temperature"


def read(file: Path) -> list[Row]:
    """The complete lines of a file; none if it is not there."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def of(method: str, measure: str, score: str = "") -> Measure:
    """From a row to a number of it; NaN if it has none."""

    def value(row: Row) -> float:
        found = row["methods"].get(method, {}).get(measure, {} if score else np.nan)
        return found.get(score, np.nan) if score else found

    return value


def difference(rows: Sequence[Row], one: Measure, other: Measure) -> str:
    """Mean and half width of a 95 % t interval over seeds; bold if 0 is outside."""
    values = np.array([one(row) - other(row) for row in rows])
    values = values[~np.isnan(values)]
    if not len(values):
        return "–"
    mean, n = values.mean(), len(values)
    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5 if n > 1 else np.inf
    text = f"{mean:+.3f} ± {half:.3f}".replace("-", "−")
    return f"**{text}**" if abs(mean) > half else text


def mean(rows: Sequence[Row], one: Measure, digits: int = 3) -> str:
    """The mean over seeds."""
    value = np.mean([one(row) for row in rows])
    return "–" if np.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def table(title: str, rows: Sequence[Row], columns: dict[str, Callable[[list[Row]], str]]) -> str:
    """A line for each problem."""
    lines = [title, "", "| problem | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1)]
    lines[-1] += "|"
    for name in dict.fromkeys(row["problem"] for row in rows):
        some = [row for row in rows if row["problem"] == name]
        cells = [column(some) for column in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def tables(rows: Sequence[Row]) -> str:
    """All tables."""

    def to(one: Measure, other: Measure) -> Callable[[list[Row]], str]:
        return lambda some: difference(some, one, other)

    def beside(measure: str, methods: Sequence[str]) -> dict[str, Callable[[list[Row]], str]]:
        reference = of(REFERENCE, measure)
        first = {REFERENCE: lambda some: mean(some, reference)}
        return first | {name: to(of(name, measure), reference) for name in methods}

    entropy = of(REFERENCE, "auroc", "entropy")
    scores = dict.fromkeys(
        score
        for row in rows
        for score in row["methods"]["all"]["auroc"]
        if score not in ("entropy", "aleatoric")
    )
    classes = [row for row in rows if "entropy" in row["methods"]["all"]["auroc"]]
    numbers = [row for row in rows if row not in classes]
    methods = ["network", "vector", "last layer", "all", "ensemble, tempered", "mixture"]
    parts = [
        table("NLL, less that of temperature scaling", rows, beside("nll", methods)),
        table(
            "NLL of what replaces a part, less that of the posterior",
            rows,
            {
                f"{name}, {part}": to(of(f"{name}, {part}", "nll"), of(name, "nll"))
                for part in ("identity", "T = 1")
                for name in ("last layer", "all")
            },
        ),
        table("NLL of shifted inputs, likewise", rows, beside("nll shifted", methods)),
        table("Brier score or CRPS, likewise", rows, beside("brier", methods)),
        table("Smooth ECE or error of quantiles, likewise", rows, beside("calibration", methods)),
        table(
            "AUROC of foreign inputs by a score, less that of temperature scaling's entropy",
            classes,
            {
                REFERENCE: lambda some: mean(some, entropy),
                "network": to(of("network", "auroc", "entropy"), entropy),
                **{
                    f"{name}, {score}": to(of(name, "auroc", score), entropy)
                    for name in ("last layer", "all")
                    for score in ("entropy", *scores)
                },
                "identity, epistemic": to(of("all, identity", "auroc", "epistemic"), entropy),
                "ensemble": to(of("ensemble, tempered", "auroc", "entropy"), entropy),
                "mixture, epistemic": to(of("mixture", "auroc", "epistemic"), entropy),
            },
        ),
        table(
            "AUROC of foreign inputs by the variance",
            numbers,
            {
                name: lambda some, name=name: mean(some, of(name, "auroc", "total"))
                for name in ("last layer", "all", "all, identity", "ensemble, tempered", "mixture")
            },
        ),
        table(
            "Seconds after the training",
            rows,
            {
                name: lambda some, name=name: mean(some, of(name, "seconds"), 2)
                for name in (REFERENCE, "last layer", "all", "mixture")
            },
        ),
    ]
    return "\n".join(parts)
