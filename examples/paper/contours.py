"""Figure 1: mini-batch and full-batch quadratics in the plane of their largest curvature."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from examples.paper.common import FULL, MINI, Row, load, write
from examples.paper.plots import add_legend, method_colours, new_panels
from examples.paper.quadratics import BiasSettings, mean_cut, measure
from laplace_debias.operators.eigh import eigh
from laplace_debias.quadratic import Cut
from laplace_debias.report.style import style_axes


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """The mini-batches and the planes that are drawn.

    Attributes:
        batch_size: Examples of a mini-batch.
        draws: The number of mini-batches, each with its own panel.
    """

    output: Path = Path("results/contours")
    batch_size: int = 128
    draws: int = 5
    num_directions: int = 2


def run(settings: Settings) -> list[Row]:
    """Find each mini-batch's plane, measure all batches in it, and draw."""
    trained = load(settings)
    pairs: list[tuple[Cut, Cut]] = []
    rows: list[Row] = []
    for draw, measurement in enumerate(measure(trained, settings.batch_size, settings)):
        mini = measurement.cuts[draw]
        full = mean_cut(measurement.cuts)
        pairs.append((mini, full))
        rows.append(
            {
                "draw": draw,
                f"c1 {MINI}": float(mini.curvatures[0, 0]),
                f"c1 {FULL}": float(full.curvatures[0, 0]),
                f"c2 {MINI}": float(mini.curvatures[1, 1]),
                f"c2 {FULL}": float(full.curvatures[1, 1]),
                "ratio": float(mini.curvatures[0, 0] / full.curvatures[0, 0]),
            }
        )
    figure = contour_figure(pairs)
    title = "Curvature along each mini-batch's top two eigenvectors"
    write(settings, {"results": rows}, {"contours": figure}, title)
    return rows


def contour_figure(pairs: list[tuple[Cut, Cut]]) -> Figure:
    """Draw contours at equal levels above the minima (crosses); a dot marks θ₀.

    Args:
        pairs: The quadratics of a mini-batch and of the full batch in the same plane, for each
            panel.
    """
    colours = method_colours((MINI, FULL))
    figure, (panels,) = new_panels(1, len(pairs), (2.6 * len(pairs), 3.1))
    for number, (ax, pair) in enumerate(zip(panels, pairs, strict=True), start=1):
        _draw_contours(ax, pair, list(colours.values()))
        ax.plot(0, 0, marker="o", markersize=4, color="black", zorder=3)
        ax.set(aspect="equal", title=f"mini-batch {number}", xlabel="along u₁", ylabel="along u₂")
        style_axes(ax)
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    add_legend(figure, handles, columns=2)
    return figure


def _draw_contours(ax: Axes, cuts: Sequence[Cut], colours: Sequence[str]) -> None:
    """Draw several quadratics in one panel, which contains the minima with room around them."""
    minima = [_minimizer(cut) for cut in cuts]
    coordinates = [float(minimum.abs().max()) for minimum in minima if minimum is not None]
    reach = 2 * max(coordinates, default=1)
    axis = torch.linspace(-reach, reach, 201, dtype=cuts[0].slopes.dtype)
    heights = [_heights(cut, minimum, axis) for cut, minimum in zip(cuts, minima, strict=True)]
    top = min(float(height.max()) for height in heights)
    levels = [top * (level / 6) ** 2 for level in range(1, 7)]
    for minimum, height, colour in zip(minima, heights, colours, strict=True):
        ax.contour(axis, axis, height, levels, colors=colour, linewidths=1.1)
        if minimum is not None:
            along_u1, along_u2 = minimum.tolist()
            ax.plot(along_u1, along_u2, marker="x", markersize=7, color=colour, zorder=3)


def _minimizer(cut: Cut) -> Tensor | None:
    """Return the Newton step in the plane; None if the curvature (of a Hessian) is not positive."""
    eigenvalues = eigh(cut.curvatures, "the cut")[0]
    if eigenvalues[0] > 0:
        return cut.minimizer()
    return None


def _heights(cut: Cut, minimum: Tensor | None, axis: Tensor) -> Tensor:
    """Compute a quadratic on a grid, minus its minimum, or its smallest value if there is none."""
    values = cut(axis[None, :], axis[:, None])
    lowest = values.min() if minimum is None else cut(*minimum)
    return (values - lowest).cpu()
