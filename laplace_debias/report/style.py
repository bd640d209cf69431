"""The style of pictures, and a function that saves them.

Pictures are made without pyplot, so its global state is not changed.
"""

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from laplace_debias.system.files import written_atomically

OKABE_ITO = {
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
}
"""The palette of Okabe and Ito (2008), whose colours are distinguishable with any colour vision."""

INK = "#333333"
"""Colour of text and axes."""

GRID = "#E3E3E3"
"""Colour of grid lines."""

FONT_SIZE = 10.0
"""Size of text in points. Tick labels are a little smaller, and titles a little larger."""

_DPI = 150


def style_axes(ax: Axes) -> None:
    """Style axes with a light grid and without a frame at the top and at the right."""
    ax.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.tick_params(which="both", labelsize=FONT_SIZE - 1, color=INK, labelcolor=INK)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set(fontsize=FONT_SIZE, color=INK)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture atomically, in the format that the suffix of the path specifies.

    PNG files have 150 dots per inch.
    """
    with written_atomically(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format=Path(path).suffix[1:].lower())
