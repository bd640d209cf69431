"""Figures 2, 8, 9, 10 and 19: slopes and curvatures along one mini-batch's directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from laplace_debias.experiments.bias.bias_figures import add_marker_legend, add_points
from laplace_debias.experiments.bias.bias_rows import (
    QUANTITIES,
    measure_bias,
    summary_of,
)
from laplace_debias.experiments.bias.cuts import BiasSettings, Kind
from laplace_debias.experiments.shared.checks import check_different
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import begin
from laplace_debias.experiments.shared.store import Rows
from laplace_debias.report.style import FONT_SIZE, new_panels, style_axes
from laplace_debias.report.tables import print_table

_X_LABEL = {"eigenvectors": "Index of eigenvector", "cg": "CG iteration"}


@dataclass(frozen=True, kw_only=True)
class DirectionalCurvatureSettings(BiasSettings):
    """What is measured.

    Attributes:
        batch_sizes: Examples of a mini-batch, one picture for each.
        directions: `eigenvectors`, the top ones of the mini-batch's curvature matrix, or `cg`, the
            search directions of CG on its quadratic, at whose iterates slopes are measured.
    """

    output: Path = Path("results/directional_curvature")
    batch_sizes: tuple[int, ...] = (128,)
    directions: Kind = "eigenvectors"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_different(self, "batch_sizes")
        for size in self.batch_sizes:
            self.num_batches(size)


@dataclass(frozen=True, kw_only=True)
class WideResNetSettings(DirectionalCurvatureSettings):
    """What is measured on a WideResNet."""

    output: Path = Path("results/wide_resnet")
    problem: str = "wrn404-cifar100"


def run_directional_curvature(
    settings: DirectionalCurvatureSettings,
    console: Console | None = None,
    name: str = "directional_curvature",
) -> Rows:
    """Find directions, measure them on every mini-batch and the full set, draw and summarise.

    Args:
        settings: As `Experiment`, as the console is.
        console: See there.
        name: The experiment's name.

    Returns:
        The table: a row for each batch size, draw, direction and batch, and for the full set.

    Raises:
        As `Experiment`.
    """
    console, store, trained = begin(name, settings, console)
    table: Rows = []
    summary: Rows = []
    paths: list[Path] = []
    for size in settings.batch_sizes:
        rows = measure_bias(store, str(size), trained, size, settings.directions, settings)
        of_size = {"batch_size": size}
        table += [of_size | row for row in rows]
        summary += [of_size | row for row in summary_of(rows)]
        paths += store.picture(bias_figure(rows, size, settings.directions), f"{name}_{size}")
    paths += [store.table(table), store.table(summary, "summary")]
    shown = {
        "same_over_full": "same/full",
        "same_p10": "error p10",
        "same_p90": "error p90",
        "others_mean_over_full": "others/full",
    }
    print_table(
        [
            {key: row[key] for key in ("batch_size", "draw", "quantity")}
            | {title: row[key] for key, title in shown.items()}
            for row in summary
        ],
        "Median ratios to the full set, relative errors on the same mini-batch",
        console=console,
    )
    for row in summary:
        if row["quantity"] == "curvature":
            console.print(
                f"Batch of {row['batch_size']}, draw {row['draw'] + 1}: curvature on the batch "
                f"itself is {row['same_over_full']:.2f} times the full set's "
                f"({settings.full_examples:,} images), the mean over the other batches "
                f"{row['others_mean_over_full']:.2f} times (medians over the directions); along "
                f"the first direction {row['top_same_over_full']:.2f} and "
                f"{row['top_others_mean_over_full']:.2f} times."
            )
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return table


def bias_figure(rows: Sequence[dict[str, Any]], batch_size: int, directions: str) -> Figure:
    """Slopes above, curvatures below, a column for each mini-batch, as Figure 2 of the paper.

    Args:
        rows: Those of `bias_rows`.
        batch_size: For the titles.
        directions: Kind of the directions.
    """
    draws = sorted({row["draw"] for row in rows})
    # The panels of a row share their axis, so one negative curvature makes all of them linear.
    is_log = min(row["curvature"] for row in rows) > 0
    size = (max(5.6, 3.4 * len(draws)), 5.4)
    figure, panels = new_panels(len(QUANTITIES), len(draws), size, sharex=True, sharey="row")
    for column, draw in enumerate(draws):
        of_draw = [row for row in rows if row["draw"] == draw]
        for ax, quantity in zip(panels[:, column], QUANTITIES, strict=True):
            add_points(ax, of_draw, quantity)
            if quantity == "curvature" and is_log:
                ax.set_yscale("log")
            style_axes(ax)
        panels[0, column].axhline(0, color="black", linewidth=0.8)
        panels[0, column].set_title(
            f"directions of mini-batch {draw + 1} ({batch_size} images)", fontsize=FONT_SIZE
        )
        panels[-1, column].set_xlabel(_X_LABEL[directions])
    for ax, quantity in zip(panels[:, 0], QUANTITIES, strict=True):
        ax.set_ylabel(f"Directional {quantity}")
    add_marker_legend(figure)
    return figure


DIRECTIONAL_CURVATURE = Experiment(
    name="directional_curvature",
    figure="Figures 2, 8-10",
    help="slopes and curvatures along one mini-batch's directions, on all others.",
    settings=DirectionalCurvatureSettings,
    run=run_directional_curvature,
)

WIDE_RESNET = Experiment(
    name="wide_resnet",
    figure="Figure 19",
    help="the same on a WideResNet.",
    settings=WideResNetSettings,
    run=partial(run_directional_curvature, name="wide_resnet"),
)
