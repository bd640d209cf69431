"""Figures 4 and 11: overlaps of two mini-batches' eigenspaces, and the step sizes of CG."""

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from examples.paper.common import Row, Trained, load, select, write
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
    """The mini-batches to compare.

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
    first_overlaps: dict[int, Tensor] = {}
    for size in settings.batch_sizes:
        overlaps = pairwise_overlaps(trained, size, settings)
        first_overlaps[size] = overlaps[0, 1]
        for (first, second), weights in overlaps.items():
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
    tables = {"results": rows}
    pictures = {"overlaps": overlap_figure(first_overlaps)}
    if settings.cg_steps:
        steps = step_sizes(trained, settings)
        tables = {"step_sizes": steps, **tables}
        pictures["steps"] = points_figure(steps, "draw", ("step_size",), "CG iteration", log=())
        on_others = select(steps, measured_on=OTHER)
        num_back = sum(row["step_size"] is None or row["step_size"] <= 0 for row in on_others)
        print(f"{num_back} of the {len(on_others)} steps that other mini-batches ask for go back.")
    write(settings, tables, pictures, "Overlaps of the eigenspaces of two mini-batches")
    return rows


def pairwise_overlaps(
    trained: Trained, size: int, settings: Settings
) -> dict[tuple[int, int], Tensor]:
    """Compute the squared inner products of two mini-batches' eigenvectors (Eq. 6), [k, k].

    Returns:
        The overlaps of each pair of mini-batches, by their indices.
    """
    bases = []
    for batch in trained.random_batches(size, settings.draws, settings.seed):
        quadratic = quadratic_on(trained, batch, settings.curvature)
        bases.append(find_directions(quadratic, settings).vectors)
    overlaps = {}
    for first, second in combinations(range(settings.draws), 2):
        # In single precision, the error of a million terms would be 1e-3.
        products = bases[first].double().T @ bases[second].double()
        overlaps[first, second] = products.square().cpu()
    return overlaps


def step_sizes(trained: Trained, settings: Settings) -> list[Row]:
    """Compute τ = −s / c (Eq. 3) along every search direction; None if c is 0."""
    cg_settings = replace(settings, directions="cg", draws=1, num_directions=settings.cg_steps)
    rows = bias_rows(trained, settings.batch_sizes[0], cg_settings)
    for row in rows:
        row["step_size"] = None
        if row["curvature"]:
            row["step_size"] = -row["slope"] / row["curvature"]
    return rows


def overlap_figure(by_size: dict[int, Tensor]) -> Figure:
    """Draw the overlaps of two mini-batches' eigenvectors as pixels, black up to 1e-4.

    Args:
        by_size: The overlaps, [k, k], by the size of the mini-batches.
    """
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
