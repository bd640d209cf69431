"""What pictures of the bias share: markers with their legend; trends (Figures 21 and 22)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from laplace_debias.experiments.bias.bias_rows import FULL, OTHER, PERCENTILES, SAME
from laplace_debias.report.style import OKABE_ITO, add_legend, new_panels, style_axes

COLOURS = {SAME: OKABE_ITO["orange"], OTHER: OKABE_ITO["sky blue"], FULL: OKABE_ITO["black"]}
"""By what a slope or curvature was measured on."""

_MARKERS = {SAME: "o", OTHER: ".", FULL: "x"}
_AREAS = {SAME: 26, OTHER: 22, FULL: 34}
_DODGE = 0.06


def add_marker_legend(figure: Figure) -> None:
    """Adds a legend above the panels: what the markers stand for."""
    handles = [
        Line2D([], [], linestyle="", marker=_MARKERS[name], color=colour, label=name)
        for name, colour in COLOURS.items()
    ]
    add_legend(figure, handles, columns=3)


def add_points(ax: Axes, rows: Sequence[dict[str, Any]], column: str, area: float = 1.0) -> None:
    """Adds a marker for each row at its `index`, by what it was measured on.

    Args:
        ax: The axes.
        rows: Rows with `index`, `measured_on` and the column.
        column: What is drawn.
        area: Of the markers, relative to the usual ones.
    """
    for name in (OTHER, FULL, SAME):
        chosen = [row for row in rows if row["measured_on"] == name]
        ax.scatter(
            [row["index"] for row in chosen],
            [row[column] for row in chosen],
            s=area * _AREAS[name],
            marker=_MARKERS[name],
            color=COLOURS[name],
            zorder=2.5,
        )


def trend_figure(
    summary: Sequence[dict[str, Any]], x: str, label: str, quantities: Sequence[str]
) -> Figure:
    """Relative errors on the mini-batch itself: a dot is the mean, a bar two percentiles.

    Args:
        summary: Rows of `summary_of`, with one more column.
        x: That column, of positive numbers; its axis is logarithmic.
        label: Label of its axis.
        quantities: `slope`, `curvature` or both, a panel each.
    """
    figure, (panels,) = new_panels(1, len(quantities), (4.2 * len(quantities), 3.3))
    draws = sorted({row["draw"] for row in summary})
    for ax, quantity in zip(panels, quantities, strict=True):
        for place, draw in enumerate(draws):
            rows = [r for r in summary if r["quantity"] == quantity and r["draw"] == draw]
            centres = np.array([row[x] for row in rows], dtype=float)
            means = np.array([row["same_mean_error"] for row in rows])
            low, high = (np.array([row[f"same_p{p}"] for row in rows]) for p in PERCENTILES)
            shift = np.exp(_DODGE * (place - (len(draws) - 1) / 2))
            ax.vlines(centres * shift, low, high, color=OKABE_ITO["orange"], linewidth=1.4)
            ax.plot(
                centres * shift,
                means,
                linestyle="",
                marker="o",
                markersize=4.5,
                color=OKABE_ITO["orange"],
            )
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_yscale("symlog", linthresh=1.0)
        ax.set_xlabel(label)
        ax.set_ylabel(f"Relative error of the {quantity}")
        style_axes(ax)
    return figure
