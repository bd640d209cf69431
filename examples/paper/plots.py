"""Pictures of several experiments."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from examples.paper.common import FULL, MINI, Row, distinct, select
from examples.paper.quadratics import OTHER, SAME
from laplace_debias.report.style import FONT_SIZE, OKABE_ITO, style_axes

MARKERS = {
    OTHER: (".", 22, OKABE_ITO["sky blue"]),
    FULL: ("x", 34, OKABE_ITO["black"]),
    SAME: ("o", 26, OKABE_ITO["orange"]),
}
"""The marker, area and colour, by the data on which a slope or curvature was measured."""
_METRIC_NAMES = {
    "nll": "NLL (nats) ↓",
    "ece": "ECE ↓",
    "accuracy": "Accuracy ↑",
    "brier": "Brier score ↓",
    "train_loss": "Regularised training loss (nats) ↓",
    "test_loss": "Regularised test loss (nats) ↓",
    "train_accuracy": "Training accuracy ↑",
    "test_accuracy": "Test accuracy ↑",
}
_METRIC_FAMILIES = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
_METHOD_COLOURS = {
    "MAP": "#7F7F7F",
    "vanilla": "#7F7F7F",
    "mini-batch": OKABE_ITO["orange"],
    "single-batch": OKABE_ITO["orange"],
    "debiased": OKABE_ITO["blue"],
    "full-batch": OKABE_ITO["black"],
}
_OTHER_COLOURS = [OKABE_ITO[name] for name in ("green", "purple", "sky blue", "vermillion")]


def method_colours(methods: Iterable[str]) -> dict[str, str]:
    """Return a colour for each method; the four of the paper always have the same colours."""
    other_colours = itertools.cycle(_OTHER_COLOURS)
    colours = {}
    for method in dict.fromkeys(methods):
        if method in _METHOD_COLOURS:
            colours[method] = _METHOD_COLOURS[method]
        else:
            colours[method] = next(other_colours)
    return colours


def new_panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, np.ndarray]:
    """Create a white picture of a size in inches; return it with its axes `[rows, columns]`."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def metric_label(metric: str) -> str:
    """Return the label of a metric on an axis, with an arrow in the direction of better values.

    Args:
        metric: The name of a metric in `laplace_debias.metrics.evaluate`.

    Returns:
        The label; for an unknown metric, its name.
    """
    family, _, name = metric.partition("_")
    if family not in _METRIC_FAMILIES:
        return _METRIC_NAMES.get(metric, metric)
    label = _METRIC_FAMILIES[family]
    if name:
        label += f" ({name})"
    arrow = "↓" if family == "fpr95" else "↑"
    return f"{label} {arrow}"


def add_legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """Add a legend without a frame above the panels.

    Args:
        figure: The picture.
        handles: The artists of the legend, with labels.
        columns: The number of entries per row.
    """
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=FONT_SIZE,
    )


def points_figure(
    rows: Sequence[Row], column: str, quantities: Sequence[str], label: str, log: Sequence[str]
) -> Figure:
    """Draw a marker per row at its `index`, with a panel per quantity and value of a column.

    Args:
        rows: Rows with `index`, `measured_on`, the column and the quantities.
        column: The name of this column, "draw" or "batch_size".
        quantities: The quantities to draw, from top to bottom.
        label: The label of the horizontal axes.
        log: The quantities that have a logarithmic axis if all values are positive.
    """
    values = sorted({row[column] for row in rows})
    size = (max(5.6, 3.2 * len(values)), 2.7 * len(quantities) + 0.4)
    figure, panels = new_panels(len(quantities), len(values), size, sharex="col", sharey="row")
    for quantity, panel_row in zip(quantities, panels, strict=True):
        for value, ax in zip(values, panel_row, strict=True):
            _scatter(ax, select(rows, **{column: value}), quantity)
            if quantity not in log:
                ax.axhline(0, color="black", linewidth=0.8)
            elif all(row[quantity] > 0 for row in rows):
                ax.set_yscale("log")
            style_axes(ax)
        panel_row[0].set_ylabel(quantity.replace("_", " ").capitalize())
    for value, top, bottom in zip(values, panels[0], panels[-1], strict=True):
        top.set_title(_panel_title(column, value), fontsize=FONT_SIZE)
        bottom.set_xlabel(label)
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=name)
        for name, (marker, _, colour) in MARKERS.items()
    ]
    add_legend(figure, handles, columns=3)
    return figure


def _panel_title(column: str, value: int) -> str:
    """Return the title of the panel that shows the rows with this value."""
    if column == "draw":
        return f"directions of mini-batch {value + 1}"
    return f"mini-batches of {value} images"


def _scatter(ax: Axes, rows: Sequence[Row], quantity: str) -> None:
    """Draw a quantity against `index`, with the markers of the data on which it was measured."""
    for name, (marker, area, colour) in MARKERS.items():
        points = [row for row in select(rows, measured_on=name) if row[quantity] is not None]
        indices = [row["index"] for row in points]
        values = [row[quantity] for row in points]
        ax.scatter(indices, values, s=area, marker=marker, color=colour, zorder=2.5)


def trend_figure(summary: Sequence[Row], x: str, label: str) -> Figure:
    """Draw relative errors on the mini-batch itself: dots for means, bars for 10 % to 90 %.

    Args:
        summary: Rows with `quantity`, `draw`, `mean error`, `p10`, `p90` and the column.
        x: The column on the horizontal axis, which is logarithmic.
        label: The label of this axis.
    """
    orange = OKABE_ITO["orange"]
    quantities = sorted({row["quantity"] for row in summary})
    draws = sorted({row["draw"] for row in summary})
    figure, (panels,) = new_panels(1, len(quantities), (4.2 * len(quantities), 3.3))
    for ax, quantity in zip(panels, quantities, strict=True):
        for position, draw in enumerate(draws):
            rows = select(summary, quantity=quantity, draw=draw)
            # The draws are shifted, so that their bars do not overlap.
            shift = np.exp(0.06 * (position - (len(draws) - 1) / 2))
            centres = shift * np.array([float(row[x]) for row in rows])
            low = [row["p10"] for row in rows]
            high = [row["p90"] for row in rows]
            ax.vlines(centres, low, high, color=orange, linewidth=1.4)
            ax.plot(centres, [row["mean error"] for row in rows], "o", markersize=4.5, color=orange)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(xscale="log", xlabel=label, ylabel=f"Relative error of the {quantity}")
        ax.set_yscale("symlog", linthresh=1.0)
        style_axes(ax)
    return figure


def lines_figure(
    rows: Sequence[Row], column: str, metrics: Sequence[str], x: str, label: str, log: bool = False
) -> Figure:
    """Draw metrics against a column, with a line per method and draw, dashed if `x` is missing.

    Args:
        rows: Rows with `method`, `draw`, the columns and the metrics.
        column: A column; there is a row of panels for each of its values.
        metrics: The metrics; there is a column of panels for each.
        x: The column on the horizontal axis.
        label: The label of the axis.
        log: Whether the axis is logarithmic.
    """
    colours = method_colours(row["method"] for row in rows)
    values = list(dict.fromkeys(row[column] for row in rows))
    size = (3.6 * len(metrics), 2.8 * len(values))
    figure, panels = new_panels(len(values), len(metrics), size)
    for value, panel_row in zip(values, panels, strict=True):
        for metric, ax in zip(metrics, panel_row, strict=True):
            panel_rows = [
                row for row in select(rows, **{column: value}) if row.get(metric) is not None
            ]
            ax.set_visible(bool(panel_rows))
            for method, draw in distinct(panel_rows, "method", "draw"):
                line = select(panel_rows, method=method, draw=draw)
                _draw_line(ax, line, x, metric, color=colours[method], linewidth=1.2)
            ax.set(xlabel=label, ylabel=metric_label(metric))
            ax.set_title(value, fontsize=FONT_SIZE)
            if log:
                ax.set_xscale("log")
            if "loss" in metric:
                ax.set_yscale("log")
            style_axes(ax)
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    add_legend(figure, handles, columns=len(colours))
    return figure


def _draw_line(ax: Axes, rows: Sequence[Row], x: str, metric: str, **style: Any) -> None:
    """Draw a metric against a column; a single row without this column is a horizontal line."""
    values = [row[metric] for row in rows]
    if rows[0][x] is None:
        ax.axhline(values[0], linestyle="--", **style)
    else:
        ax.plot([row[x] for row in rows], values, **style)


def bars_figure(rows: Sequence[Row], column: str, label: str) -> Figure:
    """Draw values with their intervals by method; the value of the mini-batch is a line.

    Args:
        rows: Rows with `method`, the column and `<column> ±`.
        column: The column to draw.
        label: The label of the axis.
    """
    figure, ((ax,),) = new_panels(1, 1, (6.4, 0.3 * len(rows) + 1.2))
    upwards = list(reversed(rows))
    for height, row in enumerate(upwards):
        colour = OKABE_ITO["orange" if row["method"] == MINI else "blue"]
        half_width = row[f"{column} ±"]
        ax.errorbar(row[column], height, xerr=half_width, fmt="o", color=colour, markersize=4)
    ax.set_yticks(range(len(rows)), [row["method"] for row in upwards])
    ax.axvline(1.0, color=OKABE_ITO["orange"], linewidth=0.8)
    ax.set_xlabel(label)
    style_axes(ax)
    return figure
