"""Section B.6: run time and memory of fits, debiased against mini-batch.

A debiased fit with two batches of half the mini-batch size uses as many examples as a mini-batch
fit, and also projects the second factors block by block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from examples.paper.common import (
    CROSSFIT,
    DEBIASED,
    FULL,
    MINI,
    Batch,
    ExperimentSettings,
    Row,
    Trained,
    load,
    random_indices,
    select,
    write,
)
from examples.paper.plots import new_panels
from laplace_debias import Laplace
from laplace_debias.report.style import OKABE_ITO, style_axes


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The fits to time.

    Attributes:
        batch_size: Examples of a mini-batch; debiased fits use two batches of half the size.
        folds: Folds of the cross-fitted posterior.
        repeats: How many times each fit is timed; the fits take turns.
        full_examples: The number of random training examples of a full-batch fit, which reads them
            in mini-batches; 0 for none.
        fisher: How the curvature is computed.
    """

    output: Path = Path("results/runtime")
    batch_size: int = 128
    folds: int = 8
    repeats: int = 3
    full_examples: int = 0
    fisher: Literal["exact", "mc", "empirical"] = "mc"


def run(settings: Settings) -> list[Row]:
    """Time the fits in turn; return medians and their ratios to the mini-batch fit."""
    trained = load(settings)
    fits = timed_fits(trained, settings)
    # The first fit of a process also sets up threads and buffers, so it is not timed.
    fits[MINI]()
    rows = [
        {"method": method, "repeat": repeat, **cost(fit, settings.device)}
        for repeat in range(settings.repeats)
        for method, fit in fits.items()
    ]
    seconds = {
        method: median(row["seconds"] for row in select(rows, method=method)) for method in fits
    }
    table = [
        {"method": method, "seconds": seconds[method], "ratio": seconds[method] / seconds[MINI]}
        for method in fits
    ]
    figure, ((ax,),) = new_panels(1, 1, (5.6, 2.6))
    ax.barh(list(seconds), list(seconds.values()), color=OKABE_ITO["blue"])
    ax.set_xlabel("Seconds")
    style_axes(ax)
    machine = f"{settings.device}, {torch.get_num_threads()} threads"
    title = f"Fits of {settings.problem} on {machine}: medians"
    write(settings, {"results": rows, "summary": table}, {"runtime": figure}, title)
    return table


def timed_fits(trained: Trained, settings: Settings) -> dict[str, Callable[[], Laplace]]:
    """Return functions that fit a posterior, by the names of the methods."""
    mini_batch = trained.random_batches(settings.batch_size, 1, settings.seed)
    [(x, y)] = mini_batch
    half = len(x) // 2
    first_half = [(x[:half], y[:half])]
    second_half = [(x[half:], y[half:])]

    def fit(
        directions: list[Batch],
        magnitudes: list[Batch] | None = None,
        folds: int | None = None,
    ) -> Laplace:
        la = Laplace(trained.model, params="weights", fisher=settings.fisher)
        generator = torch.Generator().manual_seed(settings.seed)
        return la.fit_batches(directions, magnitudes, folds=folds, generator=generator)

    fits: dict[str, Callable[[], Laplace]] = {
        MINI: partial(fit, mini_batch),
        DEBIASED: partial(fit, first_half, second_half),
        CROSSFIT: partial(fit, mini_batch, folds=settings.folds),
    }
    if settings.full_examples:
        generator = torch.Generator().manual_seed(settings.seed)
        indices = random_indices(trained.train, settings.full_examples, generator)
        fits[FULL] = partial(fit, trained.batches(trained.train, indices, settings.batch_size))
    return fits


def cost(fit: Callable[[], Laplace], device: str) -> Row:
    """Measure a fit's seconds and, on a GPU, its additional peak memory in bytes."""
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        memory_before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    fit()
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = None
    if is_gpu:
        peak = torch.cuda.max_memory_allocated() - memory_before
    return {"seconds": seconds, "peak": peak}
