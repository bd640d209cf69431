"""Figure 1: mini-batch and full-batch quadratics in the plane of largest curvature."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from laplace_debias.experiments.bias.cuts import (
    BiasSettings,
    mean_cut,
    stored_cuts,
    stored_directions,
)
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import begin
from laplace_debias.experiments.shared.store import Rows
from laplace_debias.operators.eigh import eigvalsh
from laplace_debias.quadratic import Cut
from laplace_debias.report.style import (
    FONT_SIZE,
    add_legend,
    method_colours,
    new_panels,
    style_axes,
)
from laplace_debias.report.tables import print_table

_LEVELS = 6
_REACH = 2.0
"""Radius of the picture, in multiples of the distance to the minimum."""


@dataclass(frozen=True, kw_only=True)
class ContoursSettings(BiasSettings):
    """What is drawn.

    Attributes:
        batch_size: Examples of a mini-batch.
        draws: How many mini-batches, a panel each.
    """

    output: Path = Path("results/contours")
    batch_size: int = 128
    draws: int = 5
    num_directions: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_batches(self.batch_size)
        if self.num_directions != 2:
            raise ValueError(
                f"num_directions is {self.num_directions}; expected 2, because a plane is drawn"
            )


def run_contours(settings: ContoursSettings, console: Console | None = None) -> Rows:
    """Find each mini-batch's plane, measure all batches in it, draw, and print the numbers.

    Returns:
        The table: for each plane the coefficients of both quadratics and their Newton steps.

    Raises:
        As `Experiment`.
    """
    console, store, trained = begin("contours", settings, console)
    size = settings.batch_size
    batches, directions = stored_directions(
        store, "directions", trained, size, "eigenvectors", settings
    )
    by_draw = stored_cuts(store, "cuts", trained, batches, directions, settings)
    pairs = [(cuts[draw], mean_cut(cuts)) for draw, cuts in enumerate(by_draw)]
    rows = [
        row
        for draw, pair in enumerate(pairs)
        for row in (
            _row(draw, name, cut)
            for name, cut in zip(("mini-batch", "full-batch"), pair, strict=True)
        )
    ]
    paths = [store.table(rows), *store.picture(contour_figure(pairs, size), "contours")]
    shown = [
        {
            "draw": draw,
            "u1: mini": float(mini.curvatures[0, 0]),
            "full": float(full.curvatures[0, 0]),
            "u2: mini": float(mini.curvatures[1, 1]),
            "full ": float(full.curvatures[1, 1]),
        }
        for draw, (mini, full) in enumerate(pairs)
    ]
    print_table(shown, "Curvature along each mini-batch's top two eigenvectors", console=console)
    ratios = [float(mini.curvatures[0, 0] / full.curvatures[0, 0]) for mini, full in pairs]
    console.print(
        f"Along its top eigenvector a mini-batch curves {min(ratios):.2f} to {max(ratios):.2f} "
        f"times as much as the full set of {settings.full_examples:,}."
    )
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return rows


def _row(draw: int, name: str, cut: Cut) -> dict[str, object]:
    """The six numbers that determine a quadratic in a plane (Eq. 2, Figure 1); its Newton step."""
    step = _minimizer(cut)
    return {
        "draw": draw,
        "quadratic": name,
        "loss": cut.value,
        "slope_1": cut.slopes[0],
        "slope_2": cut.slopes[1],
        "curvature_11": cut.curvatures[0, 0],
        "curvature_12": cut.curvatures[0, 1],
        "curvature_22": cut.curvatures[1, 1],
        "newton_1": None if step is None else step[0],
        "newton_2": None if step is None else step[1],
    }


def _minimizer(cut: Cut) -> torch.Tensor | None:
    """The Newton step in the plane; None where the curvature is not positive, as a Hessian's."""
    return (
        cut.minimizer() if float(eigvalsh(cut.curvatures, "the cut's curvature")[0]) > 0 else None
    )


def contour_figure(pairs: list[tuple[Cut, Cut]], batch_size: int) -> Figure:
    """Contours of the mini-batch's and the full-batch quadratic, a panel per mini-batch.

    Both have the same levels above their own minimum, so that the narrower contours are those of
    the larger curvature; a cross marks each minimum, a dot θ₀.

    Args:
        pairs: (mini-batch, full-batch) in the plane of each mini-batch.
        batch_size: For the title.
    """
    colours = method_colours(("mini-batch", "full-batch"))
    figure, (panels,) = new_panels(1, len(pairs), (2.6 * len(pairs), 3.1))
    for number, (ax, pair) in enumerate(zip(panels, pairs, strict=True), start=1):
        minimizers = [_minimizer(cut) for cut in pair]
        steps = [step for step in minimizers if step is not None]
        reach = _REACH * max([float(step.abs().max()) for step in steps], default=1.0)
        axis = torch.linspace(-reach, reach, 201, dtype=torch.float64)
        heights = [
            _heights(cut, step, cut(axis[None, :], axis[:, None]))
            for cut, step in zip(pair, minimizers, strict=True)
        ]
        top = min(float(height.max()) for height in heights)
        levels = [top * (level / _LEVELS) ** 2 for level in range(1, _LEVELS + 1)]
        for step, height, name in zip(minimizers, heights, colours, strict=True):
            ax.contour(axis, axis, height, levels, colors=colours[name], linewidths=1.1)
            if step is not None:
                ax.plot(*step.tolist(), marker="x", markersize=7, color=colours[name], zorder=3)
        ax.plot(0, 0, marker="o", markersize=4, color="black", zorder=3)
        ax.set_aspect("equal")
        ax.set_title(f"mini-batch {number} ({batch_size} images)", fontsize=FONT_SIZE)
        ax.set_xlabel("along u₁")
        ax.set_ylabel("along u₂")
        style_axes(ax)
    handles = [panels[0].plot([], [], color=colours[name], label=name)[0] for name in colours]
    add_legend(figure, handles, columns=2)
    return figure


def _heights(
    cut: Cut, minimizer: Float[Tensor, " k"] | None, values: Float[Tensor, "rows columns"]
) -> Float[Tensor, "rows columns"]:
    """Values above the quadratic's minimum, or above their least where there is no minimum."""
    return values - (values.min() if minimizer is None else cut(*minimizer))


CONTOURS = Experiment(
    name="contours",
    figure="Figure 1",
    help="mini-batch and full-batch quadratics in the plane of their largest curvature.",
    settings=ContoursSettings,
    run=run_contours,
)
