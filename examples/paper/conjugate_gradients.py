"""Figures 5 and 13: conjugate gradients from a trained network, single-batch against debiased.

Both minimise a quadratic of the regularised loss without damping. Single-batch CG uses one batch.
Debiased CG uses two batches of half the size: directions from the first batch, step sizes from the
second (Eq. 8).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.paper.common import (
    ExperimentSettings,
    Row,
    Trained,
    distinct,
    load,
    loss_and_accuracy,
    random_indices,
    select,
    write,
)
from examples.paper.data import Images
from examples.paper.plots import lines_figure
from laplace_debias.linalg import Iterate, cg, debiased_cg
from laplace_debias.quadratic import Quadratic


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The trajectories, and the data on which they are measured.

    Attributes:
        batch_size: Examples of single-batch CG; debiased CG uses two batches of half the size.
        draws: How many times the batches are drawn; both methods use the same examples in a draw.
        iterations: Steps of each run.
        evaluate_every: Steps from one measurement of the network to the next.
        full_examples: Training examples of full-batch runs; 0 for none.
        train_examples: Training images on which loss and accuracy are measured; all if None.
        test_examples: Test images on which loss and accuracy are measured; all if None.
        chunk_size: Images per pass.
        curvature: The matrix of the quadratic.
    """

    output: Path = Path("results/conjugate_gradients")
    batch_size: int = 512
    draws: int = 1
    iterations: int = 30
    evaluate_every: int = 1
    full_examples: int = 0
    train_examples: int | None = None
    test_examples: int | None = None
    chunk_size: int = 128
    curvature: Literal["ggn", "hessian"] = "ggn"


def run(settings: Settings) -> list[Row]:
    """Compute all trajectories; return a row for each measured iterate."""
    trained = load(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    train_indices = random_indices(trained.train, settings.train_examples, generator)
    test_indices = random_indices(trained.test, settings.test_examples, generator)
    data = {
        "train": trained.train.subset(train_indices),
        "test": trained.test.subset(test_indices),
    }
    rows: list[Row] = []

    def add_run(method: str, draw: int, batches: list[Tensor]) -> None:
        for row in trajectory(trained, batches, data, settings):
            rows.append({"method": method, "draw": draw, "all": "", **row})

    if settings.full_examples:
        indices = random_indices(trained.train, settings.full_examples, generator)
        add_run("full-batch", 0, [indices])
        add_run("full-batch, debiased", 0, list(indices.tensor_split(2)))
    for draw in tqdm(range(settings.draws), "trajectories", disable=not settings.progress):
        indices = random_indices(trained.train, settings.batch_size, generator)
        add_run("single-batch", draw, [indices])
        add_run("debiased", draw, list(indices.tensor_split(2)))
    table = ends(rows)
    metrics = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
    figure = lines_figure(rows, "all", metrics, x="iteration", label="CG iteration")
    tables = {"results": rows, "ends": table}
    write(settings, tables, {"conjugate_gradients": figure}, "Regularised loss of the trajectories")
    return rows


def trajectory(
    trained: Trained, batches: list[Tensor], data: dict[str, Images], settings: Settings
) -> list[Row]:
    """Run CG (Eq. 3) on one batch or debiased CG (Eq. 8) on two, and measure the iterates.

    Args:
        trained: The network and its data.
        batches: The indices of the training images of each batch.
        data: The data sets on which loss and accuracy are measured, by name.
        settings: The steps of the run.

    Returns:
        A row for each measured iterate, from the network itself (iteration 0) to the last one.
    """
    decay = trained.recipe.penalty
    quadratics = [
        Quadratic.from_data(
            trained.model,
            nn.CrossEntropyLoss(),
            trained.batches(trained.train, indices, settings.chunk_size),
            settings.curvature,
            weight_decay=decay,
        )
        for indices in batches
    ]
    steps: dict[int, Tensor] = {}

    def record(iterate: Iterate) -> None:
        steps[iterate.iteration] = iterate.x.clone()

    def record_debiased(_: Iterate, debiased: Iterate) -> None:
        record(debiased)

    if len(quadratics) == 1:
        (q,) = quadratics
        cg(q.matrix, -q.gradient, tol=0.0, max_iter=settings.iterations, callback=record)
    else:
        first, second = quadratics
        debiased_cg(
            first.matrix,
            second.matrix,
            -first.gradient,
            -second.gradient,
            tol=0.0,
            max_iter=settings.iterations,
            callback=record_debiased,
        )
    # CG stops early if the curvature is not positive, and its last iterate is always measured.
    last = max(steps)
    return [
        {"iteration": iteration, **loss_and_accuracy(trained, step, data, decay)}
        for iteration, step in steps.items()
        if iteration % settings.evaluate_every == 0 or iteration == last
    ]


def ends(rows: list[Row]) -> list[Row]:
    """Return the losses of each run at the start, at the best iterate and at the end."""
    table = []
    for method, draw in distinct(rows, "method", "draw"):
        run_rows = select(rows, method=method, draw=draw)
        line: Row = {"method": method, "draw": draw}
        for data in ("train", "test"):
            losses = [row[f"{data}_loss"] for row in run_rows]
            line[f"{data} start"] = losses[0]
            line[f"{data} best"] = min(losses)
            line[f"{data} end"] = losses[-1]
        table.append(line)
    return table
