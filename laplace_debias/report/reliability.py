"""Reliability diagrams: accuracy against confidence, one panel per method."""

import os
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from laplace_debias.metrics import accuracy, ece, reliability_curve
from laplace_debias.metrics.calibration import ReliabilityCurve
from laplace_debias.report.style import (
    FONT_SIZE,
    INK,
    OKABE_ITO,
    add_legend,
    check_suffix,
    method_colours,
    new_panels,
    save,
    style_axes,
)

_PANEL_WIDTH, _HEIGHT = 2.7, 4.2
_GAP_EDGE = OKABE_ITO["vermillion"]
_GAP_FACE = to_rgba("white", 0.75)
_GAP_HATCH = "//////"
_TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)


def reliability_figure(
    panels: Mapping[str, tuple[Float[Tensor, "n *classes"], Integer[Tensor, " n"]]],
    path: str | os.PathLike[str],
    num_bins: int = 15,
) -> Figure:
    """Draws a reliability diagram per method, and below it how many examples have which confidence.

    A bar is the accuracy of the examples in one bin of the confidence; the hatched part is its gap
    to their mean confidence, which the bar meets if the method is calibrated. The ECE is the mean
    of the gaps, weighed by the histogram.

    Args:
        panels: By method, probabilities `[n, classes]` (or `[n]` of class 1) and labels `[n]`.
        path: Where to write the picture, PNG or PDF by its suffix.
        num_bins: Number of equal bins of the confidence.

    Returns:
        The picture as it was written.

    Raises:
        TypeError: Probabilities or labels are no tensor.
        ValueError: There are no panels, probabilities are outside of 0 … 1, labels do not fit them,
            `num_bins` < 1, or the suffix is unknown.

    Reference:
        Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML, 2017, figure
        1.
    """
    check_suffix(path)
    if not panels:
        raise ValueError("`panels` is empty; expected predictions of at least one method.")
    curves = {method: reliability_curve(*panel, num_bins) for method, panel in panels.items()}
    colours = method_colours(panels)
    size = (_PANEL_WIDTH * len(panels) + 0.6, _HEIGHT)
    figure, axes = new_panels(
        2, len(panels), size, sharex=True, sharey="row", height_ratios=(3.2, 1)
    )
    for column, (method, (probs, labels)) in enumerate(panels.items()):
        top, bottom = axes[:, column]
        _draw_gaps(top, curves[method], colours[method])
        _draw_histogram(bottom, curves[method], colours[method])
        top.set_title(method, fontsize=FONT_SIZE + 1, color=INK)
        top.text(
            0.05,
            0.95,
            f"ECE  {ece(probs, labels, num_bins).item():.3f}\n"
            f"Acc  {accuracy(probs, labels).item():.3f}",
            transform=top.transAxes,
            verticalalignment="top",
            fontsize=FONT_SIZE - 0.5,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
        )
    axes[0, 0].set_ylabel("Accuracy", fontsize=FONT_SIZE, color=INK)
    axes[1, 0].set_ylabel("Examples", fontsize=FONT_SIZE, color=INK)
    gap = Patch(
        facecolor=_GAP_FACE, edgecolor=_GAP_EDGE, hatch=_GAP_HATCH, label="gap to confidence"
    )
    bar = Patch(facecolor="#BBBBBB", edgecolor="white", label="accuracy")
    add_legend(figure, [bar, gap, *axes[0, 0].get_lines()], 3 if len(panels) > 1 else 1)
    save(figure, path)
    return figure


def _draw_gaps(ax: Axes, curve: ReliabilityCurve, colour: str) -> None:
    filled = (curve.fraction > 0).cpu().numpy()
    centres, width = _bins(curve)
    observed = curve.accuracy.detach().cpu().numpy()
    confidence = curve.confidence.detach().cpu().numpy()
    ax.bar(
        centres[filled],
        observed[filled],
        width=width,
        color=colour,
        edgecolor="white",
        linewidth=0.6,
        label="accuracy",
    )
    ax.bar(
        centres[filled],
        (confidence - observed)[filled],
        bottom=observed[filled],
        width=width,
        label="gap to confidence",
        facecolor=_GAP_FACE,
        edgecolor=_GAP_EDGE,
        hatch=_GAP_HATCH,
        linewidth=0.8,
    )
    ax.plot(
        [0, 1],
        [0, 1],
        linestyle="--",
        linewidth=1.2,
        color=INK,
        path_effects=[withStroke(linewidth=2.6, foreground="white")],
        label="calibrated",
    )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    ax.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    style_axes(ax)


def _draw_histogram(ax: Axes, curve: ReliabilityCurve, colour: str) -> None:
    centres, width = _bins(curve)
    heights = curve.fraction.detach().cpu().numpy()
    ax.bar(centres, heights, width=width, color=colour, edgecolor="white", linewidth=0.6)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    ax.set_xlabel("Confidence")
    style_axes(ax)


def _bins(curve: ReliabilityCurve) -> tuple[np.ndarray, float]:
    edges = curve.edges.detach().cpu().numpy()
    return (edges[:-1] + edges[1:]) / 2, 1 / (len(edges) - 1)
