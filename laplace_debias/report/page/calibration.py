"""Figures that show the calibration of class probabilities, intervals and residuals."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.stats import binomtest, norm

from laplace_debias.metrics import reliability_curve, risk_coverage_curve
from laplace_debias.report.page.panel import (
    Look,
    Panel,
    Picture,
    draw_diagonal,
    log_axis,
    percent_axes,
)
from laplace_debias.report.page.run import Run
from laplace_debias.runs.wording import number, significant
from laplace_debias.system.shown import counted

_BINS = 15
_LEVELS = np.linspace(0.05, 0.95, 19)
_GROUPS = 15
_MANY = 10
_MARGINS = {"left": 0.18, "right": 0.97, "top": 0.97, "bottom": 0.13, "hspace": 0.09}
_FEWEST_KEPT = 50
_SHARES = np.linspace(0, 1, 201)[1:]


def reliability(run: Run, look: Look, data: str) -> Picture | None:
    """Plot the accuracy against the confidence, for equal bins of the confidence.

    The accuracies have 95 % Wilson intervals. A histogram of the confidence is drawn below.
    """
    predictions = run.probabilities(look.key, data)
    if predictions is None:
        return None
    bins = _bins(*predictions)
    panel = Panel(f"reliability-{data}-{look.key}", 3.9, (3.4, 1), _MARGINS)
    above, below = panel.axes
    _draw_accuracy(above, bins, look)
    _draw_counts(below, bins, look)
    texts = [
        f"{counted(bin.examples, 'example')}\nconfidence {_percent(bin.confidence)}\n"
        f"accuracy {_percent(bin.accuracy)} ({_percent(bin.low)} … {_percent(bin.high)})"
        for bin in bins.itertuples()
    ]
    panel.note(above, look.key, bins.confidence, bins.accuracy, texts)
    panel.note(below, look.key, bins.left + 0.5 / _BINS, bins.examples, texts)
    gaps = bins.confidence - bins.accuracy
    gap = float(np.average(gaps.abs(), weights=bins.examples))
    bias = float(np.average(gaps, weights=bins.examples))
    tendency = "over-confident" if bias > 0 else "under-confident"
    note = f"mean gap {_percent(gap)}, on the whole {tendency} by {_percent(abs(bias))}"
    alt = (
        f"Reliability diagram of {look.label}: mean gap between confidence and accuracy "
        f"{_percent(gap)}."
    )
    return panel.finish(look.label, alt, method=look.key, note=note)


def _bins(probs: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
    """Return the non-empty bins of the confidence, with 95 % intervals for their accuracy."""
    curve = reliability_curve(torch.from_numpy(probs), torch.from_numpy(labels), _BINS)
    bins = pd.DataFrame(
        {
            "left": curve.edges[:-1],
            "examples": (curve.fraction * len(labels)).round().int(),
            "confidence": curve.confidence,
            "accuracy": curve.accuracy,
        }
    )
    bins = bins[bins.examples > 0]
    intervals = [
        binomtest(round(bin.accuracy * bin.examples), bin.examples).proportion_ci(method="wilson")
        for bin in bins.itertuples()
    ]
    return bins.assign(low=[ends.low for ends in intervals], high=[ends.high for ends in intervals])


def _draw_accuracy(ax: Axes, bins: pd.DataFrame, look: Look) -> None:
    """Draw the accuracy of each bin; bins with few examples have hollow markers."""
    many = bins[bins.examples >= _MANY]
    few = bins[bins.examples < _MANY]
    draw_diagonal(ax)
    ax.fill_between(many.confidence, many.low, many.high, color=look.colour, alpha=0.25, lw=0)
    line: dict[str, Any] = {"color": look.colour, "marker": look.marker, "clip_on": False}
    ax.plot(many.confidence, many.accuracy, markersize=4.5, **line)
    hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "#FFFFFF", "alpha": 0.8}
    ax.plot(few.confidence, few.accuracy, markersize=4.5, **line, **hollow)
    ax.set(xlim=(0, 1), ylim=(0, 1), ylabel="Accuracy")
    percent_axes(ax.yaxis)


def _draw_counts(ax: Axes, bins: pd.DataFrame, look: Look) -> None:
    """Draw the number of examples in each bin, on a logarithmic axis."""
    ax.bar(bins.left, bins.examples, 0.92 / _BINS, align="edge", color=look.colour, alpha=0.85)
    limits = 0.6, bins.examples.max() * 1.5
    ax.set(xlabel="Confidence", ylabel="Examples", yscale="log", ylim=limits)
    ax.yaxis.set_major_locator(LogLocator(numticks=4))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    percent_axes(ax.xaxis)


def risk_coverage(run: Run, methods: dict[str, Look], data: str, title: str) -> Picture | None:
    """Plot the error rate among the most confident examples against their fraction.

    Each example's error is replaced by the mean error of all equally confident examples.
    """
    panel = Panel(f"risk-coverage-{data}")
    ax = panel.axes[0]
    ends = []
    for key, look in methods.items():
        predictions = run.probabilities(key, data)
        if predictions is None:
            continue
        probs, labels = map(torch.from_numpy, predictions)
        curve = risk_coverage_curve(probs, labels)
        # Leave out the error rate of the first few examples, which is too imprecise.
        first = min(_FEWEST_KEPT, len(labels)) - 1
        share = curve.coverage.numpy()[first:]
        risk = curve.risk.numpy()[first:]
        drawn = np.unique(np.searchsorted(share, _SHARES).clip(max=len(share) - 1))
        share = share[drawn]
        risk = risk[drawn]
        ends.append(f"{look.label} {_percent(risk[-1])}")
        line = ax.plot(share, risk, lw=1.6, color=look.colour, linestyle=look.dashes)
        panel.assign(key, *line)
        noted = np.searchsorted(share, np.linspace(0.1, 1, 19)).clip(max=len(share) - 1)
        texts = [
            f"{look.label}\nkeeps {_percent(s)}, of them {_percent(r)} wrong"
            for s, r in zip(share[noted], risk[noted], strict=True)
        ]
        panel.note(ax, key, share[noted], risk[noted], texts)
    ax.set(xlim=(0, 1), ylim=(0, None))
    ax.set(xlabel="Share of examples kept", ylabel="Wrong among those kept")
    percent_axes(ax.xaxis, ax.yaxis)
    alt = (
        "Error rate against the share of examples that are kept. Error rate on all examples: "
        f"{', '.join(ends)}."
    )
    return panel.finish(title, alt)


def _percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"


def coverage(run: Run, methods: dict[str, Look]) -> Picture | None:
    """Plot the coverage of central intervals against their level."""
    panel = Panel("coverage")
    ax = panel.axes[0]
    draw_diagonal(ax)
    shares = []
    for key, look in methods.items():
        level = _interval_levels(run, key)
        if level is None:
            continue
        observed = (level[:, None] <= _LEVELS).mean(0)
        panel.assign(key, *ax.plot(_LEVELS, observed, lw=1.5, markersize=3.6, **look.line_options))
        texts = [
            f"{look.label}\n{100 * q:.0f} % interval contains {100 * o:.1f} % of the targets"
            for q, o in zip(_LEVELS, observed, strict=True)
        ]
        panel.note(ax, key, _LEVELS, observed, texts)
        shares.append(f"{look.label} {100 * observed[-1]:.0f} %")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="Level of the interval", ylabel="Targets within it")
    percent_axes(ax.xaxis, ax.yaxis)
    alt = f"Coverage against level. Coverage of the 95 % interval: {', '.join(shares)}."
    return panel.finish("Coverage of intervals", alt)


def _interval_levels(run: Run, method: str) -> np.ndarray | None:
    """For each target of the test set, return the smallest level of an interval that contains it.

    If the predictive is not normal, the levels are read from the table of predictions; None if it
    does not contain them.
    """
    level = run.column(method, run.test.name, "interval_level")
    if level is not None:
        return level.ravel()
    pair = _residuals(run, method)
    if pair is None or run.column(method, run.test.name, "log_prob") is not None:
        return None
    residual, deviation = pair
    return 2 * norm.cdf(np.abs(residual / deviation)) - 1


def residuals(run: Run, methods: dict[str, Look]) -> Picture | None:
    """Plot residuals against predicted standard deviations.

    Both are root mean squares within groups of equal size.
    """
    panel = Panel("residuals")
    ax = panel.axes[0]
    ends = []
    sizes = []
    for key, look in methods.items():
        pair = _residuals(run, key)
        if pair is None:
            continue
        residual, deviation = pair
        groups = _groups_of_equal_size(deviation)
        predicted = np.array([np.sqrt((deviation[group] ** 2).mean()) for group in groups])
        observed = np.array([np.sqrt((residual[group] ** 2).mean()) for group in groups])
        panel.assign(
            key, *ax.plot(predicted, observed, lw=1.2, markersize=4.5, **look.line_options)
        )
        texts = [
            f"{look.label}\npredicted {significant(s)}, residuals {significant(w)}"
            for s, w in zip(predicted, observed, strict=True)
        ]
        panel.note(ax, key, predicted, observed, texts)
        ends += [predicted, observed]
        sizes.append(f"{look.label} over {len(groups)} groups of examples")
    if not ends:
        return None
    every = np.concatenate(ends)
    low = every[every > 0].min() / 1.3
    high = every.max() * 1.3
    draw_diagonal(ax, low, high)
    for axis in (ax.xaxis, ax.yaxis):
        log_axis(axis, low, high)
    ax.set(xlim=(low, high), ylim=(low, high))
    ax.set(xlabel="Predicted standard deviation", ylabel="Residuals, root mean square")
    alt = f"Residuals against predicted standard deviation: {'; '.join(sizes)}."
    return panel.finish("Residuals", alt)


def _groups_of_equal_size(deviation: np.ndarray) -> list[np.ndarray]:
    """Return the indices of targets in groups with similar standard deviations."""
    order = np.argsort(deviation, kind="stable")
    if np.ptp(deviation) < 1e-9 * deviation.max():
        # The standard deviation is constant.
        return [order]
    return np.array_split(order, min(_GROUPS, max(1, len(order) // 20)))


def _residuals(run: Run, method: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the residuals on the test set and the predicted standard deviations."""
    names = ("target", "mean", "standard_deviation")
    target, mean, deviation = (run.column(method, run.test.name, name) for name in names)
    if target is None or mean is None or deviation is None:
        return None
    return (target - mean).ravel(), deviation.ravel()
