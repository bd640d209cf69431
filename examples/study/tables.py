"""Markdown tables of the results, with means over seeds or differences paired by seed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Row = dict[str, Any]
What = tuple[str, ...]
"""A method, a measure and, optionally, a score."""
REFERENCE = "temperature"
METHODS = ("last layer", "all", "ensemble, tempered", "mixture")
IDENTITY = "all, identity"
AGAINST = "identity minus K-FAC"
WITHOUT_POSTERIOR = ("network", "vector", "platt", "isotonic", "ensemble")


def read(file: Path) -> list[Row]:
    """Read the complete lines of a file; none if the file does not exist."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def values(rows: Sequence[Row], what: What) -> np.ndarray:
    """Return a number of each row, or NaN if a row does not have this number."""
    found: list[Any] = [row["methods"] for row in rows]
    for key in what:
        found = [one.get(key, {}) for one in found]
    return np.array([np.nan if one == {} else one for one in found])


def cell(rows: Sequence[Row], one: What, other: What | None) -> tuple[str, int]:
    """Return a mean, or a mean difference with the half width of its 95 % t interval over seeds.

    Returns:
        The text, in bold if the interval excludes 0; and the sign of the difference in this case,
        otherwise 0.
    """
    found = values(rows, one) - (0 if other is None else values(rows, other))
    found, n = found[~np.isnan(found)], int((~np.isnan(found)).sum())
    if not n:
        return "–", 0
    if other is None:
        return f"{found.mean():.3f}".replace("-", "−"), 0
    half = stats.t.ppf(0.975, n - 1) * found.std(ddof=1) / n**0.5 if n > 1 else np.inf
    text = f"{found.mean():+.3f}{f'±{half:.3f}' if n > 1 else ''}".replace("-", "−")
    sign = int(np.sign(found.mean()) * (abs(found.mean()) > half))
    return f"**{text}**" if sign else text, sign


def table(
    title: str, rows: Sequence[Row], columns: dict[str, tuple[What, What | None]], better: int = -1
) -> str:
    """Make a table with a line per problem; the last line counts better and worse problems."""
    if not rows:
        return ""
    lines = [f"### {title}", "", f"| problem | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    signs = []
    for name in dict.fromkeys(row["problem"] for row in rows):
        some = [row for row in rows if row["problem"] == name]
        cells = [cell(some, *column) for column in columns.values()]
        lines.append(f"| {name} | {' | '.join(text for text, _ in cells)} |")
        signs.append([better * sign for _, sign in cells])
    if any(other for _, other in columns.values()):
        counts = [
            "" if other is None else f"{of.count(1)}, {of.count(-1)}"
            for of, (_, other) in zip(zip(*signs, strict=True), columns.values(), strict=True)
        ]
        lines.append(f"| better, worse | {' | '.join(counts)} |")
    return "\n".join([*lines, ""])


def tables(rows: Sequence[Row]) -> str:
    """Return all tables; scores for classes are only tabulated for classification."""
    classes = [row for row in rows if "accuracy" in row["methods"]["network"]]
    numbers = [row for row in rows if "accuracy" not in row["methods"]["network"]]
    parts = []
    for title, measure in (
        ("NLL, minus that of temperature scaling", "nll"),
        ("NLL of shifted inputs, likewise", "nll shifted"),
        ("Brier score (numbers: CRPS), likewise", "brier"),
        ("Smooth ECE (numbers: error of quantiles), likewise", "calibration"),
    ):
        reference = (REFERENCE, measure)
        paired = {name: ((name, measure), reference) for name in METHODS}
        identity = {AGAINST: ((IDENTITY, measure), ("all", measure))}
        columns = {REFERENCE: (reference, None), **paired, **identity}
        parts.append(table(title, rows, columns))
    entropy = (REFERENCE, "auroc", "entropy")
    columns = {REFERENCE: (entropy, None)}
    for score in ("entropy", "mutual_information"):
        columns[score.replace("_", " ")] = (("all", "auroc", score), entropy)
    columns["entropy of the mixture"] = (("mixture", "auroc", "entropy"), entropy)
    columns[AGAINST] = (
        (IDENTITY, "auroc", "mutual_information"),
        ("all", "auroc", "mutual_information"),
    )
    title = "AUROC of foreign inputs by a score, minus that of temperature scaling's entropy"
    parts.append(table(title, classes, columns, 1))
    known = dict.fromkeys(s for row in classes for s in row["methods"]["all"]["auroc"])
    for name in ("last layer", "all", IDENTITY, "mixture"):
        title = f"The same by every score of {name}"
        parts.append(table(title, classes, {s: ((name, "auroc", s), entropy) for s in known}, 1))
    variance = {
        name: ((name, "auroc", "variance"), None)
        for name in ("last layer", "all", IDENTITY, "ensemble, tempered", "mixture")
    }
    parts.append(table("AUROC of foreign inputs by the variance", numbers, variance))
    parts.append(table_without_posteriors(rows))
    instead = {
        f"{name}, {part}": ((f"{name}, {part}", "nll"), (name, "nll"))
        for part in ("identity", "T = 1", "evidence")
        for name in ("last layer", "all")
    }
    parts.append(table("NLL with one part replaced, minus that of the posterior", rows, instead))
    seconds = {n: ((n, "seconds"), None) for n in (REFERENCE, "last layer", "all", "mixture")}
    parts.append(table("Seconds after the training", rows, seconds))
    return "\n".join(part for part in parts if part)


def table_without_posteriors(rows: Sequence[Row]) -> str:
    """Return the table of networks and their recalibrations."""
    nll = (REFERENCE, "nll")
    paired = {name: ((name, "nll"), nll) for name in WITHOUT_POSTERIOR}
    columns = {REFERENCE: (nll, None), **paired}
    return table("NLL without a posterior, minus that of temperature scaling", rows, columns)
