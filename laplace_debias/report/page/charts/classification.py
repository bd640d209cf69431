"""Pictures of class probabilities: reliability, and risk against coverage."""

import numpy as np
import torch
from matplotlib.ticker import PercentFormatter
from scipy.stats import binomtest

from laplace_debias.metrics import reliability_curve
from laplace_debias.report.page.names import number
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.page.run_folder import Run
from laplace_debias.report.style import INK

_BINS = 15
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
    probs, labels = found
    curve = reliability_curve(torch.from_numpy(probs), torch.from_numpy(labels), _BINS)
    counts = np.rint(curve.fraction.numpy() * len(labels)).astype(int)
    filled = counts > 0
    counts, confidence = counts[filled], curve.confidence.numpy()[filled]
    observed = curve.accuracy.numpy()[filled]
    intervals = [
        binomtest(round(share * count), int(count)).proportion_ci(method="wilson")
        for share, count in zip(observed, counts, strict=True)
    ]
    low, high = (np.array([getattr(ends, end) for ends in intervals]) for end in ("low", "high"))
    panel = Panel(f"reliability-{data}-{look.key}", 3.9, (3.4, 1))
    top, bottom = panel.axes
    top.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    top.fill_between(confidence, low, high, color=look.colour, alpha=0.25, linewidth=0)
    top.plot(confidence, observed, color=look.colour, marker=look.marker, markersize=4.5)
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="Accuracy")
    top.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    edges = curve.edges.numpy()
    left = edges[:-1][filled]
    bottom.bar(left, counts, width=0.92 / _BINS, align="edge", color=look.colour, alpha=0.85)
    bottom.set(xlabel="Confidence", ylabel="Examples")
    bottom.set_ylim(0, counts.max() * 1.08)
    bottom.yaxis.get_major_locator().set_params(nbins=2)
    bottom.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    texts = [
        f"{count:,} examples\nconfidence {_percent(sure)}\naccuracy {_percent(share)} "
        f"({_percent(least)} … {_percent(most)})"
        for count, sure, share, least, most in zip(
            counts, confidence, observed, low, high, strict=True
        )
    ]
    panel.note(top, look.key, confidence, observed, texts)
    panel.note(bottom, look.key, left + 0.5 / _BINS, counts, texts)
    gap = float((counts * np.abs(confidence - observed)).sum() / counts.sum())
    lean = float((counts * (confidence - observed)).sum() / counts.sum())
    tends = "over-confident" if lean > 0 else "under-confident"
    return panel.finish(
        look.label,
        f"Reliability diagram of {look.label}: mean gap between confidence and accuracy "
        f"{_percent(gap)}.",
        method=look.key,
        note=f"mean gap {_percent(gap)}, on the whole {tends} by {_percent(abs(lean))}",
    )


def risk_coverage(run: Run, methods: dict[str, Look], data: str, title: str) -> Picture | None:
    """Error rate among the most confident examples against their share, all methods.

    Examples of equal confidence are kept or refused together.

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
        panel.of(key, *ax.plot(share, risk, color=look.colour, linestyle=look.dashes, lw=1.6))
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
        axis.set_major_formatter(PercentFormatter(1))
    alt = f"Error rate against the share of examples kept; of all examples: {', '.join(ends)}."
    return panel.finish(title, alt)


def _risk_curve(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares kept and error rates among them, at most 200 places."""
    confidence = probs.max(1)
    order = np.argsort(-confidence, kind="stable")
    wrong = (probs.argmax(1) != labels)[order]
    last_of_ties = np.append(np.diff(confidence[order]) != 0, True)
    kept = np.flatnonzero(last_of_ties) + 1
    share, risk = kept / len(labels), np.cumsum(wrong)[kept - 1] / kept
    # The error rate of a handful of examples says nothing.
    enough = kept >= min(50, len(labels))
    share, risk = share[enough], risk[enough]
    few = np.unique(np.searchsorted(share, _SHARES).clip(max=len(share) - 1))
    return share[few], risk[few]


def _percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"
