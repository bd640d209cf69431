"""Pictures of familiar against strange examples: how uncertain each are, and ROC curves."""

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter
from sklearn.metrics import roc_curve

from laplace_debias.report.page.names import number, significant
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.page.run_folder import Run
from laplace_debias.report.style import INK

_BINS = 40
_RATES = np.linspace(0, 1, 151)
_FALSE_ALARMS = np.linspace(0.05, 0.95, 19)


def score_name(run: Run) -> tuple[str, str]:
    """The column of the predictions that says how uncertain an example is, and its name."""
    if run.is_regression:
        return "epistemic", "Predicted standard deviation without the noise"
    return "entropy", "Entropy of the predictive (nats)"


def score_histograms(run: Run, methods: dict[str, Look], data: str, title: str) -> Picture | None:
    """One row a method: uncertainty on the test set in grey, on another set in colour.

    Args:
        run: The run.
        methods: Looks by key.
        data: Name of the other set.
        title: What the picture is called.
    """
    column, label = score_name(run)
    rows = []
    for key in methods:
        pair = [run.column(key, name, column) for name in (run.test, data)]
        if pair[0] is not None and pair[1] is not None:
            rows.append((key, pair[0], pair[1]))
    if not rows:
        return None
    most = max(np.quantile(values, 0.999) for _, *pair in rows for values in pair)
    edges = np.linspace(0, max(float(most), 1e-12), _BINS + 1)
    panel = Panel(f"uncertainty-{data}", 0.75 + 0.62 * len(rows))
    ax = panel.axes[0]
    ax.grid(visible=False, axis="y")
    medians = []
    for index, (key, familiar, other) in enumerate(rows):
        look, base = methods[key], -1.25 * index
        for values, colour, alpha in ((familiar, INK, 0.22), (other, look.colour, 0.55)):
            counts = np.histogram(np.minimum(values, edges[-1]), edges)[0]
            heights = base + counts / counts.max()
            panel.of(
                key,
                ax.stairs(
                    heights, edges, baseline=base, fill=True, color=colour, alpha=alpha, lw=0
                ),
            )
            # A thin line keeps the shape where the two lie above each other.
            panel.of(key, ax.stairs(heights, edges, baseline=base, color=colour, lw=0.9))
            places = np.flatnonzero(counts)[:: max(1, _BINS // 14)]
            who = "test" if values is familiar else data
            texts = [
                f"{look.label}, {who}\n{number(100 * counts[i] / len(values), 1)} % from "
                f"{significant(edges[i], 2)} to {significant(edges[i + 1], 2)}"
                for i in places
            ]
            panel.note(ax, key, (edges[places] + edges[places + 1]) / 2, heights[places], texts)
        middle = np.median(familiar), np.median(other)
        medians.append(f"{look.label} {significant(middle[0], 2)} and {significant(middle[1], 2)}")
        text = ax.text(
            edges[-1], base + 1.0, look.label, ha="right", va="top", fontsize=9, color=INK
        )
        panel.of(key, text)
    ax.set(xlim=(0, edges[-1]), ylim=(-1.25 * len(rows) + 1.2, 1.1), yticks=[], xlabel=label)
    ax.spines["left"].set_visible(False)
    alt = f"Histograms of uncertainty, test and {data}; medians: {'; '.join(medians)}."
    return panel.finish(title, alt)


def roc(run: Run, methods: dict[str, Look], data: str, title: str) -> Picture | None:
    """ROC curves of all methods: out-of-distribution examples found against false alarms.

    Args:
        run: The run.
        methods: Looks by key.
        data: Name of the out-of-distribution set.
        title: What the picture is called.
    """
    column, _ = score_name(run)
    panel = Panel(f"roc-{data}")
    ax = panel.axes[0]
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    areas = []
    for key, look in methods.items():
        familiar, strange = (run.column(key, name, column) for name in (run.test, data))
        if familiar is None or strange is None:
            continue
        is_strange = np.repeat([0, 1], [len(familiar), len(strange)])
        false, true, _ = roc_curve(is_strange, np.concatenate([familiar, strange]))
        panel.of(key, *ax.plot(_RATES, np.interp(_RATES, false, true), **_line(look)))
        found = np.interp(_FALSE_ALARMS, false, true)
        texts = [
            f"{look.label}\nfinds {100 * t:.0f} % at {100 * f:.0f} % false alarms"
            for f, t in zip(_FALSE_ALARMS, found, strict=True)
        ]
        panel.note(ax, key, _FALSE_ALARMS, found, texts)
        areas.append(_area(run, look, data))
    if not areas:
        return None
    ax.set(xlim=(0, 1), ylim=(0, 1.005), xlabel="False alarms among test examples")
    ax.set_ylabel(f"Found of {data}" if len(data) < 25 else "Found")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    areas = [area for area in areas if area]
    told = f"; area below: {', '.join(areas)}" if areas else ""
    return panel.finish(title, f"ROC curves of {data} against the test set{told}.")


def _line(look: Look) -> dict[str, object]:
    return {"color": look.colour, "linestyle": look.dashes, "lw": 1.6}


def _area(run: Run, look: Look, data: str) -> str:
    rows = run.rows
    rows = rows[(rows["method"] == look.key) & (rows["set"] == data) & (rows["metric"] == "auroc")]
    rows = rows[main_score(rows)]
    return f"{look.label} {number(100 * rows['value'].iloc[0], 1)} %" if len(rows) else ""


def main_score(rows: pd.DataFrame) -> pd.Series:
    """Which rows of out-of-distribution metrics use the score that the page shows first."""
    preferred = [name for name in ("entropy", "variance") if (rows["score"] == name).any()]
    if not preferred:
        return rows["score"].isna()
    return rows["score"] == preferred[0]
