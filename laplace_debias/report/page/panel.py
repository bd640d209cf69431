"""Small figures in the page's style."""

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
# Matplotlib settings used to create and finish panels.
SETTINGS: Any = {
    "svg.fonttype": "none",
    # Users choose the labels of methods and sets, so print a dollar sign as it is instead of
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
    """The colour, marker and dashes of a method.

    Methods also differ without colour. Marker and dashes are in matplotlib's notation.
    """

    key: str
    label: str
    colour: str
    marker: str
    dashes: Any

    @property
    def marked(self) -> dict[str, Any]:
        """Matplotlib's options of a line with markers."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}


class Point(NamedTuple):
    """A place that shows its values; x and y are SVG units from the top left of the figure."""

    x: float
    y: float
    method: str
    text: str


@dataclass(frozen=True)
class Picture:
    """A finished figure; `alt` describes it to readers who cannot see it.

    `points` are places that show their values; `method` is None if the figure shows several
    methods.
    """

    name: str
    title: str
    alt: str
    svg: str
    points: tuple[Point, ...]
    method: str | None = None
    note: str = ""


def looks(methods: Iterable[MethodRecord]) -> dict[str, Look]:
    """Return the look of each method by its key, which is the same in every figure."""
    styles = zip(
        itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), itertools.cycle(_STYLES), strict=False
    )
    return {
        method.key: Look(method.key, method.label, colour=colour, marker=marker, dashes=dashes)
        for method, (colour, marker, dashes) in zip(methods, styles, strict=False)
    }


class Panel:
    """A picture that is being drawn, of axes that share the x-axis. Sizes are in inches.

    Names within the SVG are derived from the name of the picture, so that they are the same each
    time it is drawn. Without margins, matplotlib's constrained layout chooses the margins. This
    layout may collapse low axes, depending on their tick labels.
    """

    def __init__(
        self,
        name: str,
        height: float = 3.2,
        heights: Sequence[float] = (1,),
        margins: Mapping[str, float] | None = None,
    ) -> None:
        self.name = name
        layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.04, hspace=0.03)
        self._figure = Figure((_WIDTH, height), _UNITS_PER_INCH, layout=None if margins else layout)
        ratios = {"height_ratios": list(heights), **(margins or {})}
        grid = self._figure.subplots(
            len(heights), 1, squeeze=False, sharex=True, gridspec_kw=ratios
        )
        self.axes: list[Axes] = list(grid[:, 0])
        for ax in self.axes:
            style_axes(ax)
        self._numbers = itertools.count()
        self._noted: list[tuple[Axes, str, float, float, str]] = []

    def assign(self, method: str, *artists: Artist) -> None:
        """Assign artists to a method; the page shows and hides them together with the method."""
        for artist in artists:
            artist.set_gid(f"method:{method}:{next(self._numbers)}")

    def note(
        self, ax: Axes, method: str, x: Iterable[Any], y: Iterable[Any], texts: Sequence[str]
    ) -> None:
        """Add texts that the page shows when a reader points at parts of the figure."""
        for place_x, place_y, text in zip(x, y, texts, strict=True):
            if np.isfinite([place_x, place_y]).all():
                self._noted.append((ax, method, place_x, place_y, text))

    def finish(
        self, title: str, alt: str, *, method: str | None = None, note: str = ""
    ) -> Picture | None:
        """Draw the figure; return None if no place has a text."""
        if not self._noted:
            return None
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        top = self._figure.get_figheight() * _UNITS_PER_INCH
        points = []
        for ax, method_noted, x, y, text in self._noted:
            units_x, units_y = ax.transData.transform((x, y))
            points.append(
                Point(round(float(units_x), 1), round(float(top - units_y), 1), method_noted, text)
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
    """Make an axis logarithmic with at most six labels: numbers, or powers of ten if too long."""
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
    """Write shares as percent."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.10g} %"))


def draw_diagonal(ax: Axes, low: float = 0, high: float = 1) -> None:
    """Draw the line on which both axes have the same value."""
    ax.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=(0, (4, 3)))
