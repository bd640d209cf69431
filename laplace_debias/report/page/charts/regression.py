"""Pictures of a regression: quantiles, coverage of intervals, and residuals."""

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import binom, norm

from laplace_debias.report.page.names import number, significant
from laplace_debias.report.page.panel import Look, Panel, Picture, log_axis, percent_axis
from laplace_debias.report.page.run_folder import Run
from laplace_debias.report.style import INK

_LEVELS = np.linspace(0.05, 0.95, 19)
_GROUPS = 15
_DEVIATION = "standard_deviation"


def quantiles(run: Run, look: Look) -> Picture | None:
    """Share of targets below each predicted quantile, with the 95 % range of a calibrated one."""
    found = _standardised(run, look.key)
    if found is None:
        return None
    below = norm.cdf(found)
    observed = (below[:, None] <= _LEVELS).mean(0)
    low, high = binom.interval(0.95, len(found), _LEVELS)
    panel = Panel(f"quantiles-{look.key}")
    ax = panel.axes[0]
    ax.fill_between(
        _LEVELS, low / len(found), high / len(found), color=INK, alpha=0.13, linewidth=0
    )
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.plot(_LEVELS, observed, color=look.colour, marker=look.marker, markersize=4, lw=1.4)
    _percent_axes(ax, "Quantile that was predicted", "Targets below it")
    texts = [
        f"quantile {100 * q:.0f} %\n{100 * o:.1f} % of the targets below it"
        for q, o in zip(_LEVELS, observed, strict=True)
    ]
    panel.note(ax, look.key, _LEVELS, observed, texts)
    gap = number(100 * float(np.abs(observed - _LEVELS).mean()), 1)
    return panel.finish(
        look.label,
        f"Calibration of the quantiles of {look.label}: mean gap {gap} %.",
        method=look.key,
        note=f"mean gap {gap} %",
    )


def coverage(run: Run, methods: dict[str, Look]) -> Picture | None:
    """Share of targets within the central interval of each level, all methods."""
    panel = Panel("coverage")
    ax = panel.axes[0]
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    told = []
    for key, look in methods.items():
        found = _standardised(run, key)
        if found is None:
            continue
        level = 2 * norm.cdf(np.abs(found)) - 1
        observed = (level[:, None] <= _LEVELS).mean(0)
        panel.of(key, *ax.plot(_LEVELS, observed, lw=1.5, markersize=3.6, **look.marked))
        texts = [
            f"{look.label}\n{100 * q:.0f} % interval holds {100 * o:.1f} % of the targets"
            for q, o in zip(_LEVELS, observed, strict=True)
        ]
        panel.note(ax, key, _LEVELS, observed, texts)
        told.append(f"{look.label} {100 * observed[-1]:.0f} %")
    if not told:
        return None
    _percent_axes(ax, "Level of the interval", "Targets within it")
    alt = f"Coverage against level; of the 95 % interval: {', '.join(told)}."
    return panel.finish("Coverage of intervals", alt)


def residuals(run: Run, methods: dict[str, Look]) -> Picture | None:
    """Root mean squared residual against predicted standard deviation, in groups of equal size."""
    panel = Panel("residuals")
    ax = panel.axes[0]
    ends, told = [], []
    for key, look in methods.items():
        found = [run.column(key, run.test, name) for name in ("target", "mean", _DEVIATION)]
        if any(column is None for column in found):
            continue
        target, mean, deviation = (column.ravel() for column in found if column is not None)
        order = np.argsort(deviation, kind="stable")
        groups = np.array_split(order, min(_GROUPS, max(1, len(order) // 20)))
        if np.ptp(deviation) < 1e-9 * deviation.max():
            groups = [order]  # the same everywhere: there is nothing to sort by
        said = np.array([np.sqrt((deviation[group] ** 2).mean()) for group in groups])
        was = np.array([np.sqrt(((target - mean)[group] ** 2).mean()) for group in groups])
        panel.of(key, *ax.plot(said, was, lw=1.2, markersize=4.5, **look.marked))
        texts = [
            f"{look.label}\npredicted {significant(s)}, residuals {significant(w)}"
            for s, w in zip(said, was, strict=True)
        ]
        panel.note(ax, key, said, was, texts)
        ends += [said, was]
        told.append(f"{look.label} over {len(groups)} groups of examples")
    if not ends:
        return None
    every = np.concatenate(ends)
    low, high = every[every > 0].min() / 1.3, every.max() * 1.3
    ax.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    for axis in (ax.xaxis, ax.yaxis):
        log_axis(axis, low, high)
    ax.set(xlim=(low, high), ylim=(low, high))
    ax.set(xlabel="Predicted standard deviation", ylabel="Residuals, root mean square")
    alt = f"Residuals against predicted standard deviation: {'; '.join(told)}."
    return panel.finish("Residuals", alt)


def _standardised(run: Run, method: str) -> np.ndarray | None:
    """Residuals in predicted standard deviations; the predictive is a normal distribution."""
    found = [run.column(method, run.test, name) for name in ("target", "mean", _DEVIATION)]
    if any(column is None for column in found):
        return None
    target, mean, deviation = (column.ravel() for column in found if column is not None)
    return (target - mean) / deviation


def _percent_axes(ax: Axes, across: str, up: str) -> None:
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=across, ylabel=up)
    for axis in (ax.xaxis, ax.yaxis):
        percent_axis(axis)
