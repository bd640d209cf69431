"""Figures 6 and 14 to 17: metrics of Laplace posteriors against the prior precision.

The methods are the network itself (MAP), mini-batch, debiased (the same examples in two halves),
cross-fitted (the same examples, with out-of-fold magnitudes) and full-batch. They are evaluated on
test, training and corrupted test images. Predictions are made with the linearised network and the
exact functional covariance, instead of the paper's samples (Eq. 18).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from examples.paper.common import (
    CROSSFIT,
    DEBIASED,
    FULL,
    MAP,
    METHODS,
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
from examples.paper.corruptions import BENCHMARK_KINDS
from examples.paper.data import Images
from examples.paper.plots import lines_figure
from laplace_debias import Laplace, metrics

Fisher = Literal["exact", "mc", "empirical"]


@dataclass(kw_only=True)
class Settings(Shared):
    """The posteriors, and the data on which they are measured.

    Attributes:
        batch_size: Examples of a mini-batch; debiased fits use two batches of half the size.
        draws: How many times the examples are drawn.
        folds: Folds of the cross-fitted posterior; 0 for none.
        prior_precisions: The grid of δ.
        curvature: The curvature structure of the posteriors.
        fisher: How the curvature of mini-batches is computed.
        full_fisher: How the full-batch curvature is computed.
        full_examples: The number of random training examples that represent all; all if None.
        validation_examples: Held-out images for tuning δ; 0 for none.
        test_examples: Test images to measure on; all if None.
        train_examples: Training images to measure on.
        severities: Severities of the corrupted test images.
        chunk_size: Images predicted at a time.
    """

    output: Path = Path("results/laplace")
    batch_size: int = 128
    draws: int = 5
    folds: int = 8
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0, 316.0, 1000.0)
    curvature: Literal["kfac", "ekfac"] = "kfac"
    fisher: Fisher = "exact"
    full_fisher: Fisher = "exact"
    full_examples: int | None = None
    validation_examples: int = 0
    test_examples: int | None = None
    train_examples: int = 0
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    chunk_size: int = 100


def run(settings: Settings) -> list[Row]:
    """Fit, predict and measure; return the distances to full-batch on each data set."""
    trained = load(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    test = trained.test.subset(some(len(trained.test), settings.test_examples, generator))
    data: dict[str, Images] = {"test": test}
    for name, number in (
        ("train", settings.train_examples),
        ("validation", settings.validation_examples),
    ):
        if number:
            images: Images = getattr(trained, name)
            data[name] = images.subset(some(len(images), number, generator))
    data |= {f"severity {s}": test.corrupted(s, kinds=BENCHMARK_KINDS) for s in settings.severities}
    rows: list[Row] = []
    entropies: dict[tuple[str, int, float | None], Tensor] = {}
    for (method, draw), la in posteriors(trained, settings, generator).items():
        grid = (None,) if method == MAP else settings.prior_precisions
        for delta in tqdm(grid, f"predict, {method} {draw}", disable=not settings.progress):
            if delta is not None:
                la.prior_precision = delta
            for name, images in data.items():
                probs = predicted(trained, la, method, images, settings.chunk_size)
                row = {"data": name, "method": method, "draw": draw, "prior_precision": delta}
                row |= measured(probs, images.labels)
                scores = metrics.entropy(probs)
                if name == "test":
                    entropies[method, draw, delta] = scores
                elif name.startswith("severity"):
                    clean = entropies[method, draw, delta]
                    row["auroc"] = float(metrics.auroc(clean, scores))
                rows.append(row)
    tables = {"results": rows}
    if settings.validation_examples:
        tables["tuned"] = tuned(rows)
    tables["distances"] = distances(rows)
    shown = ("nll", "ece", "accuracy", "auroc")[: 4 if settings.severities else 3]
    figure = lines_figure(rows, "data", shown, "prior_precision", "Prior precision δ", log=True)
    write(settings, tables, {"laplace": figure}, "Mean distance to full-batch over draws and δ")
    return tables["distances"]


def posteriors(
    trained: Trained, settings: Settings, generator: torch.Generator
) -> dict[tuple[str, int], Laplace]:
    """Return all fits, by method and draw: Eq. 4 on each draw, Eq. 9 for debiased fits."""

    def fit(fisher: Fisher, *batches: list[Batch], folds: int | None = None) -> Laplace:
        # This selects weights of layers; class tokens and position embeddings have other names.
        la = Laplace(
            trained.model,
            curvature=settings.curvature,
            params=lambda name, _: name.endswith("weight"),
            fisher=fisher,
        )
        number = len(trained.train)
        return la.fit_batches(*batches, num_data=number, folds=folds, generator=generator)

    order = some(len(trained.train), settings.full_examples, generator)
    parts = order.split(settings.chunk_size)
    full = fit(settings.full_fisher, [trained.batch(trained.train, part) for part in parts])
    found = {(MAP, 0): full}
    for draw in range(settings.draws):
        indices = some(len(trained.train), settings.batch_size, generator)
        x, y = trained.batch(trained.train, indices)
        half = len(x) // 2
        found[MINI, draw] = fit(settings.fisher, [(x, y)])
        first, second = [(x[:half], y[:half])], [(x[half:], y[half:])]
        found[DEBIASED, draw] = fit(settings.fisher, first, second)
        if settings.folds:
            found[CROSSFIT, draw] = fit(settings.fisher, [(x, y)], folds=settings.folds)
    return {**found, (FULL, 0): full}


def predicted(
    trained: Trained, la: Laplace, method: str, images: Images, chunk_size: int
) -> Tensor:
    """Predict probabilities, [n, C] in float64."""
    predict = partial(la.predict, **{"method": "map"} if method == MAP else {"link": "probit"})
    parts = [trained.batch(images, i)[0] for i in torch.arange(len(images)).split(chunk_size)]
    return torch.cat([predict(x).probs.double().cpu() for x in parts])


def measured(probs: Tensor, labels: Tensor) -> Row:
    """Compute metrics of predictions."""
    kinds = {"nll": metrics.nll, "ece": metrics.ece, "accuracy": metrics.accuracy}
    return {name: float(metric(probs, labels)) for name, metric in kinds.items()}


def distances(rows: list[Row]) -> list[Row]:
    """Compute mean distances of metrics to full-batch, by data and method.

    The distance is |metric − metric of full-batch|, averaged over draws and prior precisions. For
    the NLL, the ratio to the distance of the mini-batch fit is also computed.
    """
    table: list[Row] = []
    full = {(r["data"], r["prior_precision"]): r for r in rows if r["method"] == FULL}
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in rows):
        if method in (MAP, FULL):
            continue
        chosen = [r for r in rows if (r["data"], r["method"]) == (name, method)]
        pairs = [(row, full[name, row["prior_precision"]]) for row in chosen]
        means = {m: fmean(abs(a[m] - b[m]) for a, b in pairs) for m in ("nll", "ece", "accuracy")}
        of_mini = [r["nll"] for r in table if (r["data"], r["method"]) == (name, MINI)]
        ratio = means["nll"] / of_mini[0] if of_mini else 1.0
        table.append({"data": name, "method": method, **means, "ratio": ratio})
    return table


def tuned(rows: list[Row]) -> list[Row]:
    """Return means over draws at the prior precision of lowest validation NLL."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["data"] == "validation":
            key = row["method"], row["draw"]
            best[key] = min(best.get(key, row), row, key=lambda r: r["nll"])
    at_best = [
        row
        for row in rows
        if row["prior_precision"] == best[row["method"], row["draw"]]["prior_precision"]
    ]
    table = []
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in at_best):
        chosen = [r for r in at_best if (r["data"], r["method"]) == (name, method)]
        means = {m: fmean(r[m] for r in chosen) for m in ("nll", "ece", "accuracy")}
        table.append({"data": name, "method": method, **means})
    return sorted(table, key=lambda row: METHODS.index(row["method"]))
