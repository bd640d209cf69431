"""Figures 4 and 11: how two mini-batches' eigenspaces lie to each other, and CG's step sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.console import Console

from laplace_debias.experiments.bias.bias_figures import add_marker_legend, add_points
from laplace_debias.experiments.bias.bias_rows import OTHER, SAME, measure_bias
from laplace_debias.experiments.bias.cuts import BiasSettings, stored_directions
from laplace_debias.experiments.shared.checks import check_at_least, check_different
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import begin
from laplace_debias.experiments.shared.store import Rows
from laplace_debias.linalg import overlaps
from laplace_debias.report.style import FONT_SIZE, new_panels, style_axes
from laplace_debias.report.tables import print_table

_DARKEST = 1e-4
"""Overlaps of this and less are black, of 1 white; the source lost the paper's."""


@dataclass(frozen=True, kw_only=True)
class OverlapsSettings(BiasSettings):
    """What is measured.

    Attributes:
        batch_sizes: Examples of a mini-batch.
        draws: How many mini-batches. All pairs' overlaps are written, the first pair's are drawn.
        num_directions: How many eigenvectors.
        cg_steps: How many iterations of CG on the first mini-batch of the first size, whose step
            sizes are compared with those that other mini-batches ask for; 0 for none.
    """

    output: Path = Path("results/overlaps")
    batch_sizes: tuple[int, ...] = (128,)
    draws: int = 2
    cg_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_different(self, "batch_sizes")
        for size in self.batch_sizes:
            self.num_batches(size)
        check_at_least(self, 2, "draws")
        check_at_least(self, 0, "cg_steps")


def run_overlaps(settings: OverlapsSettings, console: Console | None = None) -> Rows:
    """Find the eigenspaces of several mini-batches, compare them in pairs, and CG's step sizes.

    Returns:
        The table of overlaps: a row for each batch size, pair of batches, i and j.

    Raises:
        As `Experiment`.
    """
    console, store, trained = begin("overlaps", settings, console)
    table: Rows = []
    summary: Rows = []
    drawn: dict[int, torch.Tensor] = {}
    for size in settings.batch_sizes:
        _, directions = stored_directions(
            store, f"{size}-directions", trained, size, "eigenvectors", settings
        )
        bases = [found.vectors for found in directions]
        for first, second in combinations(range(settings.draws), 2):
            weights = overlaps(bases[first], bases[second]).cpu().double()
            drawn.setdefault(size, weights)
            pair = {"batch_size": size, "draw": first, "other_draw": second}
            table += [
                pair | {"i": i + 1, "j": j + 1, "overlap": float(weights[i, j])}
                for i in range(len(weights))
                for j in range(len(weights))
            ]
            summary.append(
                pair
                | {
                    "largest": float(weights.max()),
                    "row_largest": float(weights.max(1).values.mean()),
                    "first": float(weights[0, 0]),
                    "subspaces": float(weights.sum() / len(weights)),
                }
            )
    paths = [store.table(table), store.table(summary, "summary")]
    paths += store.picture(overlap_figure(drawn), "overlaps")
    print_table(summary, "Overlaps of the eigenspaces of two mini-batches", console=console)
    if settings.cg_steps:
        size = settings.batch_sizes[0]
        steps = _step_sizes(
            measure_bias(store, f"{size}-cg", trained, size, "cg", settings, 1, settings.cg_steps)
        )
        paths += [store.table(steps, "step_sizes"), *store.picture(step_figure(steps), "steps")]
        console.print(step_finding(steps))
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return table


def _step_sizes(rows: Sequence[dict[str, Any]]) -> Rows:
    """τ = −s / c (Eq. 3) along every direction, for every row; None where c is 0."""
    return [
        {key: row[key] for key in ("index", "measured_on", "batch")}
        | {"step_size": -row["slope"] / row["curvature"] if row["curvature"] else None}
        for row in rows
    ]


def step_finding(steps: Sequence[dict[str, Any]]) -> str:
    """One sentence on CG's step sizes, made from the numbers.

    Args:
        steps: Step sizes; None for those along directions of no curvature, which are left out.
    """

    def signs(measured_on: str) -> list[bool]:
        return [
            row["step_size"] > 0
            for row in steps
            if row["measured_on"] == measured_on and row["step_size"] is not None
        ]

    same, other = signs(SAME), signs(OTHER)
    own = "all" if all(same) else f"{sum(same)} of {len(same)}"
    return (
        f"Of CG's step sizes on its own mini-batch {own} are positive; {len(other) - sum(other)} "
        f"of {len(other)} that the other mini-batches ask for are not."
    )


def overlap_figure(by_size: dict[int, torch.Tensor]) -> Figure:
    """Overlaps of two mini-batches' eigenvectors as pixels, a panel per batch size.

    Args:
        by_size: Overlaps `[k, k]` by batch size.
    """
    figure, (panels,) = new_panels(1, len(by_size), (3.4 * len(by_size) + 0.8, 3.4))
    for ax, (size, weights) in zip(panels, by_size.items(), strict=True):
        count = len(weights)
        image = ax.imshow(
            weights.clamp(_DARKEST, 1).numpy(),
            cmap="gray",
            norm=LogNorm(_DARKEST, 1),
            extent=(0.5, count + 0.5, count + 0.5, 0.5),
        )
        ax.set_title(f"two mini-batches of {size} images", fontsize=FONT_SIZE)
        ax.set_xlabel("eigenvector ũⱼ")
        ax.set_ylabel("eigenvector uᵢ")
        style_axes(ax)
        ax.grid(visible=False)
    figure.colorbar(image, ax=panels, label="⟨uᵢ, ũⱼ⟩²")
    return figure


def step_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """CG's step sizes on its own mini-batch, and those that the others and the full set ask for.

    Args:
        rows: Step sizes; None is left out.
    """
    figure, ((ax,),) = new_panels(1, 1, (5.6, 3.4))
    rows = [row for row in rows if row["step_size"] is not None]
    add_points(ax, rows, "step_size")
    ax.axhline(0, color="black", linewidth=0.8)
    scale = max([abs(row["step_size"]) for row in rows if row["measured_on"] == SAME], default=0.0)
    ax.set_yscale("symlog", linthresh=scale or 1.0)
    ax.set_xlabel("CG iteration")
    ax.set_ylabel("Step size τ")
    style_axes(ax)
    add_marker_legend(figure)
    return figure


OVERLAPS = Experiment(
    name="overlaps",
    figure="Figures 4, 11",
    help="overlaps of two mini-batches' eigenspaces, and CG's step sizes on other mini-batches.",
    settings=OverlapsSettings,
    run=run_overlaps,
)
