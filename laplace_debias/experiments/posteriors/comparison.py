"""How close a posterior from few examples comes to the one from all of them, at a tuned δ too.

MAP, mini-batch (one batch of 2b examples), debiased (the same examples: directions from the first
b, magnitudes from the other b) and full-batch, over prior precisions and several draws of batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from laplace_debias.experiments.posteriors.distances import Distance, distances_by_precision
from laplace_debias.experiments.posteriors.fitting import PosteriorPlan
from laplace_debias.experiments.posteriors.tuned import TunedPredictions
from laplace_debias.experiments.shared.checks import (
    check_at_least,
    check_prior_precisions,
    check_severities,
)
from laplace_debias.experiments.shared.methods import DEBIASED, FULL, MAP, MINI
from laplace_debias.experiments.shared.store import Row
from laplace_debias.problems import ImageBatches, ImageDataset, corrupt

METHODS = (MAP, MINI, DEBIASED, FULL)
"""What is compared."""


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
        eval_batch_size: Images per batch of predictions and of the full-batch fit.
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
        check_at_least(self, 1, "batch_size", "draws", "full_examples", "validation_examples")
        check_at_least(self, 1, "test_examples", "ood_examples", "eval_batch_size", "num_threads")
        check_at_least(self, 0, "seed")
        check_prior_precisions(self.prior_precisions)
        check_severities(self.severities)
        if self.distance_range is not None and not any(
            self.distance_range[0] <= delta <= self.distance_range[1]
            for delta in self.prior_precisions
        ):
            raise ValueError(
                f"distance_range is {self.distance_range}; expected a range that holds some of "
                f"the prior_precisions {self.prior_precisions}"
            )

    @property
    def plan(self) -> PosteriorPlan:
        """How the posteriors are fitted."""
        return PosteriorPlan(
            curvature=self.curvature,
            params=self.params,
            fisher=self.fisher,
            full_fisher=self.fisher,
        )


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """What was measured.

    Attributes:
        settings: The settings.
        num_data: N, the number of training examples.
        num_full: How many of them stood for full-batch.
        sweep: Metrics on clean test images, a row per method, draw and prior precision: `method`,
            `draw`, `prior_precision` (None for the MAP), `validation_nll` (nats), `accuracy`, `nll`
            (nats), `ece` and `brier`.
        tuned: Those at the prior precision with the least validation NLL, on clean and on
            corrupted images: a row per method, draw and `severity` (0 for clean images), with the
            `auroc` of the entropy between clean (0) and corrupted images (1), None for clean ones.
        distances: Distance of the test NLL to full-batch's: a row per prior precision, and a last
            one over all of them.
        reliability: For each method, probabilities `[n, C]` and labels `[n]` of the clean test
            images, at the tuned prior precision of the first draw.
    """

    settings: ComparisonSettings
    num_data: int
    num_full: int
    sweep: list[Row]
    tuned: list[Row]
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
        train: All images that it was trained on.
        validation: Images to tune the prior precision on.
        test: Images to measure on; those out of distribution are made from them.
        settings: What to compare.
        progress: Whether to show progress bars.

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
    size = 2 * settings.batch_size
    if size > len(train):
        raise ValueError(
            f"batch_size {settings.batch_size} asks for {size} training images per draw; there "
            f"are {len(train)}: lower it"
        )
    draws = [torch.randperm(len(train), generator=generator)[:size] for _ in range(settings.draws)]
    full = ImageBatches(reference, torch.arange(len(reference)), settings.eval_batch_size)
    with _threads(settings.num_threads):
        posteriors = settings.plan.fit(model, train, draws, full, generator, progress)
        tuning = TunedPredictions(
            model,
            posteriors,
            validation,
            test,
            settings.prior_precisions,
            settings.eval_batch_size,
            progress,
        )
        tuned = tuning.rows(_corrupted(ood, settings))
    return ComparisonResult(
        settings=settings,
        num_data=len(train),
        num_full=len(reference),
        sweep=tuning.sweep,
        tuned=tuned,
        distances=distances_by_precision(tuning.sweep, settings.distance_range),
        reliability={method: (tuning.clean[method, 0][0], test.labels) for method in METHODS},
    )


def _corrupted(images: ImageDataset, settings: ComparisonSettings) -> dict[int, ImageDataset]:
    return {
        severity: images.with_images(corrupt(images.images, severity, seed=settings.seed))
        for severity in settings.severities
    }


def _some(
    data: ImageDataset, number: int | None, generator: torch.Generator, what: str
) -> ImageDataset:
    """So many images at random; the generator advances by the same whatever the number."""
    order = torch.randperm(len(data), generator=generator)
    if number is None:
        return data
    if number > len(data):
        raise ValueError(f"{what}_examples is {number}; there are {len(data)} images: lower it")
    return data.subset(order[:number])


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Another number of threads, inside of the context."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
