"""Pictures of familiar against strange examples: how uncertain each are."""

from typing import Any

import numpy as np

from laplace_debias.report.names import number, significant
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.run_folder import Run
from laplace_debias.report.style import INK

_BINS = 40
_ROW = 1.42
_NAMES = {
    "epistemic": "Predicted standard deviation without the noise",
    "entropy": "Entropy of the predictive (nats)",
}


def score_histograms(run: Run, methods: dict[str, Look], data: str) -> Picture | None:
    """One row a method: uncertainty on the test set as a line, on another set filled.

    Heights are square roots of shares, so that rare values are seen beside the many near zero.
    """
    score = "epistemic" if run.is_regression else "entropy"
    rows = []
    for key in methods:
        columns = [run.column(key, name, score) for name in (run.test["name"], data)]
        # Of several outputs the mean.
        pair = [x.reshape(len(x), -1).mean(1) for x in columns if x is not None]
        if len(pair) == 2:
            rows.append((key, *pair))
    if not rows:
        return None
    most = max(np.quantile(values, 0.999) for _, *pair in rows for values in pair)
    edges = np.linspace(0, max(float(most), 1e-12), _BINS + 1)
    panel = Panel(f"uncertainty-{data}", 0.75 + 0.66 * len(rows))
    ax = panel.axes[0]
    ax.grid(visible=False, axis="y")
    medians = []
    for index, (key, familiar, other) in enumerate(rows):
        look, base = methods[key], -_ROW * index
        shares = [
            np.histogram(np.minimum(values, edges[-1]), edges)[0] / len(values)
            for values in (other, familiar)
        ]
        tallest = max(share.max() for share in shares)
        filled: dict[str, Any] = {"color": look.colour, "alpha": 0.6, "fill": True, "lw": 0}
        outline: dict[str, Any] = {"color": INK, "lw": 1}
        for who, counts, line in zip((data, "test"), shares, (filled, outline), strict=True):
            heights = base + np.sqrt(counts / tallest)
            panel.of(key, ax.stairs(heights, edges, baseline=base, **line))
            places = np.flatnonzero(counts)[:: max(1, _BINS // 14)]
            texts = [
                f"{look.label}, {who}\n{number(100 * counts[i], 1)} % from "
                f"{significant(edges[i], 2)} to {significant(edges[i + 1], 2)}"
                for i in places
            ]
            panel.note(ax, key, (edges[places] + edges[places + 1]) / 2, heights[places], texts)
        middle = np.median(familiar), np.median(other)
        medians.append(f"{look.label} {significant(middle[0], 2)} and {significant(middle[1], 2)}")
        text = ax.text(0, base + 1.04, look.label, va="bottom", fontsize=9, color=INK)
        panel.of(key, text)
    ax.set(xlim=(0, edges[-1]), xlabel=_NAMES[score], yticks=[])
    ax.set_ylim(_ROW * (1 - len(rows)) - 0.05, _ROW - 0.02)
    ax.spines["left"].set_visible(False)
    alt = f"Histograms of uncertainty, test and {data}; medians: {'; '.join(medians)}."
    return panel.finish(data, alt)
