"""One experiment: how close a posterior from few examples comes to the one from all of them.

MAP, mini-batch (one batch of 2b examples), debiased (the same examples: directions from the first
b, magnitudes from the other b) and full-batch, over prior precisions and several draws of batches.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias import metrics
from laplace_debias.experiments.posteriors.distances import Distance, Measurement, distances
from laplace_debias.experiments.shared.predictives import (
    Grid,
    Name,
    Predict,
    classification_metrics,
    grid_predict,
    map_predict,
)
from laplace_debias.laplace import Laplace
from laplace_debias.problems import ImageDataset, corrupt

MAP, MINI, DEBIASED, FULL = METHODS = ("MAP", "mini-batch", "debiased", "full-batch")


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """What is compared, and on how much data.

    Attributes:
        batch_size: b: mini-batch sees one batch of 2b examples, debiased two of b.
        draws: How many times these 2b examples are drawn.
        prior_precisions: The grid of δ, ascending.
        distance_range: Least and greatest δ that the distance to full-batch is measured over; the
            whole grid if None.
        params: Which parameters are Bayesian.
        curvature: The posterior's structure.
        fisher: How the curvature's columns are found.
        full_examples: How many training examples, chosen at random, stand for full-batch (scaled to
            N, the number of all of them); all if None.
        validation_examples: How many validation images δ is tuned on; all if None.
        test_examples: How many test images are measured on; all if None.
        ood_examples: How many of these are corrupted as out-of-distribution data; all if None.
        severities: Severities of their corruption.
        eval_batch_size: Images a batch of predictions and of the full-batch fit.
        seed: Seed of every choice.
        num_threads: Threads of PyTorch's during the run; as they are if None.

    Raises:
        ValueError: If a number is out of range, or the grid is not ascending.
    """

    batch_size: int = 64
    draws: int = 5
    prior_precisions: tuple[float, ...] = (0.01, 0.0316, 0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0)
    distance_range: tuple[float, float] | None = None
    params: Literal["all", "weights", "last_layer"] = "weights"
    curvature: Literal["kfac", "ekfac"] = "kfac"
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    full_examples: int | None = None
    validation_examples: int | None = None
    test_examples: int | None = None
    ood_examples: int | None = None
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    eval_batch_size: int = 100
    seed: int = 0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "draws", "full_examples", "validation_examples", "test_examples"),
            *("ood_examples", "eval_batch_size", "num_threads"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        grid = self.prior_precisions
        if not grid or not all(0 < delta < math.inf for delta in grid):
            raise ValueError(f"prior_precisions is {grid}; expected positive numbers")
        if list(grid) != sorted(set(grid)):
            raise ValueError(f"prior_precisions is {grid}; expected it to ascend")
        if self.distance_range is not None and not any(
            self.distance_range[0] <= delta <= self.distance_range[1] for delta in grid
        ):
            raise ValueError(
                f"distance_range {self.distance_range} holds none of the prior_precisions {grid}"
            )
        if not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"severities is {self.severities}; expected numbers in 1 … 5")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class TunedMeasurement(Measurement):
    """Metrics at the prior precision with the least validation NLL, on clean or corrupted images.

    Attributes:
        severity: Of the test images' corruption; 0 for clean ones.
        auroc: How well the entropy tells corrupted images from clean ones (clean = 0, corrupted =
            1); None at severity 0.
    """

    severity: int
    auroc: float | None


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """What was measured.

    Attributes:
        settings: The settings.
        num_data: N, the number of training examples.
        num_full: How many of them stood for full-batch.
        sweep: Metrics on clean test images: a row a method, draw and prior precision.
        tuned: Metrics at the tuned prior precision: a row a method, draw and severity.
        distances: Distance of the test NLL to full-batch's: a row a prior precision, and a last one
            over all of them.
        reliability: For each method, probabilities `[n, C]` and labels `[n]` of the clean test
            images, at the tuned prior precision of the first draw.
    """

    settings: ComparisonSettings
    num_data: int
    num_full: int
    sweep: list[Measurement]
    tuned: list[TunedMeasurement]
    distances: list[Distance]
    reliability: dict[str, tuple[Float[Tensor, "n classes"], Int64[Tensor, " n"]]]


def compare(
    model: nn.Module,
    train: ImageDataset,
    validation: ImageDataset,
    test: ImageDataset,
    settings: ComparisonSettings,
    progress: bool = False,
) -> ComparisonResult:
    """Compare the posteriors of a trained classifier.

    Every posterior is fitted once; then all of them predict each data set in one pass: the whole
    grid of prior precisions on the validation and test images, the tuned ones on corrupted images.

    Args:
        model: The trained network, in evaluation mode.
        train: What it was trained on, in whole.
        validation: Images to tune the prior precision on.
        test: Images to measure on; those out of distribution are made from them.
        settings: What to compare.
        progress: Whether to show a progress bar.

    Returns:
        All measurements; the same for the same settings and data.

    Raises:
        ValueError: If a data set has fewer images than the settings ask for; as `Laplace`.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning,
        Figure 6.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    validation = _some(validation, settings.validation_examples, generator, "validation")
    test = _some(test, settings.test_examples, generator, "test")
    ood = _some(test, settings.ood_examples, generator, "ood")
    reference = _some(train, settings.full_examples, generator, "full")
    b = settings.batch_size
    if 2 * b > len(train):
        raise ValueError(
            f"batch_size {b} asks for {2 * b} training images a draw; there are {len(train)}"
        )
    chosen = [
        torch.randperm(len(train), generator=generator)[: 2 * b] for _ in range(settings.draws)
    ]
    with _threads(settings.num_threads):
        corrupted = {
            severity: ood.with_images(corrupt(ood.images, severity, seed=settings.seed))
            for severity in settings.severities
        }
        predictions = len(validation) + len(test) + sum(map(len, corrupted.values()))
        fit_passes = 2 if settings.curvature == "ekfac" else 1
        total = 2 * predictions + fit_passes * (len(reference) + 4 * settings.draws * b)
        with tqdm(total=total, unit="image", disable=not progress) as bar:
            posteriors: dict[Name, Laplace] = {}
            for draw, indices in enumerate(chosen):
                x, y = train.batch(indices)
                for method, batches in (
                    (MINI, ([(x, y)],)),
                    (DEBIASED, ([(x[:b], y[:b])], [(x[b:], y[b:])])),
                ):
                    bar.set_description(f"fit {method} {draw + 1}/{settings.draws}")
                    posteriors[method, draw] = _laplace(model, settings).fit_batches(
                        *batches, num_data=len(train), generator=generator
                    )
                    bar.update(2 * b * fit_passes)
            bar.set_description(f"fit {FULL} to {len(reference)} images")
            posteriors[FULL, 0] = _laplace(model, settings).fit_batches(
                _Batches(reference, settings.eval_batch_size, bar),
                num_data=len(train),
                generator=generator,
            )
            run = _Run(settings, validation, test, corrupted, bar)
            run.measure({(MAP, 0): (None,)}, map_predict(model))
            grids = dict.fromkeys(posteriors, settings.prior_precisions)
            run.measure(grids, grid_predict(posteriors))
    order = METHODS.index
    sweep = sorted(run.sweep, key=lambda row: order(row.method))
    return ComparisonResult(
        settings=settings,
        num_data=len(train),
        num_full=len(reference),
        sweep=sweep,
        tuned=sorted(run.tuned, key=lambda row: (order(row.method), row.draw, row.severity)),
        distances=distances(sweep, MINI, DEBIASED, FULL, settings.distance_range),
        reliability={method: run.reliability[method] for method in METHODS},
    )


def _laplace(model: nn.Module, settings: ComparisonSettings) -> Laplace:
    return Laplace(
        model, curvature=settings.curvature, params=settings.params, fisher=settings.fisher
    )


class _Run:
    """Measures predictives and gathers what they give.

    Args:
        settings: The settings.
        validation: Images to tune on.
        test: Clean test images.
        corrupted: Corrupted ones by severity.
        bar: Counts images predicted.
    """

    def __init__(
        self,
        settings: ComparisonSettings,
        validation: ImageDataset,
        test: ImageDataset,
        corrupted: dict[int, ImageDataset],
        bar: tqdm,
    ) -> None:
        self.sweep: list[Measurement] = []
        self.tuned: list[TunedMeasurement] = []
        self.reliability: dict[str, tuple[Tensor, Tensor]] = {}
        self._settings = settings
        self._validation = validation
        self._test = test
        self._corrupted = corrupted
        self._bar = bar

    def measure(self, grids: Mapping[Name, Grid], predict: Predict) -> None:
        """Measure posteriors at every prior precision, and at the best of them on OOD data.

        Args:
            grids: The grid of each posterior.
            predict: Predicts with all of them in one pass.
        """
        on_validation = self._predict("predict validation", predict, self._validation, grids)
        on_test = self._predict("predict test", predict, self._test, grids)
        best: dict[Name, Measurement] = {}
        scores: dict[Name, Tensor] = {}
        for name, grid in grids.items():
            rows = [
                Measurement(
                    method=name[0],
                    draw=name[1],
                    prior_precision=delta,
                    validation_nll=metrics.nll(tuning, self._validation.labels).item(),
                    **classification_metrics(probs, self._test.labels),
                )
                for delta, tuning, probs in zip(
                    grid, on_validation[name], on_test[name], strict=True
                )
            ]
            self.sweep += rows
            nlls = [row.validation_nll for row in rows]
            index = nlls.index(min(nlls))
            best[name], probs = rows[index], on_test[name][index]
            if name[1] == 0:
                self.reliability[name[0]] = (probs, self._test.labels)
            scores[name] = metrics.entropy(probs)
            self.tuned.append(TunedMeasurement(**vars(rows[index]), severity=0, auroc=None))
        tuned: dict[Name, Grid] = {name: (row.prior_precision,) for name, row in best.items()}
        for severity, data in self._corrupted.items():
            shifted = self._predict(f"predict severity {severity}", predict, data, tuned)
            for name, row in best.items():
                probs = shifted[name][0]
                values = vars(row) | classification_metrics(probs, data.labels)
                auroc = metrics.auroc(scores[name], metrics.entropy(probs)).item()
                self.tuned.append(TunedMeasurement(**values, severity=severity, auroc=auroc))

    def _predict(
        self, what: str, predict: Predict, data: ImageDataset, grids: Mapping[Name, Grid]
    ) -> dict[Name, Float[Tensor, "grid n classes"]]:
        self._bar.set_description(what)
        batches = _Batches(data, self._settings.eval_batch_size, self._bar)
        parts = [predict(x, grids) for x, _ in batches]
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in grids}


class _Batches:
    """Batches of a data set in its order, any number of times, counted by a progress bar."""

    def __init__(self, data: ImageDataset, batch_size: int, bar: tqdm) -> None:
        self._data = data
        self._batch_size = batch_size
        self._bar = bar

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in torch.arange(len(self._data)).split(self._batch_size):
            yield self._data.batch(indices)
            self._bar.update(len(indices))


def _some(
    data: ImageDataset, number: int | None, generator: torch.Generator, what: str
) -> ImageDataset:
    """So many images at random; the generator advances alike whatever the number."""
    order = torch.randperm(len(data), generator=generator)
    if number is None:
        return data
    if number > len(data):
        raise ValueError(f"{what}_examples is {number}; there are {len(data)} images")
    return data.subset(order[:number])


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Another number of threads, for a while."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
