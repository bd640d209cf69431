"""Figure 1: mini-batch and full-batch quadratics in the plane of their largest curvature."""

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from examples.paper.common import FULL, MINI, Row, load, write
from examples.paper.plots import add_legend, method_colours, new_panels
from examples.paper.quadratics import BiasSettings, mean_cut, measure
from laplace_debias.operators.eigh import eigh
from laplace_debias.quadratic import Cut
from laplace_debias.report.style import style_axes


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """What to draw.

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
    _, cuts = measure(trained, settings.batch_size, settings)
    pairs = [(of_draw[draw], mean_cut(of_draw)) for draw, of_draw in enumerate(cuts)]
    rows = [
        {
            "draw": draw,
            **{f"c{i + 1} {name}": float(cut.curvatures[i, i]) for i in (0, 1) for name, cut in ab},
            "ratio": float(mini.curvatures[0, 0] / full.curvatures[0, 0]),
        }
        for draw, (mini, full) in enumerate(pairs)
        for ab in [((MINI, mini), (FULL, full))]
    ]
    figure = contour_figure(pairs)
    title = "Curvature along each mini-batch's top two eigenvectors"
    write(settings, {"results": rows}, {"contours": figure}, title)
    return rows


def contour_figure(pairs: list[tuple[Cut, Cut]]) -> Figure:
    """Draw contours at equal levels above the minima (crosses); a dot marks θ₀."""
    colours = method_colours((MINI, FULL))
    figure, (panels,) = new_panels(1, len(pairs), (2.6 * len(pairs), 3.1))
    for number, (ax, pair) in enumerate(zip(panels, pairs, strict=True), start=1):
        steps = [_minimizer(cut) for cut in pair]
        reach = 2 * max([float(step.abs().max()) for step in steps if step is not None], default=1)
        axis = torch.linspace(-reach, reach, 201, dtype=pair[0].slopes.dtype)
        values = [cut(axis[None, :], axis[:, None]) for cut in pair]
        heights = [
            (value - (value.min() if step is None else cut(*step))).cpu()
            for cut, step, value in zip(pair, steps, values, strict=True)
        ]
        top = min(float(height.max()) for height in heights)
        levels = [top * (level / 6) ** 2 for level in range(1, 7)]
        for step, height, colour in zip(steps, heights, colours.values(), strict=True):
            ax.contour(axis, axis, height, levels, colors=colour, linewidths=1.1)
            if step is not None:
                ax.plot(*step.tolist(), marker="x", markersize=7, color=colour, zorder=3)
        ax.plot(0, 0, marker="o", markersize=4, color="black", zorder=3)
        ax.set(aspect="equal", title=f"mini-batch {number}", xlabel="along u₁", ylabel="along u₂")
        style_axes(ax)
    handles = [panels[0].plot([], [], color=c, label=name)[0] for name, c in colours.items()]
    add_legend(figure, handles, columns=2)
    return figure


def _minimizer(cut: Cut) -> torch.Tensor | None:
    """Return the Newton step in the plane; None if the curvature (of a Hessian) is not positive."""
    return cut.minimizer() if float(eigh(cut.curvatures, "the cut")[0][0]) > 0 else None
