"""Metrics along the steps of several runs: one panel per metric, one thin line per run."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from laplace_debias.report.style import (
    INK,
    add_legend,
    log_ticks,
    method_colours,
    metric_label,
    new_panels,
    style_axes,
)

_PANEL_WIDTH, _PANEL_HEIGHT = 3.6, 2.9
_DIVERGED, _SHOWN = 2, 100
"""Multiples of the start: beyond the one a loss has a logarithmic axis, the other is its end."""


def trajectory_figure(
    rows: Sequence[Mapping[str, object]],
    metrics: Sequence[str],
    x_key: str = "iteration",
    x_label: str = "CG iteration",
    columns: int = 2,
) -> Figure:
    """Draws metrics along runs, as Figure 5 of the paper does.

    A thin line is a run, of its method's colour; a dot marks its best point and a dashed line the
    start that all runs share. Where a run diverges the loss has a logarithmic axis, cut off at a
    hundred times the start.

    Args:
        rows: One row per step of a run, in order, with the keys `method`, `draw`, `x_key` and the
            metrics. NaN counts as a loss beyond all bounds.
        metrics: Which metrics, one panel each; of names that end in `loss` less is better.
        x_key: What to draw them against.
        x_label: What that is called.
        columns: Panels beside each other.

    Returns:
        The picture.

    Raises:
        ValueError: There are no rows or no metrics.
    """
    if not rows or not metrics:
        raise ValueError("there are no rows or metrics; expected at least one of each")
    runs: dict[tuple[str, object], list[Mapping[str, object]]] = {}
    for row in rows:
        runs.setdefault((str(row["method"]), row["draw"]), []).append(row)
    colours = method_colours(method for method, _ in runs)
    lines = -(-len(metrics) // columns)
    size = (_PANEL_WIDTH * columns, _PANEL_HEIGHT * lines + 0.4)
    figure, panels = new_panels(lines, columns, size, sharex=True)
    for ax, metric in zip(panels.flat, metrics, strict=False):
        for (method, _), of_run in runs.items():
            x = np.array([_number(row[x_key]) for row in of_run])
            y = np.array([_number(row[metric]) for row in of_run])
            _draw_run(ax, x, y, metric, colours[method], method)
        _limit(ax, [np.array([_number(r[metric]) for r in run]) for run in runs.values()], metric)
        ax.set_ylabel(metric_label(metric))
        ax.set_xlabel(x_label)
        style_axes(ax)
    for ax in list(figure.axes)[len(metrics) :]:
        ax.set_axis_off()
    handles = dict(zip(*figure.axes[0].get_legend_handles_labels()[::-1], strict=True))
    add_legend(figure, list(handles.values()), len(handles))
    return figure


def _draw_run(
    ax: Axes, x: np.ndarray, y: np.ndarray, metric: str, colour: str, method: str
) -> None:
    ax.plot(x, y, color=colour, linewidth=1.3, alpha=0.85, label=method)
    finite = np.isfinite(y)
    if not finite.any():
        return
    best = np.nanargmin(np.where(finite, y, np.nan) * (1 if _less_is_better(metric) else -1))
    ax.plot(
        x[best],
        y[best],
        marker="o",
        markersize=4.5,
        color=colour,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3,
    )


def _limit(ax: Axes, runs: list[np.ndarray], metric: str) -> None:
    starts = [y[0] for y in runs if math.isfinite(y[0])]
    if len(set(starts)) == 1:
        ax.axhline(starts[0], color=INK, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1.5)
    if not _less_is_better(metric) or not starts:
        return
    finite = np.concatenate([y[np.isfinite(y)] for y in runs])
    start = max(starts)
    if finite.min() > 0 and finite.max() > _DIVERGED * start:
        ax.set_yscale("log")
        log_ticks(ax.yaxis)
        ax.set_ylim(0.9 * finite.min(), min(1.1 * finite.max(), _SHOWN * start))


def _less_is_better(metric: str) -> bool:
    return metric.endswith("loss")


def _number(value: object) -> float:
    return float(value)  # type: ignore[arg-type]
