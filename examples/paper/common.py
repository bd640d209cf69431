"""Common parts of the experiments: settings, the trained network and its data, and results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn

from examples.paper.data import Images
from examples.paper.problems import Problem, Recipe, get_problem, train
from laplace_debias.report.style import save
from laplace_debias.report.tables import print_table, write_csv
from laplace_debias.sources.weights import load_weights
from laplace_debias.system.settings import CommandSettings

Row = dict[str, Any]
Batch = tuple[Tensor, Tensor]

MAP = "MAP"
MINI = "mini-batch"
DEBIASED = "debiased"
CROSSFIT = "cross-fitted"
FULL = "full-batch"
METHODS = (MAP, MINI, DEBIASED, CROSSFIT, FULL)
"""The names of posteriors in tables and pictures."""


@dataclass(kw_only=True)
class ExperimentSettings(CommandSettings):
    """Settings of every experiment.

    Attributes:
        problem: Name of the test problem.
        data: The data: an archive or a torchvision root for CIFAR, a folder with `train/` and
            `val/` for ImageNet, nothing for the digits.
        checkpoint: The trained network. If None, the published network, or a network that is
            trained here.
        recipe: Changes of the problem's recipe. The option may be repeated.
        output: Folder of tables and pictures.
        seed: The seed of all random choices.
        device: The device to run on.
        progress: Whether to show progress bars.
    """

    problem: str = "allcnn-digits"
    data: Path | None = None
    checkpoint: Path | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    output: Path
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    progress: bool = True


@dataclass(frozen=True)
class Trained:
    """A trained network with its data.

    Attributes:
        problem: The test problem.
        recipe: How the network was trained.
        model: The network, in evaluation mode, on the device of the run.
        train: The images that the network was trained on.
        validation: Images that were held out from the training images.
        test: The images for the reported results.
        split: The indices of training and validation images in the pool, as checkpoints store them.
    """

    problem: Problem
    recipe: Recipe
    model: nn.Module
    train: Images
    validation: Images
    test: Images
    split: dict[str, Tensor]

    def random_batches(self, size: int, number: int, seed: int) -> list[Batch]:
        """Return disjoint batches of random training images, on the network's device."""
        if size * number > len(self.train):
            raise ValueError(
                f"{number} batches of {size} images are {size * number}; {self.problem.name} has "
                f"{len(self.train)} training images. Take fewer examples or smaller batches."
            )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return self.batches(self.train, order[: size * number], size)

    def batches(self, images: Images, indices: Tensor, size: int) -> list[Batch]:
        """Return the images of some indices, in batches of at most `size`."""
        return [self.batch(images, batch_indices) for batch_indices in indices.split(size)]

    def batch(self, images: Images, indices: Tensor) -> Batch:
        """Return images and labels in the form that the network takes."""
        parameter = next(self.model.parameters())
        x, y = images.batch(indices)
        return x.to(parameter), y.to(parameter.device)


def load(
    settings: ExperimentSettings, on_epoch: Callable[[int, nn.Module], None] | None = None
) -> Trained:
    """Load the trained network of the settings and its data; train the network if needed.

    Args:
        settings: The network and its data.
        on_epoch: See `train`.
    """
    problem = get_problem(settings.problem)
    recipe = replace(problem.recipe, **settings.recipe)
    pool, test = problem.data(settings.data)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(settings.seed))
    num_validation = min(problem.num_validation, len(pool) // 4)
    split = {"split.train": order[num_validation:], "split.val": order[:num_validation]}
    if settings.checkpoint is not None:
        model = problem.initial_model(settings.seed)
        split |= load_weights(model, settings.checkpoint)
        model.to(settings.device)
    elif problem.published is not None:
        model = problem.published().to(settings.device)
        # The published network was trained on all images, including those for validation.
        split["split.train"] = order
    else:
        model = problem.initial_model(settings.seed).to(settings.device)
        images = pool.subset(split["split.train"])
        train(model, images, recipe, settings.seed, settings.progress, on_epoch)
    return Trained(
        problem=problem,
        recipe=recipe,
        model=model.eval(),
        train=pool.subset(split["split.train"]),
        validation=pool.subset(split["split.val"]),
        test=test,
        split=split,
    )


def random_indices(images: Images, limit: int | None, generator: torch.Generator) -> Tensor:
    """Return the indices of `limit` random images; of all images in a random order if None."""
    return torch.randperm(len(images), generator=generator)[:limit]


@torch.no_grad()
def loss_and_accuracy(
    trained: Trained, step: Tensor | float, data: dict[str, Images], decay: float
) -> Row:
    """Compute regularised loss (Eq. 1) and accuracy on several data sets, after a step.

    Args:
        trained: The network, which is not changed.
        step: The step from the network's parameters, [D]; 0 for no step.
        data: Data sets, by name.
        decay: β, which applies only to weights.

    Returns:
        `<name>_loss`, in nats, and `<name>_accuracy` for each data set.
    """
    parameters = list(trained.model.parameters())
    start = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(start + step, parameters)
    row: Row = {}
    penalty = decay / 2 * sum(p.square().sum() for p in parameters if p.ndim > 1)
    for name, images in data.items():
        batches = trained.batches(images, torch.arange(len(images)), 500)
        logits = torch.cat([trained.model(x) for x, _ in batches])
        labels = torch.cat([y for _, y in batches])
        loss = nn.functional.cross_entropy(logits, labels) + penalty
        row[f"{name}_loss"] = float(loss.nan_to_num(math.inf))
        row[f"{name}_accuracy"] = float((logits.argmax(1) == labels).double().mean())
    nn.utils.vector_to_parameters(start, parameters)
    return row


def select(rows: Sequence[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values in the columns of these names."""
    return [row for row in rows if all(row[column] == values[column] for column in values)]


def distinct(rows: Sequence[Row], *columns: str) -> list[tuple[Any, ...]]:
    """Return the distinct values of these columns, in the order of their first rows."""
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def half_width(draws: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> float | None:
    """Compute half of a statistic's 95 % t interval by the jackknife; None for one draw."""
    n = len(draws)
    if n < 2:
        return None
    without_one = [statistic([*draws[:i], *draws[i + 1 :]]) for i in range(n)]
    centre = math.fsum(without_one) / n
    error = math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in without_one))
    return float(stats.t.ppf(0.975, n - 1)) * error


@dataclass(frozen=True)
class Fit:
    """A fit whose distance to full-batch is measured.

    Attributes:
        method: The name of the method, which begins with "EKFAC, " for a fit of EKFAC.
        size: The number of examples, or the tolerance, if the study varies it.
    """

    method: str
    size: float | None

    def with_method(self, method: str) -> "Fit":
        """Return the fit of a method of K-FAC, or of EKFAC if this fit is one of EKFAC."""
        prefix = "EKFAC, " if self.method.startswith("EKFAC, ") else ""
        return Fit(prefix + method, self.size)


def distances(rows: Sequence[Row]) -> list[Row]:
    """Compute the distance of every method and size to full-batch (EKFAC: to full-batch EKFAC).

    The distance is the mean over draws and prior precisions of |NLL − full-batch NLL|, in nats. The
    ratio is the distance divided by the distance of the mini-batch fit to as many examples, in the
    same draws. "worst" is the largest ratio at a single prior precision. Rows of full-batch have no
    draw.
    """
    full = select(rows, draw=None)
    full_nll = {(row["method"], row["prior_precision"]): row["nll"] for row in full}
    grid = [delta for (delta,) in distinct(full, "prior_precision")]
    # |NLL − full-batch NLL| of each fit, by draw and prior precision.
    gaps: dict[Fit, dict[int, dict[float, float]]] = {}
    for row in rows:
        if row["draw"] is not None:
            fit = Fit(row["method"], row.get("size"))
            delta = row["prior_precision"]
            gap = abs(row["nll"] - full_nll[fit.with_method(FULL).method, delta])
            gaps.setdefault(fit, {}).setdefault(row["draw"], {})[delta] = gap

    def distance(fit: Fit, deltas: Sequence[float], draws: Sequence[int]) -> float:
        return fmean(gaps[fit][draw][delta] for draw in draws for delta in deltas)

    def ratio(fit: Fit, deltas: Sequence[float], draws: Sequence[int]) -> float:
        mini_batch_distance = distance(fit.with_method(MINI), deltas, draws)
        return ratio_of_distances(distance(fit, deltas, draws), mini_batch_distance)

    table = []
    for fit in gaps:
        draws = list(gaps[fit])
        line: Row = {"method": fit.method}
        if fit.size is not None:
            line["size"] = fit.size
        line["draws"] = len(draws)
        distance_over = partial(distance, fit, grid)
        line["NLL distance"] = distance_over(draws)
        line["NLL distance ±"] = half_width(draws, distance_over)
        if fit.with_method(MINI) in gaps:
            ratio_over = partial(ratio, fit, grid)
            line["ratio"] = ratio_over(draws)
            line["ratio ±"] = half_width(draws, ratio_over)
            line["worst"] = max(ratio(fit, [delta], draws) for delta in grid)
        table.append(line)
    return table


def ratio_of_distances(distance: float, reference: float) -> float:
    """Divide a distance by a reference that may be 0: equal distances have the ratio 1."""
    if reference != 0:
        return distance / reference
    if distance == 0:
        return 1.0
    return math.inf


def write(
    settings: ExperimentSettings,
    tables: dict[str, list[Row]],
    pictures: dict[str, Figure],
    title: str,
) -> None:
    """Write all tables and pictures into the output folder, and print the last table.

    Args:
        settings: The settings of the experiment.
        tables: Tables, by the names of their files.
        pictures: Pictures, by the names of their files.
        title: The title of the printed table.
    """
    for name, rows in tables.items():
        write_csv(rows, settings.output / f"{name}.csv")
    for name, figure in pictures.items():
        save(figure, settings.output / f"{name}.png")
    *_, last_table = tables.values()
    print_table(last_table, title)
    print(f"Tables and pictures: {settings.output}")
