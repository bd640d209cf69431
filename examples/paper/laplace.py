"""Figures 6 and 14 to 17: metrics of Laplace posteriors against the prior precision.

The methods are the network itself (MAP), mini-batch, debiased (the same examples in two halves),
cross-fitted (the same examples, with out-of-fold magnitudes) and full-batch. They are evaluated on
test, training and corrupted test images. Predictions are made with the linearised network and the
exact functional covariance, instead of the paper's samples (Eq. 18).
"""

from dataclasses import dataclass
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
    ExperimentSettings,
    Row,
    Trained,
    distinct,
    load,
    random_indices,
    ratio_of_distances,
    select,
    write,
)
from examples.paper.corruptions import BENCHMARK_KINDS
from examples.paper.data import Images
from examples.paper.plots import lines_figure
from laplace_debias import Laplace, metrics

Fisher = Literal["exact", "mc", "empirical"]


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
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


@dataclass(frozen=True)
class Posterior:
    """A fitted posterior, with its method and draw in tables and pictures."""

    method: str
    draw: int
    laplace: Laplace


def run(settings: Settings) -> list[Row]:
    """Fit, predict and measure; return the distances to full-batch on each data set."""
    trained = load(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    data = evaluation_data(trained, settings, generator)
    rows: list[Row] = []
    for posterior in fit_posteriors(trained, settings, generator):
        rows += metric_rows(trained, posterior, data, settings)
    tables = {"results": rows}
    if settings.validation_examples:
        tables["tuned"] = tuned(rows)
    tables["distances"] = distances(rows)
    metric_names = ["nll", "ece", "accuracy"]
    if settings.severities:
        metric_names.append("auroc")
    label = "Prior precision δ"
    figure = lines_figure(rows, "data", metric_names, x="prior_precision", label=label, log=True)
    write(settings, tables, {"laplace": figure}, "Mean distance to full-batch over draws and δ")
    return tables["distances"]


def evaluation_data(
    trained: Trained, settings: Settings, generator: torch.Generator
) -> dict[str, Images]:
    """Return the data sets on which posteriors are measured, by name; test images come first."""
    test = trained.test.subset(random_indices(trained.test, settings.test_examples, generator))
    data: dict[str, Images] = {"test": test}
    if settings.train_examples:
        indices = random_indices(trained.train, settings.train_examples, generator)
        data["train"] = trained.train.subset(indices)
    if settings.validation_examples:
        indices = random_indices(trained.validation, settings.validation_examples, generator)
        data["validation"] = trained.validation.subset(indices)
    for severity in settings.severities:
        data[f"severity {severity}"] = test.corrupted(severity, kinds=BENCHMARK_KINDS)
    return data


def fit_posteriors(
    trained: Trained, settings: Settings, generator: torch.Generator
) -> list[Posterior]:
    """Return all fits: Eq. 4 on each draw, Eq. 9 for debiased fits.

    The first and the last use the same fit, to the full batch: for MAP, only its mode is used.
    """

    def fit(
        fisher: Fisher,
        directions: list[Batch],
        magnitudes: list[Batch] | None = None,
        folds: int | None = None,
    ) -> Laplace:
        # This selects weights of layers; class tokens and position embeddings have other names.
        la = Laplace(
            trained.model,
            curvature=settings.curvature,
            params=lambda name, _: name.endswith("weight"),
            fisher=fisher,
        )
        num_data = len(trained.train)
        return la.fit_batches(
            directions, magnitudes, num_data=num_data, folds=folds, generator=generator
        )

    order = random_indices(trained.train, settings.full_examples, generator)
    full_batch = trained.batches(trained.train, order, settings.chunk_size)
    full = fit(settings.full_fisher, full_batch)
    posteriors = [Posterior(MAP, 0, full)]
    for draw in range(settings.draws):
        indices = random_indices(trained.train, settings.batch_size, generator)
        x, y = trained.batch(trained.train, indices)
        half = len(x) // 2
        mini_batch = [(x, y)]
        first_half = [(x[:half], y[:half])]
        second_half = [(x[half:], y[half:])]
        mini = fit(settings.fisher, mini_batch)
        posteriors.append(Posterior(MINI, draw, mini))
        debiased = fit(settings.fisher, first_half, second_half)
        posteriors.append(Posterior(DEBIASED, draw, debiased))
        if settings.folds:
            crossfit = fit(settings.fisher, mini_batch, folds=settings.folds)
            posteriors.append(Posterior(CROSSFIT, draw, crossfit))
    posteriors.append(Posterior(FULL, 0, full))
    return posteriors


def metric_rows(
    trained: Trained, posterior: Posterior, data: dict[str, Images], settings: Settings
) -> list[Row]:
    """Measure a posterior on each data set, for each prior precision (None for MAP).

    For corrupted test images, the AUROC of the entropy against the clean test images is added.
    """
    la = posterior.laplace
    is_map = posterior.method == MAP
    grid = (None,) if is_map else settings.prior_precisions
    title = f"predict, {posterior.method} {posterior.draw}"
    rows: list[Row] = []
    for delta in tqdm(grid, title, disable=not settings.progress):
        if delta is not None:
            la.prior_precision = delta
        entropies: dict[str, Tensor] = {}
        for name, images in data.items():
            probs = probabilities(trained, la, images, settings.chunk_size, is_map)
            entropies[name] = metrics.entropy(probs)
            row = {
                "data": name,
                "method": posterior.method,
                "draw": posterior.draw,
                "prior_precision": delta,
                **metrics_of(probs, images.labels),
            }
            if name.startswith("severity"):
                row["auroc"] = float(metrics.auroc(entropies["test"], entropies[name]))
            rows.append(row)
    return rows


def probabilities(
    trained: Trained, la: Laplace, images: Images, chunk_size: int, is_map: bool = False
) -> Tensor:
    """Predict probabilities, [n, C] in float64.

    Args:
        trained: The network.
        la: The posterior.
        images: The images, [n].
        chunk_size: Images predicted at a time.
        is_map: Whether to predict with the network itself.
    """
    batches = trained.batches(images, torch.arange(len(images)), chunk_size)
    if is_map:
        predictions = [la.predict(x, method="map") for x, _ in batches]
    else:
        predictions = [la.predict(x, link="probit") for x, _ in batches]
    return torch.cat([prediction.probs.double().cpu() for prediction in predictions])


def metrics_of(probs: Tensor, labels: Tensor) -> Row:
    """Compute the NLL in nats, the ECE and the accuracy of predictions."""
    return {
        "nll": float(metrics.nll(probs, labels)),
        "ece": float(metrics.ece(probs, labels)),
        "accuracy": float(metrics.accuracy(probs, labels)),
    }


def distances(rows: list[Row]) -> list[Row]:
    """Compute mean distances of metrics to full-batch, by data and method.

    The distance is |metric − metric of full-batch|, averaged over draws and prior precisions. For
    the NLL, the ratio to the distance of the mini-batch fit is also computed.
    """
    table: list[Row] = []
    for data, method in distinct(rows, "data", "method"):
        if method in (MAP, FULL):
            continue
        full_rows = select(rows, data=data, method=FULL)
        full = {row["prior_precision"]: row for row in full_rows}
        line: Row = {"data": data, "method": method}
        for metric in ("nll", "ece", "accuracy"):
            line[metric] = fmean(
                abs(row[metric] - full[row["prior_precision"]][metric])
                for row in select(rows, data=data, method=method)
            )
        table.append(line)
    for line in table:
        (mini,) = select(table, data=line["data"], method=MINI)
        line["ratio"] = ratio_of_distances(line["nll"], mini["nll"])
    return table


def tuned(rows: list[Row]) -> list[Row]:
    """Return means over draws at the prior precision of lowest validation NLL."""
    at_best: list[Row] = []
    for method, draw in distinct(rows, "method", "draw"):
        posterior_rows = select(rows, method=method, draw=draw)
        validation_rows = select(posterior_rows, data="validation")
        best = min(validation_rows, key=lambda row: row["nll"])
        at_best += select(posterior_rows, prior_precision=best["prior_precision"])
    table = []
    for data, method in distinct(at_best, "data", "method"):
        line: Row = {"data": data, "method": method}
        for metric in ("nll", "ece", "accuracy"):
            line[metric] = fmean(row[metric] for row in select(at_best, data=data, method=method))
        table.append(line)
    return sorted(table, key=lambda line: METHODS.index(line["method"]))
