"""Figure 20: the curvature of K-FAC along its eigenvectors, against the mini-batch size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.paper.common import Batch, Row, Trained, load, write
from examples.paper.common import Settings as Shared
from examples.paper.plots import points_figure
from examples.paper.quadratics import FULL, OTHER, SAME
from laplace_debias import Laplace


@dataclass(kw_only=True)
class Settings(Shared):
    """What to measure.

    Attributes:
        full_examples: The number of random training images in the full set.
        batch_sizes: Examples of a mini-batch.
        draws: The number of mini-batches of each size on which eigenvectors of K-FAC are computed.
        others: The number of other mini-batches on which the curvature along these eigenvectors is
            measured; must be less than the number of mini-batches.
        num_directions: The number of eigenvectors, with the largest eigenvalues.
    """

    output: Path = Path("results/kfac_batch_size")
    full_examples: int = 1000
    batch_sizes: tuple[int, ...] = (10, 40, 200)
    draws: int = 1
    others: int = 2
    num_directions: int = 100


def run(settings: Settings) -> list[Row]:
    """Measure K-FAC along a mini-batch's eigenvectors on itself, on others, on the full set."""
    check_num_batches(settings)
    trained = load(settings)
    table: list[Row] = []
    for size in settings.batch_sizes:
        batches = trained.batches(size, settings.full_examples // size, settings.seed)
        for draw in range(settings.draws):
            own = magnitudes(trained, batches[draw], None)
            top = own.topk(min(settings.num_directions, len(own))).indices
            others = [(draw + 1 + i) % len(batches) for i in range(settings.others)]
            # K-FAC of the full set is not the mean of K-FAC of the mini-batches (Eq. 5 holds for
            # the GGN).
            measured = [(SAME, own), (FULL, magnitudes(trained, batches[draw], batches))]
            for other in others:
                measured.append((OTHER, magnitudes(trained, batches[draw], [batches[other]])))
            table += [
                {"batch_size": size, "draw": draw, "index": i, "measured_on": name, "curvature": c}
                for name, along in measured
                for i, c in enumerate(along[top].tolist(), start=1)
            ]
    summary = [ratios(table, size) for size in settings.batch_sizes]
    drawn = [row for row in table if row["draw"] == 0]
    label = "Index of eigenvector"
    figure = points_figure(drawn, "batch_size", ("curvature",), label, log=("curvature",))
    tables, pictures = {"results": table, "summary": summary}, {"kfac_batch_size": figure}
    write(settings, tables, pictures, "K-FAC along a mini-batch's top eigenvectors: medians")
    return summary


def check_num_batches(settings: Settings) -> None:
    """Require enough mini-batches of each size, such that the others differ from the drawn one."""
    needed = max(settings.draws, settings.others + 1)
    for size in settings.batch_sizes:
        if settings.full_examples < needed * size:
            raise ValueError(
                f"full_examples is {settings.full_examples}; expected at least {needed} batches of "
                f"{size} examples, for draws={settings.draws} and others={settings.others}. Raise "
                "full_examples or lower batch_sizes."
            )


def magnitudes(trained: Trained, directions: Batch, measured: list[Batch] | None) -> Tensor:
    """Measure K-FAC along all K-FAC eigenvectors of one batch, block after block, in float64."""
    la = Laplace(trained.model, params="weights").fit_batches([directions], measured)
    blocks = la.posterior.curvature.blocks.values()
    return torch.cat([block.magnitudes.flatten().double().cpu() for block in blocks])


def ratios(table: list[Row], size: int) -> Row:
    """Return medians, over directions and draws, of the ratios to the full set."""

    def of(name: str) -> Tensor:
        chosen = [r for r in table if (r["batch_size"], r["measured_on"]) == (size, name)]
        pairs = sorted({(r["draw"], r["index"]) for r in chosen})
        return torch.tensor(
            [[r["curvature"] for r in chosen if (r["draw"], r["index"]) == pair] for pair in pairs]
        ).mean(1)

    same, others, full = (of(name) for name in (SAME, OTHER, FULL))
    return {
        "batch_size": size,
        "same/full": float((same / full).median()),
        "others/full": float((others / full).median()),
    }
