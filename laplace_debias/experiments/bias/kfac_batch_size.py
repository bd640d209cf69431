"""Figure 20: K-FAC's curvature along its eigenvectors, against the mini-batch size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from laplace_debias.experiments.bias.bias_figures import add_marker_legend, add_points
from laplace_debias.experiments.bias.bias_rows import FULL, OTHER, SAME
from laplace_debias.experiments.shared.checks import check_at_least, check_different
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.setup import Batch, Trained, begin
from laplace_debias.experiments.shared.store import Rows
from laplace_debias.laplace import Laplace
from laplace_debias.operators import EigenKronecker
from laplace_debias.report.style import FONT_SIZE, new_panels, style_axes
from laplace_debias.report.tables import print_table


@dataclass(frozen=True, kw_only=True)
class KFACBatchSizeSettings(ExperimentSettings):
    """What is measured.

    Attributes:
        full_examples: How many training images, chosen at random, are the full set.
        batch_sizes: Examples of a mini-batch, a panel each.
        draws: On how many mini-batches of each size K-FAC's eigenvectors are computed.
        others: On how many other mini-batches they are measured.
        num_directions: How many of the largest eigenvalues' eigenvectors.
    """

    output: Path = Path("results/kfac_batch_size")
    full_examples: int = 2048
    batch_sizes: tuple[int, ...] = (32, 128, 512)
    draws: int = 1
    others: int = 2
    num_directions: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "full_examples", "draws", "others", "num_directions")
        check_different(self, "batch_sizes")
        for size in self.batch_sizes:
            needed = self.draws + self.others
            if size < 1 or self.full_examples % size or needed * size > self.full_examples:
                raise ValueError(
                    f"full_examples is {self.full_examples}, batches have {size} examples; "
                    f"expected a divisor that gives at least {needed} batches (draws + others)"
                )


def run_kfac_batch_size(settings: KFACBatchSizeSettings, console: Console | None = None) -> Rows:
    """Measure K-FAC along one mini-batch's eigenvectors on it, on others and on the full set.

    Returns:
        The table: a row for each batch size, draw, eigenvector and data it was measured on.

    Raises:
        NotImplementedError: If the network has a layer that K-FAC has no block for; else as
            `Experiment`.
    """
    console, store, trained = begin("kfac_batch_size", settings, console)
    everything = [(size, draw) for size in settings.batch_sizes for draw in range(settings.draws)]
    bar = tqdm(everything, desc="K-FAC", unit="fit", disable=not settings.progress)
    table: Rows = []
    for size, draw in bar:

        def compute(size: int = size, draw: int = draw) -> Rows:
            return kfac_rows(trained, settings, size, draw)

        of_size = {"batch_size": size, "draw": draw}
        table += [of_size | row for row in store.rows(f"kfac-{size}-{draw}", compute)]
    summary = [_ratios(table, size) for size in settings.batch_sizes]
    paths = [store.table(table), store.table(summary, "summary")]
    paths += store.picture(kfac_figure(table), "kfac_batch_size")
    print_table(summary, "K-FAC along a mini-batch's top eigenvectors", console=console)
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return table


def kfac_rows(trained: Trained, settings: KFACBatchSizeSettings, size: int, draw: int) -> Rows:
    """K-FAC's curvature along the top eigenvectors of one mini-batch's K-FAC.

    The full set's K-FAC is not the mean of the mini-batches' (Eq. 5 holds for the GGN alone), so it
    is measured on the factors of all images.
    """
    images = trained.data.train
    number = settings.full_examples // size
    batches = trained.batches(images, size, number, settings.seed)
    others = [(draw + 1 + other) % number for other in range(settings.others)]
    own = kfac_magnitudes(trained, batches[draw], None)
    count = min(settings.num_directions, len(own))
    top = own.topk(count).indices
    measured: list[tuple[str, int | None, Tensor]] = [(SAME, draw, own)]
    for other in others:
        along = kfac_magnitudes(trained, batches[draw], [batches[other]])
        measured.append((OTHER, other, along))
    measured.append((FULL, None, kfac_magnitudes(trained, batches[draw], batches)))
    return [
        {"index": index, "measured_on": name, "batch": batch, "curvature": value}
        for name, batch, along in measured
        for index, value in enumerate(along[top].tolist(), start=1)
    ]


def kfac_magnitudes(
    trained: Trained, directions: Batch, magnitudes: Sequence[Batch] | None
) -> Float[Tensor, " dim"]:
    """K-FAC's curvature along all eigenvectors of one batch's, block after block, float64."""
    laplace = Laplace(trained.model, trained.problem.likelihood, params="weights")
    laplace.fit_batches([directions], magnitudes)
    blocks = laplace.posterior.curvature.blocks.values()
    return torch.cat(
        [cast(EigenKronecker, block).magnitudes.flatten().double().cpu() for block in blocks]
    )


def _ratios(table: Sequence[dict[str, Any]], size: int) -> dict[str, Any]:
    """Medians over directions and draws: on the batch, on others, on all, and their ratios."""
    chosen = [row for row in table if row["batch_size"] == size]

    def of(name: str) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        for row in chosen:
            if row["measured_on"] == name:
                found.setdefault((row["draw"], row["index"]), []).append(row["curvature"])
        return found

    same, other, full = (of(name) for name in (SAME, OTHER, FULL))
    mean_other = {key: sum(values) / len(values) for key, values in other.items()}

    def median(values: list[float]) -> float:
        return float(torch.tensor(values, dtype=torch.float64).median())

    return {
        "batch_size": size,
        "same": median([same[key][0] for key in same]),
        "others": median([mean_other[key] for key in same]),
        "full": median([full[key][0] for key in same]),
        "same_over_full": median([same[key][0] / full[key][0] for key in same]),
        "others_over_full": median([mean_other[key] / full[key][0] for key in same]),
    }


def kfac_figure(table: Sequence[dict[str, Any]]) -> Figure:
    """Directional curvatures of the first draw, a panel per batch size.

    Args:
        table: Rows of all batch sizes.
    """
    sizes = sorted({row["batch_size"] for row in table})
    figure, (panels,) = new_panels(1, len(sizes), (2.7 * len(sizes) + 0.8, 3.3), sharey=True)
    for ax, size in zip(panels, sizes, strict=True):
        chosen = [row for row in table if (row["batch_size"], row["draw"]) == (size, 0)]
        add_points(ax, chosen, "curvature", area=0.6)
        ax.set_yscale("log")
        ax.set_title(f"mini-batch of {size} images", fontsize=FONT_SIZE)
        ax.set_xlabel("Index of eigenvector")
        style_axes(ax)
    panels[0].set_ylabel("Directional curvature (K-FAC)")
    add_marker_legend(figure)
    return figure


KFAC_BATCH_SIZE = Experiment(
    name="kfac_batch_size",
    figure="Figure 20",
    help="K-FAC's curvature along its own eigenvectors, against the mini-batch size.",
    settings=KFACBatchSizeSettings,
    run=run_kfac_batch_size,
)
