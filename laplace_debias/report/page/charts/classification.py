"""Pictures of class probabilities: reliability, and risk against coverage."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.stats import binomtest

from laplace_debias.metrics import reliability_curve, risk_coverage_curve
from laplace_debias.report.page.names import number
from laplace_debias.report.page.panel import Look, Panel, Picture, percent_axis
from laplace_debias.report.page.run_folder import Run
from laplace_debias.report.style import INK

_BINS = 15
_MANY = 10
_MARGINS = {"left": 0.18, "right": 0.97, "top": 0.97, "bottom": 0.13, "hspace": 0.09}
_FEWEST_KEPT = 50
_SHARES = np.linspace(0, 1, 201)[1:]


def reliability(run: Run, look: Look, data: str) -> Picture | None:
    """Accuracy against confidence in equal bins, with 95 % Wilson intervals, over a histogram.

    Args:
        run: The run.
        look: The method.
        data: Name of the set.
    """
    found = run.probabilities(look.key, data)
    if found is None:
        return None
    bins = _bins(*found)
    panel = Panel(f"reliability-{data}-{look.key}", 3.9, (3.4, 1), _MARGINS)
    _draw_accuracy(panel.axes[0], bins, look)
    _draw_counts(panel.axes[1], bins, look)
    texts = [
        f"{count:,} examples\nconfidence {_percent(sure)}\naccuracy {_percent(share)} "
        f"({_percent(least)} … {_percent(most)})"
        for count, sure, share, least, most in zip(
            bins.counts, bins.confidence, bins.accuracy, bins.low, bins.high, strict=True
        )
    ]
    panel.note(panel.axes[0], look.key, bins.confidence, bins.accuracy, texts)
    panel.note(panel.axes[1], look.key, bins.left + 0.5 / _BINS, bins.counts, texts)
    weights = bins.counts / bins.counts.sum()
    gap = float(weights @ np.abs(bins.confidence - bins.accuracy))
    lean = float(weights @ (bins.confidence - bins.accuracy))
    tends = "over-confident" if lean > 0 else "under-confident"
    return panel.finish(
        look.label,
        f"Reliability diagram of {look.label}: mean gap between confidence and accuracy "
        f"{_percent(gap)}.",
        method=look.key,
        note=f"mean gap {_percent(gap)}, on the whole {tends} by {_percent(abs(lean))}",
    )


@dataclass(frozen=True)
class _Bins:
    """Bins of the confidence that have examples: all `[bins]`, accuracies with 95 % intervals."""

    left: np.ndarray
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _bins(probs: np.ndarray, labels: np.ndarray) -> _Bins:
    curve = reliability_curve(torch.from_numpy(probs), torch.from_numpy(labels), _BINS)
    counts = np.rint(curve.fraction.numpy() * len(labels)).astype(int)
    filled = counts > 0
    counts, accuracy = counts[filled], curve.accuracy.numpy()[filled]
    intervals = [
        binomtest(round(share * count), int(count)).proportion_ci(method="wilson")
        for share, count in zip(accuracy, counts, strict=True)
    ]
    return _Bins(
        curve.edges.numpy()[:-1][filled],
        counts,
        curve.confidence.numpy()[filled],
        accuracy,
        np.array([ends.low for ends in intervals]),
        np.array([ends.high for ends in intervals]),
    )


def _draw_accuracy(ax: Axes, bins: _Bins, look: Look) -> None:
    many = bins.counts >= _MANY
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.fill_between(
        bins.confidence[many],
        bins.low[many],
        bins.high[many],
        color=look.colour,
        alpha=0.25,
        linewidth=0,
    )
    line: dict[str, Any] = {"color": look.colour, "marker": look.marker, "clip_on": False}
    ax.plot(bins.confidence[many], bins.accuracy[many], markersize=4.5, **line)
    hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "#FFFFFF", "alpha": 0.8}
    ax.plot(bins.confidence[~many], bins.accuracy[~many], markersize=4.5, **line, **hollow)
    ax.set(xlim=(0, 1), ylim=(0, 1), ylabel="Accuracy")
    percent_axis(ax.yaxis)


def _draw_counts(ax: Axes, bins: _Bins, look: Look) -> None:
    ax.bar(bins.left, bins.counts, 0.92 / _BINS, align="edge", color=look.colour, alpha=0.85)
    ax.set(xlabel="Confidence", ylabel="Examples", yscale="log")
    ax.set_ylim(0.6, bins.counts.max() * 1.5)
    ax.yaxis.set_major_locator(LogLocator(numticks=4))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    percent_axis(ax.xaxis)


def risk_coverage(run: Run, methods: dict[str, Look], data: str, title: str) -> Picture | None:
    """Error rate among the most confident examples against their share, all methods.

    Of examples of equal confidence each counts as their mean error.

    Args:
        run: The run.
        methods: Looks by key.
        data: Name of the set.
        title: What the picture is called.
    """
    panel = Panel(f"risk-coverage-{data}")
    ax = panel.axes[0]
    ends = []
    for key, look in methods.items():
        found = run.probabilities(key, data)
        if found is None:
            continue
        share, risk = _risk_curve(*found)
        ends.append(f"{look.label} {_percent(risk[-1])}")
        panel.of(key, *ax.plot(share, risk, lw=1.6, **look.line))
        few = np.searchsorted(share, np.linspace(0.1, 1, 19)).clip(max=len(share) - 1)
        texts = [
            f"{look.label}\nkeeps {_percent(s)}, of them {_percent(r)} wrong"
            for s, r in zip(share[few], risk[few], strict=True)
        ]
        panel.note(ax, key, share[few], risk[few], texts)
    if not ends:
        return None
    ax.set(xlim=(0, 1), xlabel="Share of examples kept", ylabel="Wrong among those kept")
    ax.set_ylim(bottom=0)
    for axis in (ax.xaxis, ax.yaxis):
        percent_axis(axis)
    alt = f"Error rate against the share of examples kept; of all examples: {', '.join(ends)}."
    return panel.finish(title, alt)


def _risk_curve(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares kept and error rates among them, at most 200 places."""
    curve = risk_coverage_curve(torch.from_numpy(probs), torch.from_numpy(labels))
    # The error rate of a handful of examples says nothing.
    first = min(_FEWEST_KEPT, len(labels)) - 1
    share, risk = curve.coverage.numpy()[first:], curve.risk.numpy()[first:]
    few = np.unique(np.searchsorted(share, _SHARES).clip(max=len(share) - 1))
    return share[few], risk[few]


def _percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"
