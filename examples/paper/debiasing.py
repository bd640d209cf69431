"""Beyond the paper: ways to get directions and magnitudes from the same few examples.

Every method uses the same 2b training examples of a draw. Methods with larger numbers in their
names, or with "all", also use further examples.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from examples.paper.common import (
    FULL,
    MINI,
    Batch,
    ExperimentSettings,
    Row,
    Trained,
    distances,
    load,
    random_indices,
    write,
)
from examples.paper.data import Images
from examples.paper.laplace import metrics_of, probabilities
from examples.paper.plots import bars_figure
from laplace_debias import Laplace


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The methods of the study, and the amounts of data.

    Attributes:
        batch_size: b, a multiple of 2; every method uses 2b examples.
        draws: How many times these examples are drawn; draws do not overlap each other or the
            reference.
        ekfac_draws: The number of draws in which EKFAC is also fitted.
        folds: Numbers of folds for cross-fitting.
        further_batches: The number of further magnitude batches of b examples.
        full_examples: The number of random training examples that represent the full batch.
        test_examples: The number of test images to predict.
        prior_precisions: The grid of δ.
        fisher: How the columns of the curvature are computed.
        chunk_size: Images per batch.
    """

    output: Path = Path("results/debiasing")
    batch_size: int = 16
    draws: int = 6
    ekfac_draws: int = 3
    folds: tuple[int, ...] = (2, 4, 8, 16, 32)
    further_batches: int = 2
    full_examples: int = 600
    test_examples: int = 100
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0)
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    chunk_size: int = 50


@dataclass(frozen=True)
class Method:
    """A way to fit a posterior to the examples of a draw.

    Attributes:
        name: The name in tables and pictures.
        directions: The batches of the eigenvectors.
        magnitudes: The batches of the curvature along them; the same batches if None.
        folds: The number of folds for cross-fitting.
        curvature: The curvature structure.
    """

    name: str
    directions: list[Batch]
    magnitudes: list[Batch] | None = None
    folds: int | None = None
    curvature: Literal["kfac", "ekfac"] = "kfac"


def run(settings: Settings) -> list[Row]:
    """Fit, predict, and compare with full-batch; return a row for each method."""
    trained = load(settings)
    draw_size = (2 + settings.further_batches) * settings.batch_size
    num_needed = settings.full_examples + settings.draws * draw_size
    if num_needed > len(trained.train):
        raise ValueError(
            f"the study takes {num_needed} training images; {settings.problem} has "
            f"{len(trained.train)}. Lower full_examples, draws or batch_size."
        )
    generator = torch.Generator().manual_seed(settings.seed)
    order = random_indices(trained.train, None, generator)
    test = trained.test.subset(random_indices(trained.test, settings.test_examples, generator))
    full_indices = order[: settings.full_examples]
    full = trained.batches(trained.train, full_indices, settings.chunk_size)

    measure = partial(nll_rows, trained, test, settings, generator)
    rows = measure(Method(FULL, full), draw=None)
    if settings.ekfac_draws:
        rows += measure(Method(f"EKFAC, {FULL}", full, curvature="ekfac"), draw=None)
    for draw in tqdm(range(settings.draws), "draws", disable=not settings.progress):
        start = settings.full_examples + draw * draw_size
        x, y = trained.batch(trained.train, order[start : start + draw_size])
        includes_ekfac = draw < settings.ekfac_draws
        for method in methods_of_draw(x, y, full, settings, includes_ekfac):
            rows += measure(method, draw)

    summary = distances(rows)
    figure = bars_figure(summary, "ratio", "|NLL − full-batch NLL| over the mini-batch's ↓")
    title = "Distance of the NLL to full-batch at equal data, ± half a 95 % interval over draws"
    write(settings, {"results": rows, "summary": summary}, {"distances": figure}, title)
    return summary


def methods_of_draw(
    x: Tensor, y: Tensor, full: list[Batch], settings: Settings, includes_ekfac: bool
) -> list[Method]:
    """Return all methods with the examples that they use in a draw.

    Args:
        x: The images of the draw: 2b for every method, followed by the further batches.
        y: Their labels.
        full: The batches that represent the full batch.
        settings: The methods of the study.
        includes_ekfac: Whether EKFAC is fitted too.
    """

    def batch(start: int, end: int) -> list[Batch]:
        return [(x[start:end], y[start:end])]

    b = settings.batch_size
    both_halves = batch(0, 2 * b)
    methods = [
        Method(MINI, both_halves),
        Method(f"debiased, {b} + {b}", batch(0, b), batch(b, 2 * b)),
    ]
    for folds in settings.folds:
        methods.append(Method(f"crossfit, {folds} folds", both_halves, folds=folds))
    if includes_ekfac:
        methods += [
            replace(method, name=f"EKFAC, {method.name}", curvature="ekfac") for method in methods
        ]
    for size in (b // 2, 3 * b // 2):
        name = f"debiased, {size} + {2 * b - size}"
        methods.append(Method(name, batch(0, size), batch(size, 2 * b)))
    for m in range(2, settings.further_batches + 2):
        name = f"debiased, {b} + {m * b}"
        methods.append(Method(name, batch(0, b), batch(b, (m + 1) * b)))
    methods.append(Method(f"debiased, {b} + all", batch(0, b), full))
    methods.append(Method("oracle magnitudes", both_halves, full))
    return methods


def nll_rows(
    trained: Trained,
    test: Images,
    settings: Settings,
    generator: torch.Generator,
    method: Method,
    draw: int | None,
) -> list[Row]:
    """Fit a posterior, and compute its NLL on test images for each prior precision."""
    la = Laplace(
        trained.model, curvature=method.curvature, params="weights", fisher=settings.fisher
    )
    la.fit_batches(
        method.directions,
        method.magnitudes,
        num_data=len(trained.train),
        folds=method.folds,
        generator=generator,
    )
    rows: list[Row] = []
    for delta in settings.prior_precisions:
        la.prior_precision = delta
        probs = probabilities(trained, la, test, settings.chunk_size)
        nll = metrics_of(probs, test.labels)["nll"]
        rows.append({"method": method.name, "draw": draw, "prior_precision": delta, "nll": nll})
    return rows
