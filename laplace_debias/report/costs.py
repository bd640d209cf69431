"""Costs as bars: one panel per cost, one bar per method."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from laplace_debias.report.style import FONT_SIZE, INK, method_colours, new_panels, style_axes

_PANEL_WIDTH, _BAR_HEIGHT = 4.2, 0.42
_LABELS = {"seconds": "Run time (s)", "peak": "Peak memory (MB)"}


def costs_figure(rows: Sequence[Mapping[str, object]], costs: Sequence[str]) -> Figure:
    """Draws costs of methods: a bar to the median over repeats, a whisker from least to greatest.

    Args:
        rows: One row per method and repeat, with the keys `method` and the costs. A cost that is
            None in any row has no panel.
        costs: Which costs, one panel each: `"seconds"`, `"peak"` (MB).

    Returns:
        The picture.

    Raises:
        ValueError: There is no cost that is known of all rows.
    """
    known = [cost for cost in costs if rows and all(row[cost] is not None for row in rows)]
    if not known:
        raise ValueError(
            f"none of the costs {list(costs)} is known in all rows; expected at least one cost"
        )
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    colours = method_colours(methods)
    size = (_PANEL_WIDTH * len(known), _BAR_HEIGHT * len(methods) + 0.9)
    figure, (panels,) = new_panels(1, len(known), size, sharey=True)
    for ax, cost in zip(panels, known, strict=True):
        for place, method in enumerate(methods):
            values = [float(row[cost]) for row in rows if row["method"] == method]  # type: ignore[arg-type]
            middle = median(values)
            spread = ([middle - min(values)], [max(values) - middle])
            ax.barh(place, middle, xerr=spread, color=colours[method], ecolor=INK, height=0.7)
            ax.annotate(
                f"{middle:.3g}" if middle < 1000 else f"{middle:,.0f}",
                (max(values), place),
                xytext=(4, 0),
                textcoords="offset points",
                verticalalignment="center",
                fontsize=FONT_SIZE - 1,
                color=INK,
            )
        ax.margins(x=0.14)
        ax.set_xlim(left=0)
        ax.set_xlabel(_LABELS.get(cost, cost))
        style_axes(ax)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    return figure
