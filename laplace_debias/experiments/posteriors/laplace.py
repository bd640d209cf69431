"""Figures 6 and 14 to 17: metrics of K-FAC Laplace posteriors against the prior precision.

The network itself, mini-batch, debiased (the same examples in two halves), cross-fitted (the same
examples, magnitudes out of fold) and full-batch; on test, training and corrupted test images, over
several draws of the mini-batch. Predictions are the linearised network's, with the exact functional
covariance and the probit link in place of the paper's samples (Eq. 18).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.layers.blocks import is_supported
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.experiments.posteriors.laplace_tables import (
    CROSSFIT,
    DEBIASED,
    FULL,
    MAP,
    METRICS,
    MINI,
    Row,
    distances,
    findings,
    measured,
)
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.judge import Chunks
from laplace_debias.experiments.shared.predictives import Grid, Name, grid_predict, map_predict
from laplace_debias.experiments.shared.setup import ExperimentSettings, Trained, load_trained
from laplace_debias.experiments.shared.storage import Store, open_store
from laplace_debias.laplace import Laplace
from laplace_debias.problems import ImageDataset, Images, random_corruption
from laplace_debias.report.figures import prior_precision_grid
from laplace_debias.report.tables import print_table

NAME = "laplace"


@dataclass(frozen=True, kw_only=True)
class LaplaceSettings(ExperimentSettings):
    """Which posteriors there are, and what they are measured on.

    Attributes:
        output: Folder of the tables, the pictures and what is kept to go on from.
        batch_size: Examples of a mini-batch; debiased has two batches of half as many.
        draws: How many times these examples are drawn.
        folds: Folds of the cross-fitted posterior; 0 for none.
        prior_precisions: The grid of δ, ascending.
        curvature: The posteriors' structure.
        params: Which parameters are Bayesian; `weights` are those of layers that have curvature,
            not what else a network may hold (class tokens, position embeddings).
        fisher: How the mini-batches' curvature is found.
        full_fisher: How the full-batch curvature is found.
        full_examples: Training examples, chosen at random, that stand for all; all if None.
        test_examples: Test images to measure on; all if None.
        train_examples: Training images to measure on; 0 for none, all if None.
        severities: Severities of the corrupted test images.
        chunk_size: Images predicted at a time, which is also what is stored to go on from.

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
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    full_fisher: Literal["exact", "mc", "empirical"] = "exact"
    full_examples: int | None = None
    test_examples: int | None = None
    train_examples: int | None = None
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    chunk_size: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draws", "full_examples", "test_examples", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if self.train_examples is not None and self.train_examples < 0:
            raise ValueError(f"train_examples is {self.train_examples}; expected at least 0")
        if self.batch_size < 2 or self.batch_size % 2:
            raise ValueError(
                f"batch_size is {self.batch_size}; expected an even number, since debiased has two "
                "batches of half as many"
            )
        if self.folds and not 2 <= self.folds <= self.batch_size:
            raise ValueError(
                f"folds is {self.folds}; expected 2 … {self.batch_size} (batch_size), or 0 for no "
                "cross-fitted posterior"
            )
        grid = self.prior_precisions
        if not grid or not all(0 < delta < math.inf for delta in grid):
            raise ValueError(f"prior_precisions is {grid}; expected positive numbers")
        if list(grid) != sorted(set(grid)):
            raise ValueError(f"prior_precisions is {grid}; expected it to ascend")
        if not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"severities is {self.severities}; expected numbers in 1 … 5")


def run_laplace(settings: LaplaceSettings, console: Console | None = None) -> list[Row]:
    """Fit, predict and measure; write `results.csv`, `distances.csv` and the pictures.

    Args:
        settings: What to run.
        console: Where to print; the standard output if None.

    Returns:
        A row a data set, method, draw and prior precision, with accuracy, NLL (nats), ECE, Brier
        score and, on corrupted images, the AUROC of the entropy between them and clean ones.

    Raises:
        ValueError: If there are too few images, or images to corrupt are not in memory; as
            `load_trained` and `open_store`.
        FileExistsError: If the output holds results and is not to be resumed.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning,
        Sections 6.2 and B.6.
    """
    console = console or Console(highlight=False, markup=False)
    store = open_store(NAME, settings)
    trained = load_trained(settings, store, console)
    chosen = choose(settings, len(trained.data.train), len(trained.data.test))
    data = _data_sets(trained, settings, chosen)
    probs = _predict_all(trained, settings, chosen, data, store)
    rows = [
        row
        for name, images in data.items()
        for row in measured(
            name, probs[name], images.labels, settings.prior_precisions, probs["test"]
        )
    ]
    store.table(rows)
    table = distances(rows)
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
            "images that are read one by one are not corrupted here; pass --severities=[], or "
            "corrupted images as the problem's data"
        )
    for severity in settings.severities:
        assert isinstance(test, ImageDataset)
        images = random_corruption(test.images, severity, settings.seed)
        found[f"severity {severity}"] = test.with_images(images)
    return found


def fit_all(trained: Trained, settings: LaplaceSettings, chosen: Choice) -> dict[Name, Laplace]:
    """All posteriors, by method and draw: Eq. 4 on each batch, Eq. 9 for the debiased ones.

    Args:
        trained: The trained network and its data.
        settings: Which posteriors.
        chosen: On which examples.
    """
    train = trained.data.train
    generator = torch.Generator().manual_seed(settings.seed)
    found: dict[Name, Laplace] = {}

    def laplace(fisher: str) -> Laplace:
        return Laplace(
            trained.model,
            curvature=settings.curvature,
            params=chosen_parameters(trained.model, settings.params),
            fisher=fisher,
        )

    half = settings.batch_size // 2
    common: dict[str, Any] = {"num_data": len(train), "generator": generator}
    for draw, indices in enumerate(tqdm(chosen.batches, desc="fit", disable=not settings.progress)):
        x, y = train.batch(indices)
        halves = [(x[:half], y[:half])], [(x[half:], y[half:])]
        found[MINI, draw] = laplace(settings.fisher).fit_batches([(x, y)], **common)
        found[DEBIASED, draw] = laplace(settings.fisher).fit_batches(*halves, **common)
        if settings.folds:
            found[CROSSFIT, draw] = laplace(settings.fisher).fit_batches(
                [(x, y)], folds=settings.folds, **common
            )
    dtype = next(trained.model.parameters()).dtype
    found[FULL, 0] = laplace(settings.full_fisher).fit_batches(
        Chunks(train, chosen.full, settings.chunk_size, dtype), **common
    )
    return found


def _predict_all(
    trained: Trained,
    settings: LaplaceSettings,
    chosen: Choice,
    data: Mapping[str, Images],
    store: Store,
) -> dict[str, dict[Name, Tensor]]:
    """Probabilities `[P, n, C]` of every method and draw on each data set, stored by chunks."""

    @cache
    def posteriors() -> dict[Name, Laplace]:
        return fit_all(trained, settings, chosen)

    def predicted(images: Images, part: Tensor) -> dict[str, Tensor]:
        x, _ = images.batch(part)
        grids: dict[Name, Grid] = dict.fromkeys(posteriors(), settings.prior_precisions)
        found = map_predict(trained.model)(x, {(MAP, 0): (None,)})
        found |= grid_predict(posteriors())(x, grids)
        return {f"{method}/{draw}": probs for (method, draw), probs in found.items()}

    collected: dict[str, dict[Name, Tensor]] = {}
    total = sum(len(images) for images in data.values())
    with tqdm(total=total, desc="predict", unit="image", disable=not settings.progress) as bar:
        for name, images in data.items():
            parts: list[dict[str, Tensor]] = []
            for number, part in enumerate(torch.arange(len(images)).split(settings.chunk_size)):
                key = f"{name.replace(' ', '-')}-{number:04d}"

                def compute(images: Images = images, part: Tensor = part) -> dict[str, Tensor]:
                    return predicted(images, part)

                parts.append(store.tensors(key, compute))
                bar.update(len(part))
            collected[name] = {
                (method, int(draw)): torch.cat([p[f"{method}/{draw}"] for p in parts], dim=1)
                for method, _, draw in (label.rpartition("/") for label in parts[0])
            }
    return collected


def chosen_parameters(model: nn.Module, params: str) -> ParameterSelection:
    """The settings' choice; for `weights` the names of those that belong to a supported layer."""
    if params != "weights":
        return params
    return [
        f"{path}.{name}" if path else name
        for path, layer in model.named_modules()
        if is_supported(layer)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad and not name.endswith("bias")
    ]


LAPLACE = Experiment(
    name=NAME,
    figure="Figures 6, 14–17",
    help="Metrics of Laplace posteriors against the prior precision, on clean and shifted images.",
    settings=LaplaceSettings,
    run=run_laplace,
)
