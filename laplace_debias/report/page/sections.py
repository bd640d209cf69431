"""The pictures of each section of the page."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from laplace_debias.metrics import METRICS
from laplace_debias.report.page import calibration
from laplace_debias.report.page.panel import Look, Panel, Picture, log_axis
from laplace_debias.report.page.run import Run
from laplace_debias.report.style import INK
from laplace_debias.runs.records import Sweep
from laplace_debias.runs.wording import decimals, in_order, number, significant

_BY_SEVERITY = ("accuracy", "nll", "overconfidence", "brier", "rmse", "scaled_error", "crps")
_MOST_METRICS = 4
_BINS = 40
_ROW = 1.42
_UNCERTAINTIES = {
    "epistemic": "Predicted standard deviation without the noise",
    "entropy": "Entropy of the predictive (nats)",
}
_FIRST = ("severity-overconfidence", "severity-scaled_error", "coverage", "reliability-test-")


def pictures_by_section(run: Run, looks: dict[str, Look]) -> dict[str, list[Picture]]:
    """Draw all pictures that the run has data for, and return them by section of the page."""
    test = run.test.name
    shifts = run.sets("shift")
    sections: dict[str, Iterable[Picture | None]] = {}
    if run.has_numbers:
        sections["calibration"] = [
            calibration.coverage(run, looks),
            calibration.residuals(run, looks),
        ]
    else:
        titles = {"Test set": test}
        titles |= {f"Severity {shift.severity}": shift.name for shift in shifts[-1:]}
        sections["calibration"] = [
            calibration.reliability(run, look, test) for look in looks.values()
        ]
        sections["selective"] = [
            calibration.risk_coverage(run, looks, data, title) for title, data in titles.items()
        ]
    sections["ood"] = [score_histograms(run, looks, dataset.name) for dataset in run.sets("ood")]
    is_shifted = run.rows["set_name"].isin([shift.name for shift in shifts])
    metrics = in_order(run.rows[is_shifted]["metric"])
    metrics = [name for name in _BY_SEVERITY if name in metrics][:_MOST_METRICS]
    sections["shift"] = [severity(run, looks, name) for name in metrics]
    sections["tuning"] = [sweep(run, look) for look in looks.values()]
    return {
        key: [picture for picture in pictures if picture is not None]
        for key, pictures in sections.items()
    }


def first_picture(pictures: Sequence[Picture]) -> Picture | None:
    """Choose the picture next to the verdict: confidence by severity, or on the test set."""
    candidates = [
        picture for name in _FIRST for picture in pictures if picture.name.startswith(name)
    ]
    if not candidates:
        return None
    picture = candidates[0]
    alt = f"In short: {picture.alt}"
    return replace(picture, name=f"first-{picture.name}", alt=alt)


def score_histograms(run: Run, methods: dict[str, Look], data: str) -> Picture | None:
    """Draw histograms of the uncertainty on the test set and on another set.

    The heights are square roots of fractions, so that rare values are visible despite the many
    values near zero.
    """
    score = "epistemic" if run.has_numbers else "entropy"
    scores = _scores_of_both_sets(run, methods, data, score)
    if not scores:
        return None
    largest = max(np.quantile(values, 0.999) for pair in scores.values() for values in pair)
    edges = np.linspace(0, max(float(largest), 1e-12), _BINS + 1)
    panel = Panel(f"uncertainty-{data}", 0.75 + 0.66 * len(scores))
    ax = panel.axes[0]
    ax.grid(visible=False, axis="y")
    medians = []
    for index, (key, (test_scores, other_scores)) in enumerate(scores.items()):
        look = methods[key]
        base = -_ROW * index
        filled: dict[str, Any] = {"color": look.colour, "alpha": 0.6, "fill": True, "lw": 0}
        outline: dict[str, Any] = {"color": INK, "lw": 1}
        histograms = [
            (data, _shares(other_scores, edges), filled),
            ("test", _shares(test_scores, edges), outline),
        ]
        tallest = max(shares.max() for _, shares, _ in histograms)
        for name, shares, style in histograms:
            heights = base + np.sqrt(shares / tallest)
            panel.assign(key, ax.stairs(heights, edges, baseline=base, **style))
            bins = np.flatnonzero(shares)[:: max(1, _BINS // 14)]
            texts = [
                f"{look.label}, {name}\n{number(100 * shares[i], 1)} % from "
                f"{significant(edges[i], 2)} to {significant(edges[i + 1], 2)}"
                for i in bins
            ]
            panel.note(ax, key, (edges[bins] + edges[bins + 1]) / 2, heights[bins], texts)
        test_median = significant(np.median(test_scores), 2)
        other_median = significant(np.median(other_scores), 2)
        medians.append(f"{look.label} {test_median} and {other_median}")
        panel.assign(key, ax.text(0, base + 1.04, look.label, va="bottom", fontsize=9, color=INK))
    ax.set(xlim=(0, edges[-1]), xlabel=_UNCERTAINTIES[score], yticks=[])
    ax.set_ylim(_ROW * (1 - len(scores)) - 0.05, _ROW - 0.02)
    ax.spines["left"].set_visible(False)
    alt = f"Histograms of the uncertainty of test and {data}. Medians: {'; '.join(medians)}."
    return panel.finish(data, alt)


def _scores_of_both_sets(
    run: Run, methods: Iterable[str], data: str, score: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return each method's scores on the test set and on another set."""
    scores: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for key in methods:
        test_column = run.column(key, run.test.name, score)
        other_column = run.column(key, data, score)
        if test_column is not None and other_column is not None:
            scores[key] = _mean_over_outputs(test_column), _mean_over_outputs(other_column)
    return scores


def _mean_over_outputs(column: np.ndarray) -> np.ndarray:
    """Average over several outputs, because a histogram shows one number per example."""
    return column.reshape(len(column), -1).mean(1)


def _shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Compute the fraction of values in each bin; values beyond the last bin count in it."""
    return np.histogram(np.minimum(values, edges[-1]), edges)[0] / len(values)


def severity(run: Run, methods: dict[str, Look], metric: str) -> Picture | None:
    """Plot a metric and its intervals against the severity.

    Severity 0 is the uncorrupted test set.
    """
    levels = {run.test.name: 0}
    levels |= {shift.name: shift.severity or 0 for shift in run.sets("shift")}
    definition = METRICS[metric]
    label = definition.label
    unit = definition.unit
    panel = Panel(f"severity-{metric}", 2.9)
    ax = panel.axes[0]
    ends = []
    offset = -0.06 * (len(methods) - 1) / 2
    for key, look in methods.items():
        rows = run.rows.assign(level=run.rows["set_name"].map(levels))
        rows = rows[(rows["method"] == key) & (rows["metric"] == metric)]
        rows = rows.dropna(subset=["value", "level"]).sort_values("level")
        if len(rows) < 2:
            continue
        x = rows["level"].to_numpy(float) + offset
        value = rows["value"].to_numpy(float)
        low = rows["low"].to_numpy(float)
        high = rows["high"].to_numpy(float)
        offset += 0.06
        panel.assign(key, ax.vlines(x, low, high, color=look.colour, lw=1.4, alpha=0.6))
        panel.assign(key, *ax.plot(x, value, lw=1.5, markersize=4.5, **look.line_options))
        texts = [
            f"{look.label}, severity {level:.0f}\n{label} {_interval(v, a, b)} {unit}"
            for level, v, a, b in zip(rows["level"], value, low, high, strict=True)
        ]
        panel.note(ax, key, x, value, texts)
        places = decimals(low[-1], high[-1], value[-1])
        ends.append(f"{look.label} from {number(value[0], places)} to {number(value[-1], places)}")
    severities = sorted(levels.values())
    ax.set_xticks(severities, ["none" if x == 0 else str(x) for x in severities])
    ax.set(xlabel="Severity", ylabel=f"{label} ({unit})" if unit else label)
    title = label
    if definition.better in ("higher", "lower"):
        title = f"{label}, {definition.better} is better"
    alt = f"{label} against severity: {'; '.join(ends)}."
    return panel.finish(title, alt)


def _interval(value: float, low: float, high: float) -> str:
    places = decimals(low, high, value)
    if not high >= low:
        return number(value, places)
    return f"{number(value, places)} ({number(low, places)} … {number(high, places)})"


def sweep(run: Run, look: Look) -> Picture | None:
    """Plot a validation metric of one method against the prior precision."""
    search = run.folder.read_sweep(look.key)
    points = [point for point in search.rows if point.value is not None]
    points.sort(key=lambda point: point.prior_precision)
    if len(points) < 2:
        return None
    metric = METRICS.get(search.metric or "")
    label = "log marginal likelihood"
    unit = "nats"
    if metric is not None:
        label = metric.label
        unit = metric.unit
    x = np.array([point.prior_precision for point in points], float)
    value = np.array([point.value for point in points], float)
    low = np.array([point.low for point in points], float)
    high = np.array([point.high for point in points], float)
    panel = Panel(f"sweep-{look.key}", 2.9)
    ax = panel.axes[0]
    if search.flat:
        lowest, highest = search.flat
        ax.axvspan(lowest, highest, color=INK, alpha=0.09, lw=0)
    ax.fill_between(x, low, high, color=look.colour, alpha=0.22, lw=0)
    ax.plot(x, value, color=look.colour, marker=look.marker, markersize=3.2, lw=1.5)
    if isinstance(search.chosen, int | float):
        ax.axvline(search.chosen, color=INK, lw=1.2)
    log_axis(ax.xaxis, x[0], x[-1])
    named = f"{label} ({unit})" if unit else label
    ylabel = f"Validation {named}" if metric else named
    ax.set(xlim=(x[0], x[-1]), xlabel="Prior precision", ylabel=ylabel)
    _leave_out_what_hides_the_best(ax, value, metric.better if metric else "higher")
    texts = [
        f"prior precision {significant(p)}\n{label} {number(v, decimals(a, b, v))} {unit}"
        for p, v, a, b in zip(x, value, low, high, strict=True)
    ]
    panel.note(ax, look.key, x, value, texts)
    note = _result_of_search(search)
    alt = f"{label} of {look.label} against the prior precision; {note}."
    return panel.finish(look.label, alt, method=look.key, note=note)


def _result_of_search(search: Sweep) -> str:
    """Describe the chosen prior precision, the range of equally good ones, and the noise."""
    remarks = []
    if isinstance(search.chosen, int | float):
        remarks.append(f"tuned: {significant(search.chosen)}")
    if search.flat:
        lowest, highest = search.flat
        ends = f"{significant(lowest, 2)} to {significant(highest, 2)}"
        remarks.append(f"within one standard error from {ends}")
    if isinstance(search.sigma, int | float):
        remarks.append(f"noise {significant(search.sigma)}")
    if isinstance(search.sigma, list):
        ends = f"{significant(min(search.sigma))} to {significant(max(search.sigma))}"
        remarks.append(f"noise of the outputs from {ends}")
    return "; ".join(remarks)


def _leave_out_what_hides_the_best(ax: Axes, value: np.ndarray, better: str | None) -> None:
    """Limit the axis to the region around the best value if some values are many times worse."""
    finite = value[np.isfinite(value)]
    if better != "lower" or len(finite) < 4:
        return
    best = finite.min()
    middle = np.median(finite)
    top = best + 2.5 * max(middle - best, 0.02 * abs(best))
    if finite.max() > top:
        ax.set_ylim(best - 0.08 * (top - best), top)
