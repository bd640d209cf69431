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

from examples.paper.common import Row, Trained, judge, load, some, write
from examples.paper.common import Settings as Shared
from examples.paper.data import Images
from examples.paper.plots import lines_figure
from laplace_debias.linalg import Iterate, cg, debiased_cg
from laplace_debias.quadratic import Quadratic


@dataclass(kw_only=True)
class Settings(Shared):
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
    parts = {
        name: images.subset(some(len(images), limit, generator))
        for name, images, limit in (
            ("train", trained.train, settings.train_examples),
            ("test", trained.test, settings.test_examples),
        )
    }
    chosen = [("full-batch", 0, settings.full_examples)] if settings.full_examples else []
    chosen += [("single-batch", draw, settings.batch_size) for draw in range(settings.draws)]
    rows: list[Row] = []
    for method, draw, size in tqdm(chosen, "trajectories", disable=not settings.progress):
        indices = some(len(trained.train), size, generator)
        debiased = "debiased" if method == "single-batch" else f"{method}, debiased"
        for name, halves in ((method, (indices,)), (debiased, indices.tensor_split(2))):
            of_run = trajectory(trained, [*halves], parts, settings)
            rows += [{"method": name, "draw": draw, "all": "", **row} for row in of_run]
    table = ends(rows)
    metrics = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
    figure = lines_figure(rows, "all", metrics, "iteration", "CG iteration")
    tables = {"results": rows, "ends": table}
    write(settings, tables, {"conjugate_gradients": figure}, "Regularised loss of the trajectories")
    return rows


def trajectory(
    trained: Trained, batches: list[Tensor], parts: dict[str, Images], settings: Settings
) -> list[Row]:
    """Run CG (Eq. 3) on one batch or debiased CG (Eq. 8) on two, and measure the iterates."""

    def quadratic(indices: Tensor) -> Quadratic:
        return Quadratic.from_data(
            trained.model,
            nn.CrossEntropyLoss(),
            [trained.batch(trained.train, i) for i in indices.split(settings.chunk_size)],
            settings.curvature,
            weight_decay=trained.recipe.penalty,
        )

    iterates: list[tuple[int, Tensor]] = []

    def record(iterate: Iterate) -> None:
        iterates.append((iterate.iteration, iterate.x.clone()))

    quadratics = [quadratic(indices) for indices in batches]
    matrices, right = [q.matrix for q in quadratics], [-q.gradient for q in quadratics]
    limits = {"tol": 0.0, "max_iter": settings.iterations}
    if len(batches) == 1:
        cg(*matrices, *right, callback=record, **limits)
    else:
        debiased_cg(*matrices, *right, callback=lambda _, debiased: record(debiased), **limits)
    # CG stops early if the curvature is not positive.
    measured = [(n, x) for n, x in iterates if n % settings.evaluate_every == 0]
    if measured[-1][0] != iterates[-1][0]:
        measured.append(iterates[-1])
    decay = trained.recipe.penalty
    return [{"iteration": n, **judge(trained, x, parts, decay)} for n, x in measured]


def ends(rows: list[Row]) -> list[Row]:
    """Return the losses of each run at the start, at the best iterate and at the end."""
    table = []
    for method, draw in dict.fromkeys((row["method"], row["draw"]) for row in rows):
        of_run = [row for row in rows if (row["method"], row["draw"]) == (method, draw)]
        found: Row = {"method": method, "draw": draw}
        for part in ("train", "test"):
            values = [row[f"{part}_loss"] for row in of_run]
            found |= {f"{part} start": values[0], f"{part} best": min(values)}
            found[f"{part} end"] = values[-1]
        table.append(found)
    return table
