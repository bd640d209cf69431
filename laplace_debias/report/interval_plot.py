"""Values with confidence intervals, a row per method."""

import os
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from laplace_debias.report.style import (
    FONT_SIZE,
    INK,
    OKABE_ITO,
    check_suffix,
    new_panels,
    save,
    style_axes,
)
from laplace_debias.report.tables import Row

_PANEL_WIDTH, _ROW_HEIGHT, _LABEL_WIDTH = 3.4, 0.24, 3.2


def interval_figure(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    columns: Mapping[str, str],
    highlight: str | None = None,
) -> Figure:
    """Draws a dot with its interval for every method, one panel per column.

    Args:
        rows: One row per method, top to bottom, with the keys `method`, each column and the half
            width of its interval, `<column>_error` (None for no interval).
        path: Where to write the picture, PNG or PDF by its suffix.
        columns: What to draw, with the axis's label.
        highlight: A method whose value goes through its panel as a line.

    Returns:
        The picture as it was written.

    Raises:
        ValueError: There are no rows or columns, or the suffix is unknown.
    """
    check_suffix(path)
    if not rows or not columns:
        raise ValueError("there are no rows or columns; expected at least one of each")
    size = (_LABEL_WIDTH + _PANEL_WIDTH * len(columns), 0.9 + _ROW_HEIGHT * len(rows))
    figure, (panels,) = new_panels(1, len(columns), size, sharey=True)
    heights = range(len(rows), 0, -1)
    for ax, (column, label) in zip(panels, columns.items(), strict=True):
        for height, row in zip(heights, rows, strict=True):
            value, error = row[column], row.get(f"{column}_error")
            assert isinstance(value, (int, float))
            is_highlighted = row["method"] == highlight
            colour = OKABE_ITO["orange" if is_highlighted else "blue"]
            if is_highlighted:
                ax.axvline(value, color=colour, linewidth=1.0, linestyle=(0, (5, 2)), zorder=1.5)
            ax.errorbar(
                [value],
                [height],
                xerr=[error] if isinstance(error, (int, float)) else None,
                marker="o",
                markersize=4.5,
                linewidth=1.4,
                color=colour,
            )
        ax.set_xlim(left=0)
        ax.set_xlabel(label)
        style_axes(ax)
    panels[0].set_yticks(
        list(heights),
        [str(row["method"]) for row in rows],
        fontsize=FONT_SIZE - 1,
        color=INK,
    )
    save(figure, path)
    return figure
