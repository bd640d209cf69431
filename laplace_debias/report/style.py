"""How pictures look: one colour per method, names of metrics, and how they are saved.

Neither this file nor the pictures use pyplot, so the user's state is untouched.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

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
"""The palette of Okabe and Ito (2008), which readers with any colour vision can tell apart."""

INK = "#333333"
"""Colour of text and axes."""

GRID = "#E3E3E3"
"""Colour of grid lines."""

FONT_SIZE = 10.0
"""Size of text in points; ticks are a little smaller, titles a little larger."""

_DPI = 150
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
    """The colour of each method, the same in every picture for the four of the paper."""
    others = itertools.cycle(_OTHER_COLOURS)
    return {
        method: _METHOD_COLOURS.get(method) or next(others) for method in dict.fromkeys(methods)
    }


def new_panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, np.ndarray]:
    """A white picture of a size in inches, and its axes `[rows, columns]`."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def log_ticks(axis: Axis, steps: Sequence[int] = (1, 2, 5)) -> None:
    """Plain numbers at the steps of every decade of a logarithmic axis, none between."""
    axis.set_major_locator(LogLocator(subs=tuple(steps)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def style_axes(ax: Axes) -> None:
    """Gives axes the look of this package: a light grid behind, no frame above and to the right."""
    ax.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.tick_params(which="both", labelsize=FONT_SIZE - 1, color=INK, labelcolor=INK)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set(fontsize=FONT_SIZE, color=INK)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture at once and whole, in the format of its suffix; PNG at 150 dots per inch."""
    with written_atomically(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format=Path(path).suffix[1:].lower())
