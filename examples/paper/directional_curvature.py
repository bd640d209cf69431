"""Figures 2, 8 to 10 and 19: slopes and curvatures along one mini-batch's directions."""

from dataclasses import dataclass
from pathlib import Path

from examples.paper.common import Row, load, write
from examples.paper.plots import points_figure
from examples.paper.quadratics import BiasSettings, bias_rows, bias_summary


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """The mini-batches to measure.

    Attributes:
        batch_sizes: Examples of a mini-batch; there is one picture for each size.
    """

    output: Path = Path("results/directional_curvature")
    batch_sizes: tuple[int, ...] = (128,)


def run(settings: Settings) -> list[Row]:
    """Find directions, measure them on all mini-batches and the full set; return a summary."""
    trained = load(settings)
    label = "CG iteration" if settings.directions == "cg" else "Index of eigenvector"
    table: list[Row] = []
    summary: list[Row] = []
    pictures = {}
    for size in settings.batch_sizes:
        rows = bias_rows(trained, size, settings)
        figure = points_figure(rows, "draw", ("slope", "curvature"), label, log=("curvature",))
        pictures[f"directional_curvature_{size}"] = figure
        table += [{"batch_size": size, **row} for row in rows]
        summary += [{"batch_size": size, **row} for row in bias_summary(rows)]
    title = "Relative errors on the mini-batch itself, median ratios to the full set"
    write(settings, {"results": table, "summary": summary}, pictures, title)
    return summary
