"""Small figures in the style of the page."""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from laplace_debias.report.style import INK, OKABE_ITO, style_axes
from laplace_debias.runs.records import MethodRecord
from laplace_debias.runs.wording import power_of_ten

_WIDTH = 4.4  # inches: 317 units of its SVG
_UNITS_PER_INCH = 72
_COLOURS = (
    "#7F7F7F",
    *(OKABE_ITO[name] for name in ("orange", "sky blue", "blue", "green", "purple", "vermillion")),
)
_MARKERS = "osD^vPX"
_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
# Matplotlib settings that must be active while panels are created and finished.
SETTINGS: Any = {
    "svg.fonttype": "none",
    # Users choose the labels of methods and sets, so print dollar signs as they are instead of
    # starting a formula.
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **{f"{axis}tick.{level}.size": 3 for axis in "xy" for level in ("major", "minor")},
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn: colour, marker and dashes.

    Marker and dashes, which are in matplotlib's notation, distinguish methods without colour.
    """

    key: str
    label: str
    colour: str
    marker: str
    dashes: Any

    @property
    def line_options(self) -> dict[str, Any]:
        """Matplotlib's options for a line with markers."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}


class _Note(NamedTuple):
    """A text that belongs to a point of a method, in the coordinates of the axes' data."""

    axes: Axes
    method: str
    x: float
    y: float
    text: str


class Point(NamedTuple):
    """A point at which the page shows values; x and y are SVG units from the figure's top left."""

    x: float
    y: float
    method: str
    text: str


@dataclass(frozen=True)
class Picture:
    """A finished figure; `alt` describes it for readers who cannot see it.

    The page shows values at `points`. `method` is None if the figure shows several methods.
    """

    name: str
    title: str
    alt: str
    svg: str
    points: tuple[Point, ...]
    method: str | None = None
    note: str = ""


def looks(methods: Iterable[MethodRecord]) -> dict[str, Look]:
    """Choose a look for each method, by its key, so that it is the same in every figure."""
    styles = zip(
        itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), itertools.cycle(_STYLES), strict=False
    )
    return {
        method.key: Look(method.key, method.label, colour=colour, marker=marker, dashes=dashes)
        for method, (colour, marker, dashes) in zip(methods, styles, strict=False)
    }


class Panel:
    """A figure that is being drawn. Its axes share the x-axis. Sizes are in inches.

    Identifiers within the SVG are derived from the name of the figure, so that it is identical each
    time it is drawn. If no margins are given, matplotlib's constrained layout chooses them;
    however, it can collapse low axes, depending on their tick labels.
    """

    def __init__(
        self,
        name: str,
        height: float = 3.2,
        heights: Sequence[float] = (1,),
        margins: Mapping[str, float] | None = None,
    ) -> None:
        self.name = name
        layout = None
        grid_options: dict[str, Any] = {"height_ratios": list(heights)}
        if margins:
            grid_options |= margins
        else:
            layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.04, hspace=0.03)
        self._figure = Figure((_WIDTH, height), _UNITS_PER_INCH, layout=layout)
        grid = self._figure.subplots(
            len(heights), 1, squeeze=False, sharex=True, gridspec_kw=grid_options
        )
        self.axes: list[Axes] = list(grid[:, 0])
        for ax in self.axes:
            style_axes(ax)
        self._numbers = itertools.count()
        self._notes: list[_Note] = []

    def assign(self, method: str, *artists: Artist) -> None:
        """Assign artists to a method, so that the page shows and hides them with the method."""
        for artist in artists:
            artist.set_gid(f"method:{method}:{next(self._numbers)}")

    def note(
        self, ax: Axes, method: str, x: Iterable[Any], y: Iterable[Any], texts: Sequence[str]
    ) -> None:
        """Add texts that the page shows when a reader points at parts of the figure."""
        for x_of_text, y_of_text, text in zip(x, y, texts, strict=True):
            if np.isfinite([x_of_text, y_of_text]).all():
                self._notes.append(_Note(ax, method, x_of_text, y_of_text, text))

    def finish(
        self, title: str, alt: str, *, method: str | None = None, note: str = ""
    ) -> Picture | None:
        """Finish the figure and return it, or None if it has no notes and so shows no data."""
        if not self._notes:
            return None
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        top = self._figure.get_figheight() * _UNITS_PER_INCH
        points = []
        for point_note in self._notes:
            right, up = point_note.axes.transData.transform((point_note.x, point_note.y))
            points.append(
                Point(
                    x=round(float(right), 1),
                    y=round(float(top - up), 1),
                    method=point_note.method,
                    text=point_note.text,
                )
            )
        return Picture(
            name=self.name,
            title=title,
            alt=alt,
            svg=buffer.getvalue(),
            points=tuple(points),
            method=method,
            note=note,
        )


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Make an axis logarithmic, with at most six labels (as powers of ten if numbers are long)."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    ratio = high / low if high > low > 0 else math.inf
    has_powers = False
    if ratio < 30:
        locator = LogLocator(subs=(1, 2, 5))
    else:
        num_decades = math.log10(ratio) if ratio < math.inf else 1
        locator = LogLocator(base=10.0 ** max(1, math.ceil(num_decades / 6)), subs=(1,))
        has_powers = low < 1e-3 or high > 1e4
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())

    def label(value: float, _: int | None) -> str:
        return power_of_ten(round(math.log10(value))) if has_powers else f"{value:,.10g}"

    axis.set_major_formatter(FuncFormatter(label))


def percent_axes(*axes: Axis) -> None:
    """Label axes of fractions in percent."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.10g} %"))


def draw_diagonal(ax: Axes, low: float = 0, high: float = 1) -> None:
    """Draw the line on which x and y are equal."""
    ax.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=(0, (4, 3)))
