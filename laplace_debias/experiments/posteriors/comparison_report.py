"""Tables, pictures and a summary in words of a comparison."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console

from laplace_debias.experiments.posteriors.comparison import METHODS, ComparisonResult
from laplace_debias.experiments.posteriors.distances import Distance
from laplace_debias.experiments.shared.store import Row
from laplace_debias.report.figures import (
    prior_precision_figure,
    reliability_figure,
    severity_figure,
)
from laplace_debias.report.tables import markdown_table, print_table, write_csv
from laplace_debias.system.atomic import written_atomically


def tuned_table(result: ComparisonResult) -> list[Row]:
    """A row per method: metrics on clean test images at the tuned prior precision, mean over draws.

    Args:
        result: What was measured.

    Returns:
        Rows with `method`, `δ` (the values that the draws chose), `accuracy`, `NLL`
        (nats), `ECE` and `Brier`.
    """
    table: list[Row] = []
    for method in METHODS:
        rows = _tuned(result, method, 0)
        table.append(
            {
                "method": method,
                "δ": _range(row["prior_precision"] for row in rows),
                "accuracy": _mean(row["accuracy"] for row in rows),
                "NLL": _mean(row["nll"] for row in rows),
                "ECE": _mean(row["ece"] for row in rows),
                "Brier": _mean(row["brier"] for row in rows),
            }
        )
    return table


def severity_table(result: ComparisonResult, metric: Literal["nll", "auroc"]) -> list[Row]:
    """A row per method: a metric on corrupted images at the tuned prior precision.

    Args:
        result: What was measured.
        metric: The NLL in nats, or the AUROC of the entropy between clean and corrupted images.

    Returns:
        Rows with `method`, and a mean over draws for each severity, named by it.
    """
    return [
        {"method": method}
        | {
            str(severity): _mean(row[metric] for row in _tuned(result, method, severity))
            for severity in result.settings.severities
        }
        for method in METHODS
    ]


def distance_table(result: ComparisonResult) -> list[Row]:
    """A row per prior precision: distance of the test NLL to full-batch's, and its ratio.

    Args:
        result: What was measured.

    Returns:
        Rows with `δ` ("all" in the last), `mini-batch`, `debiased` (nats, mean over
        draws), `ratio`, each followed by its standard error.
    """
    return [
        {
            "δ": "all" if row.prior_precision is None else f"{row.prior_precision:g}",
            "mini-batch": row.mini,
            "± mini": row.mini_se,
            "debiased": row.debiased,
            "± deb.": row.debiased_se,
            "ratio": row.ratio,
            "± ratio": row.ratio_se,
        }
        for row in result.distances
    ]


def findings(result: ComparisonResult) -> list[str]:
    """Findings in sentences, made from the numbers.

    Args:
        result: What was measured.

    Returns:
        The distance to full-batch, one sentence about the tuned posteriors, and one more for
        methods whose best prior precision lies on the grid's edge.
    """
    *points, overall = result.distances
    best = min(points, key=lambda row: row.ratio)
    worst = max(points, key=lambda row: row.ratio)
    error = "" if overall.ratio_se is None else f" (± {overall.ratio_se:.2f})"
    closer = sum(row.debiased < row.mini for row in points)
    clean = {row["method"]: row for row in tuned_table(result)}
    tuned = ", ".join(
        f"{row['NLL']:.3f} for {method} (ECE {row['ECE']:.3f})" for method, row in clean.items()
    )
    sentences = [
        f"From the same {2 * result.settings.batch_size} of {result.num_data:,} training images, "
        f"the debiased posterior's test NLL is {overall.ratio:.2f}{error} times as far from "
        f"full-batch's as the mini-batch's, over prior precisions "
        f"{points[0].prior_precision:g} … {points[-1].prior_precision:g}. It is closer at {closer} "
        f"of {len(points)} of them; the ratio is best at {_told(best)} and worst at "
        f"{_told(worst)}.",
        f"With the prior precision tuned on validation images, the test NLL is {tuned}.",
    ]
    edges = (result.settings.prior_precisions[0], result.settings.prior_precisions[-1])
    on_edge = [
        method
        for method in METHODS
        if any(row["prior_precision"] in edges for row in _tuned(result, method, 0))
    ]
    if on_edge:
        sentences.append(
            f"The best prior precision of {', '.join(on_edge)} lies on the grid's edge in at least "
            "one draw: a wider grid may do better."
        )
    return sentences


def reference(result: ComparisonResult) -> str:
    """Which examples full-batch stands for, in one line."""
    if result.num_full == result.num_data:
        return f"full-batch: all {result.num_data:,} training images"
    return (
        f"full-batch: {result.num_full:,} of the {result.num_data:,} training images, chosen at "
        f"random, scaled to N = {result.num_data:,}"
    )


def report_comparison(result: ComparisonResult, folder: Path, console: Console) -> None:
    """Print the tables and the findings; write the measurements, the tables and the pictures.

    Args:
        result: What was measured.
        folder: Where the files go; made if missing. Files of the same names are replaced.
        console: Where to print.

    Raises:
        OSError: If a file cannot be written.
    """
    tables, told = _tables(result), findings(result)
    for title, rows in tables.items():
        print_table(rows, title, console=console)
    console.print(reference(result), markup=False, highlight=False)
    write_csv(result.sweep, folder / "sweep.csv")
    write_csv(result.tuned, folder / "tuned.csv")
    write_csv([asdict(row) for row in result.distances], folder / "distances.csv")
    parts = [f"**{title}**\n\n{markdown_table(rows)}" for title, rows in tables.items()]
    with written_atomically(folder / "table.md") as temporary:
        text = "\n\n".join([*parts, reference(result), *told])
        temporary.write_text(text + "\n", encoding="utf-8")
    pictures = [folder / "prior_precision.png", folder / "reliability.png"]
    prior_precision_figure(result.sweep, pictures[0])
    reliability_figure(result.reliability, pictures[1])
    if result.settings.severities:
        pictures.append(folder / "severity.png")
        severity_figure(result.tuned, pictures[2])
    for sentence in told:
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)


def _tables(result: ComparisonResult) -> dict[str, list[Row]]:
    tables = {"Tuned δ, test images (mean over draws)": tuned_table(result)}
    if result.settings.severities:
        tables["NLL by severity"] = severity_table(result, "nll")
        tables["OOD AUROC by severity"] = severity_table(result, "auroc")
    tables["Distance of the test NLL to full-batch's, ± standard error"] = distance_table(result)
    return tables


def _tuned(result: ComparisonResult, method: str, severity: int) -> list[Row]:
    return [r for r in result.tuned if (r["method"], r["severity"]) == (method, severity)]


def _told(row: Distance) -> str:
    return (
        f"{row.prior_precision:g} ({row.ratio:.2f}: {row.debiased:.3f} against {row.mini:.3f} nats)"
    )


def _range(values: Iterable[float | None]) -> str | None:
    known = sorted({value for value in values if value is not None})
    if not known:
        return None
    return f"{known[0]:g}" if len(known) == 1 else f"{known[0]:g} … {known[-1]:g}"


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
