"""Figures 4 and 11: overlaps of two mini-batches' eigenspaces, and the step sizes of CG."""

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from examples.paper.common import Row, load, write
from examples.paper.plots import new_panels, points_figure
from examples.paper.quadratics import (
    OTHER,
    BiasSettings,
    bias_rows,
    find_directions,
    quadratic_on,
)
from laplace_debias.report.style import style_axes


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """What to measure.

    Attributes:
        batch_sizes: Examples of a mini-batch.
        draws: The number of mini-batches; the picture shows the overlaps of the first two.
        cg_steps: Iterations of CG on the first mini-batch of the first size. The step sizes are
            compared with the step sizes that other mini-batches would choose. 0 for none.
    """

    output: Path = Path("results/overlaps")
    batch_sizes: tuple[int, ...] = (128,)
    draws: int = 2
    cg_steps: int = 0


def run(settings: Settings) -> list[Row]:
    """Find the eigenspaces of several mini-batches and compare them in pairs."""
    trained = load(settings)
    rows: list[Row] = []
    drawn: dict[int, torch.Tensor] = {}
    for size in settings.batch_sizes:
        batches = trained.batches(size, settings.draws, settings.seed)
        bases = [
            find_directions(quadratic_on(trained, batch, settings.curvature), settings).vectors
            for batch in batches
        ]
        for first, second in combinations(range(settings.draws), 2):
            # These are squared inner products (Eq. 6). In single precision, the error of a million
            # terms would be 1e-3.
            weights = (bases[first].double().T @ bases[second].double()).square().cpu()
            drawn.setdefault(size, weights)
            rows.append(
                {
                    "batch_size": size,
                    "draws": f"{first}, {second}",
                    "largest": float(weights.max()),
                    "row's largest": float(weights.max(1).values.mean()),
                    "first": float(weights[0, 0]),
                    "subspaces": float(weights.sum() / len(weights)),
                }
            )
    tables, pictures = {"results": rows}, {"overlaps": overlap_figure(drawn)}
    if settings.cg_steps:
        steps = step_sizes(trained, settings)
        tables = {"step_sizes": steps, **tables}
        pictures["steps"] = points_figure(steps, "draw", ("step_size",), "CG iteration", log=())
        asked = [row["step_size"] for row in steps if row["measured_on"] == OTHER]
        refused = sum(step is None or step <= 0 for step in asked)
        print(f"{refused} of the {len(asked)} steps that other mini-batches ask for go back.")
    write(settings, tables, pictures, "Overlaps of the eigenspaces of two mini-batches")
    return rows


def step_sizes(trained: object, settings: Settings) -> list[Row]:
    """Compute τ = −s / c (Eq. 3) along every search direction; None if c is 0."""
    of_cg = replace(settings, directions="cg", draws=1, num_directions=settings.cg_steps)
    rows = bias_rows(trained, settings.batch_sizes[0], of_cg)
    for row in rows:
        row["step_size"] = -row["slope"] / row["curvature"] if row["curvature"] else None
    return rows


def overlap_figure(by_size: dict[int, torch.Tensor]) -> Figure:
    """Draw the overlaps of two mini-batches' eigenvectors as pixels, black up to 1e-4."""
    figure, (panels,) = new_panels(1, len(by_size), (3.4 * len(by_size) + 0.8, 3.4))
    for ax, (size, weights) in zip(panels, by_size.items(), strict=True):
        end = len(weights) + 0.5
        image = ax.imshow(
            weights.clamp(1e-4, 1), "gray", norm=LogNorm(1e-4, 1), extent=(0.5, end, end, 0.5)
        )
        ax.set(title=f"mini-batches of {size}", xlabel="eigenvector ũⱼ", ylabel="eigenvector uᵢ")
        style_axes(ax)
        ax.grid(visible=False)
    figure.colorbar(image, ax=panels, label="⟨uᵢ, ũⱼ⟩²")
    return figure
