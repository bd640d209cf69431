"""Section B.6: run time and memory of fits, debiased against mini-batch.

A debiased fit with two batches of half the mini-batch size uses as many examples as a mini-batch
fit, and also projects the second factors block by block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
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
    Row,
    Trained,
    load,
    some,
    write,
)
from examples.paper.common import (
    Settings as Shared,
)
from examples.paper.plots import new_panels
from laplace_debias import Laplace
from laplace_debias.report.style import OKABE_ITO, style_axes


@dataclass(kw_only=True)
class Settings(Shared):
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
    fits[MINI]()  # the first fit of a process also sets up threads and buffers
    rows = [
        {"method": name, "repeat": repeat, **cost(fit, settings.device)}
        for repeat in range(settings.repeats)
        for name, fit in fits.items()
    ]
    seconds = {name: [r["seconds"] for r in rows if r["method"] == name] for name in fits}
    table = [
        {"method": name, "seconds": median(found), "ratio": median(found) / median(seconds[MINI])}
        for name, found in seconds.items()
    ]
    figure, ((ax,),) = new_panels(1, 1, (5.6, 2.6))
    ax.barh([*seconds], [row["seconds"] for row in table], color=OKABE_ITO["blue"])
    ax.set_xlabel("Seconds")
    style_axes(ax)
    where = f"{settings.device}, {torch.get_num_threads()} threads"
    title = f"Fits of {settings.problem} on {where}: medians"
    write(settings, {"results": rows, "summary": table}, {"runtime": figure}, title)
    return table


def timed_fits(trained: Trained, settings: Settings) -> dict[str, Callable[[], Laplace]]:
    """Return the fits, by name."""
    [(x, y)] = trained.batches(settings.batch_size, 1, settings.seed)
    half = len(x) // 2

    def fitted(*batches: list[Batch], folds: int | None = None) -> Laplace:
        la = Laplace(trained.model, params="weights", fisher=settings.fisher)
        generator = torch.Generator().manual_seed(settings.seed)
        return la.fit_batches(*batches, folds=folds, generator=generator)

    fits = {
        MINI: lambda: fitted([(x, y)]),
        DEBIASED: lambda: fitted([(x[:half], y[:half])], [(x[half:], y[half:])]),
        CROSSFIT: lambda: fitted([(x, y)], folds=settings.folds),
    }
    if settings.full_examples:
        generator = torch.Generator().manual_seed(settings.seed)
        order = some(len(trained.train), settings.full_examples, generator)
        full = [trained.batch(trained.train, part) for part in order.split(settings.batch_size)]
        fits[FULL] = lambda: fitted(full)
    return fits


def cost(fit: Callable[[], Laplace], device: str) -> Row:
    """Measure a fit's seconds and, on a GPU, its additional peak memory in bytes."""
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    fit()
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if is_gpu else None
    return {"seconds": seconds, "peak": peak}
