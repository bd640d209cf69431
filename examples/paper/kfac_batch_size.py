"""Figure 20: the curvature of K-FAC along its eigenvectors, against the mini-batch size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.paper.common import (
    FULL,
    Batch,
    ExperimentSettings,
    Row,
    Trained,
    distinct,
    load,
    select,
    write,
)
from examples.paper.plots import points_figure
from examples.paper.quadratics import OTHER, SAME
from laplace_debias import Laplace


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The mini-batches and eigenvectors to measure.

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
        batches = trained.random_batches(size, settings.full_examples // size, settings.seed)
        for draw in range(settings.draws):
            rows = curvature_rows(trained, batches, draw, settings)
            table += [{"batch_size": size, "draw": draw, **row} for row in rows]
    summary = [{"batch_size": size, **ratios(table, size)} for size in settings.batch_sizes]
    first_draw = select(table, draw=0)
    label = "Index of eigenvector"
    figure = points_figure(first_draw, "batch_size", ("curvature",), label, log=("curvature",))
    tables = {"results": table, "summary": summary}
    title = "K-FAC along a mini-batch's top eigenvectors: medians"
    write(settings, tables, {"kfac_batch_size": figure}, title)
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


def curvature_rows(
    trained: Trained, batches: list[Batch], draw: int, settings: Settings
) -> list[Row]:
    """Measure K-FAC along the top eigenvectors of a mini-batch.

    Args:
        trained: The network and its data.
        batches: The mini-batches of the full set.
        draw: The index of the mini-batch of the eigenvectors.
        settings: The numbers of eigenvectors and of other mini-batches.
    """
    batch = batches[draw]
    on_batch = magnitudes(trained, batch, None)
    top = on_batch.topk(min(settings.num_directions, len(on_batch))).indices
    # The full set is measured in one fit, because Eq. 5 holds for the GGN, but not for K-FAC: K-FAC
    # of the full set is not the mean of K-FAC of the mini-batches.
    measurements = [(SAME, on_batch), (FULL, magnitudes(trained, batch, batches))]
    for step in range(1, settings.others + 1):
        other_batch = batches[(draw + step) % len(batches)]
        measurements.append((OTHER, magnitudes(trained, batch, [other_batch])))
    return [
        {"index": index, "measured_on": measured_on, "curvature": curvature}
        for measured_on, curvatures in measurements
        for index, curvature in enumerate(curvatures[top].tolist(), start=1)
    ]


def magnitudes(trained: Trained, directions: Batch, measured_on: list[Batch] | None) -> Tensor:
    """Measure K-FAC along all K-FAC eigenvectors of one batch, block after block, in float64.

    Args:
        trained: The network.
        directions: The batch of the eigenvectors.
        measured_on: The batches on which K-FAC is measured; the batch of the eigenvectors if None.
    """
    la = Laplace(trained.model, params="weights").fit_batches([directions], measured_on)
    blocks = la.posterior.curvature.blocks.values()
    return torch.cat([block.magnitudes.flatten().double().cpu() for block in blocks])


def ratios(table: list[Row], size: int) -> Row:
    """Return medians, over directions and draws, of the ratios to the full set."""
    same, others, full = (
        _mean_curvatures(select(table, batch_size=size, measured_on=measured_on))
        for measured_on in (SAME, OTHER, FULL)
    )
    return {
        "same/full": float((same / full).median()),
        "others/full": float((others / full).median()),
    }


def _mean_curvatures(rows: list[Row]) -> Tensor:
    """Return the mean curvature over batches, for each draw and direction."""
    return torch.tensor(
        [
            [row["curvature"] for row in select(rows, draw=draw, index=index)]
            for draw, index in distinct(rows, "draw", "index")
        ]
    ).mean(1)
