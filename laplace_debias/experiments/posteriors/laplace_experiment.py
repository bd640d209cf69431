"""Figures 6 and 14 to 17: metrics of K-FAC Laplace posteriors against the prior precision.

The network itself, mini-batch, debiased (the same examples in two halves), cross-fitted (the same
examples, magnitudes out of fold) and full-batch; on test, training and corrupted test images, over
several draws of the mini-batch. Predictions are the linearised network's, with the exact functional
covariance and the probit link in place of the paper's samples (Eq. 18).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from laplace_debias.experiments.posteriors.distances import distances_by_data
from laplace_debias.experiments.posteriors.fitting import FisherKind, Name, PosteriorPlan
from laplace_debias.experiments.posteriors.predictions import (
    METRICS,
    measured,
    predict_all,
    same_grid,
    severity_name,
)
from laplace_debias.experiments.shared.checks import (
    check_at_least,
    check_even_batch,
    check_folds,
    check_prior_precisions,
    check_severities,
)
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.methods import CROSSFIT, DEBIASED
from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.setup import Trained, begin
from laplace_debias.experiments.shared.store import Row
from laplace_debias.laplace import Laplace
from laplace_debias.problems import ImageBatches, ImageDataset, Images, random_corruption
from laplace_debias.report.figures import prior_precision_grid
from laplace_debias.report.tables import print_table

NAME = "laplace"


@dataclass(frozen=True, kw_only=True)
class LaplaceSettings(ExperimentSettings):
    """Which posteriors there are, and what they are measured on.

    Attributes:
        batch_size: Examples of a mini-batch; debiased has two batches of half as many.
        draws: How many times these examples are drawn.
        folds: Folds of the cross-fitted posterior; 0 for none.
        prior_precisions: The grid of δ, ascending.
        curvature: The posteriors' structure.
        params: Which parameters are Bayesian; `weights` are those of layers with curvature, not
            other parameters (class tokens, position embeddings).
        fisher: How the mini-batches' curvature is found.
        full_fisher: How the full-batch curvature is found.
        full_examples: Training examples, chosen at random, that stand for all; all if None.
        test_examples: Test images to measure on; all if None.
        train_examples: Training images to measure on; 0 for none, all if None.
        severities: Severities of the corrupted test images.
        chunk_size: Images predicted, and stored for a resumed run, at a time.

    Raises:
        ValueError: If a number is out of range, or the grid is not ascending.
    """

    output: Path = Path("results/laplace")
    batch_size: int = 128
    draws: int = 5
    folds: int = 8
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0, 316.0, 1000.0)
    curvature: Literal["kfac", "ekfac"] = "kfac"
    params: Literal["all", "weights", "last_layer"] = "weights"
    fisher: FisherKind = "exact"
    full_fisher: FisherKind = "exact"
    full_examples: int | None = None
    test_examples: int | None = None
    train_examples: int | None = None
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    chunk_size: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "draws", "full_examples", "test_examples", "chunk_size")
        check_at_least(self, 0, "train_examples")
        check_even_batch(self.batch_size)
        check_folds(self.folds, self.batch_size)
        check_prior_precisions(self.prior_precisions)
        check_severities(self.severities)

    @property
    def plan(self) -> PosteriorPlan:
        """How the posteriors are fitted."""
        return PosteriorPlan(
            curvature=self.curvature,
            params=self.params,
            fisher=self.fisher,
            full_fisher=self.full_fisher,
            folds=self.folds,
        )


def run_laplace(settings: LaplaceSettings, console: Console | None = None) -> list[Row]:
    """Fit, predict and measure; write `results.csv`, `distances.csv` and the pictures.

    Returns:
        A row per data set, method, draw and prior precision, with accuracy, NLL (nats), ECE, Brier
        score and, on corrupted images, the AUROC of the entropy between them and clean ones.

    Raises:
        ValueError: If images to corrupt are not in memory; else as `Experiment`.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning,
        Sections 6.2 and B.6.
    """
    console, store, trained = begin(NAME, settings, console)
    chosen = choose(settings, len(trained.data.train), len(trained.data.test))
    data = _data_sets(trained, settings, chosen)

    @cache
    def posteriors() -> dict[Name, Laplace]:
        return fit_all(trained, settings, chosen)

    grid, size = same_grid(settings.prior_precisions), settings.chunk_size
    probs = predict_all(
        trained.model, posteriors, grid, data, size, store.tensors, settings.progress
    )
    rows = [
        row
        for name, images in data.items()
        for row in measured(
            name,
            probs[name],
            images.labels,
            grid,
            clean=probs["test"] if name.startswith("severity") else None,
        )
    ]
    store.table(rows)
    table = distances_by_data(rows)
    store.table(table, "distances")
    print_table(table, "Mean distance to full-batch over draws and δ", console=console)
    pictures = []
    for name, columns, parts in (
        (f"{NAME}_test", METRICS[:3], ["test"]),
        (NAME, METRICS, list(data)),
    ):
        by_part = {part: [row for row in rows if row["data"] == part] for part in parts}
        wanted = [
            m for m in columns if any(row[m] is not None for p in by_part.values() for row in p)
        ]
        pictures += store.picture(prior_precision_grid(by_part, wanted), name)
    for sentence in findings(table):
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return rows


@dataclass(frozen=True)
class Choice:
    """All choices of examples that the experiment makes.

    Attributes:
        batches: Training examples of each draw.
        full: Training examples that stand for all.
        test: Test images to measure on.
        train: Training images to measure on.
    """

    batches: list[Tensor]
    full: Tensor
    test: Tensor
    train: Tensor


def choose(settings: LaplaceSettings, num_train: int, num_test: int) -> Choice:
    """The choices that the settings make.

    Args:
        settings: The settings.
        num_train: How many training examples there are.
        num_test: How many test images.

    Raises:
        ValueError: If there are too few of them.
    """
    settings.check_counts(num_train, num_test)
    generator = torch.Generator().manual_seed(settings.seed)

    def some(there: int, number: int | None) -> Tensor:
        return torch.randperm(there, generator=generator)[:number]

    test, train = some(num_test, settings.test_examples), some(num_train, settings.train_examples)
    full = some(num_train, settings.full_examples)
    batches = [some(num_train, settings.batch_size) for _ in range(settings.draws)]
    return Choice(batches, full, test, train)


def _data_sets(trained: Trained, settings: LaplaceSettings, chosen: Choice) -> dict[str, Images]:
    test = trained.data.test.subset(chosen.test)
    found: dict[str, Images] = {"test": test}
    if len(chosen.train):
        found["train"] = trained.data.train.subset(chosen.train)
    if settings.severities and not isinstance(test, ImageDataset):
        raise ValueError(
            "images on disk are not corrupted here; give --severities=[], or corrupted images as "
            "the problem's data"
        )
    for severity in settings.severities:
        assert isinstance(test, ImageDataset)
        images = random_corruption(test.images, severity, settings.seed)
        found[severity_name(severity)] = test.with_images(images)
    return found


def fit_all(trained: Trained, settings: LaplaceSettings, chosen: Choice) -> dict[Name, Laplace]:
    """All posteriors, by method and draw; see `PosteriorPlan.fit`.

    Args:
        trained: The trained network and its data.
        settings: Which posteriors.
        chosen: On which examples.
    """
    dtype = next(trained.model.parameters()).dtype
    full = ImageBatches(trained.data.train, chosen.full, settings.chunk_size, dtype)
    generator = torch.Generator().manual_seed(settings.seed)
    return settings.plan.fit(
        trained.model, trained.data.train, chosen.batches, full, generator, settings.progress
    )


def findings(table: Sequence[Row]) -> list[str]:
    """Findings, a sentence per method, made from the numbers.

    Args:
        table: Rows of `distances_by_data`.
    """
    sentences = []
    for method in (DEBIASED, CROSSFIT):
        ratios = {row["data"]: row["nll ratio"] for row in table if row["method"] == method}
        if ratios:
            told = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in ratios.items())
            sentences.append(
                f"{method}: the NLL is, over all draws and prior precisions, this many times as "
                f"far from full-batch's as the mini-batch's: {told}."
            )
    return sentences


LAPLACE = Experiment(
    name=NAME,
    figure="Figures 6, 14–17",
    help="Metrics of Laplace posteriors against the prior precision, on clean and shifted images.",
    settings=LaplaceSettings,
    run=run_laplace,
)
