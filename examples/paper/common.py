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
from safetensors.torch import save_file
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

MAP, MINI, DEBIASED, CROSSFIT, FULL = METHODS = (
    "MAP",
    "mini-batch",
    "debiased",
    "cross-fitted",
    "full-batch",
)
"""The names of posteriors in tables and pictures."""


@dataclass(kw_only=True)
class Settings(CommandSettings):
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

    def batches(self, size: int, number: int, seed: int) -> list[Batch]:
        """Return disjoint batches of random training images, on the network's device."""
        if size * number > len(self.train):
            raise ValueError(
                f"{number} batches of {size} images are {size * number}; {self.problem.name} has "
                f"{len(self.train)} training images. Take fewer examples or smaller batches."
            )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return [self.batch(self.train, part) for part in order[: size * number].split(size)]

    def batch(self, images: Images, indices: Tensor) -> Batch:
        """Return images and labels in the form that the network takes."""
        parameter = next(self.model.parameters())
        x, y = images.batch(indices)
        return x.to(parameter), y.to(parameter.device)


def load(
    settings: Settings, on_epoch: Callable[[int, nn.Module], None] = lambda epoch, model: None
) -> Trained:
    """Load the trained network of the settings and its data; train the network if needed.

    Args:
        settings: The network and its data.
        on_epoch: See `train`.
    """
    problem = get_problem(settings.problem)
    recipe = replace(problem.recipe, **settings.recipe)
    pool, test = problem.data(settings.data)
    number = min(problem.num_validation, len(pool) // 4)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(settings.seed))
    split = {"split.train": order[number:], "split.val": order[:number]}
    model = problem.initial_model(settings.seed)
    if settings.checkpoint is not None:
        split |= load_weights(model, settings.checkpoint)
    elif problem.published is not None:
        model, split["split.train"] = problem.published(), order
    training = pool.subset(split["split.train"])
    model.to(settings.device)
    if settings.checkpoint is None and problem.published is None:
        train(model, training, recipe, settings.seed, settings.progress, on_epoch)
    validation = pool.subset(split["split.val"])
    return Trained(problem, recipe, model.eval(), training, validation, test, split)


def run_train(settings: Settings) -> None:
    """Train the problem's network and save it, with its split, as `output`, a safetensors file."""
    trained = load(settings)
    tensors = {**trained.model.state_dict(), **trained.split}
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, settings.output)
    print(f"Checkpoint: {settings.output}")


def some(number: int, limit: int | None, generator: torch.Generator) -> Tensor:
    """Return random indices of examples, at most `limit` of them."""
    return torch.randperm(number, generator=generator)[:limit]


@torch.no_grad()
def judge(trained: Trained, step: Tensor, parts: dict[str, Images], decay: float) -> Row:
    """Compute regularised loss (Eq. 1) and accuracy on parts of the data, after a step.

    Args:
        trained: The network, which is not changed.
        step: The step from the network's parameters, [D].
        parts: Images, by name.
        decay: β, which applies only to weights.
    """
    parameters = list(trained.model.parameters())
    before = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(before + step, parameters)
    found: Row = {}
    penalty = decay / 2 * sum(p.square().sum() for p in parameters if p.ndim > 1)
    for part, images in parts.items():
        batches = [trained.batch(images, i) for i in torch.arange(len(images)).split(500)]
        logits = torch.cat([trained.model(x) for x, _ in batches])
        labels = torch.cat([y for _, y in batches])
        loss = nn.functional.cross_entropy(logits, labels) + penalty
        found[f"{part}_loss"] = float(loss.nan_to_num(math.inf))
        found[f"{part}_accuracy"] = float((logits.argmax(1) == labels).double().mean())
    nn.utils.vector_to_parameters(before, parameters)
    return found


def half_width(draws: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> float | None:
    """Compute half of a statistic's 95 % t interval by the jackknife; None for one draw."""
    n = len(draws)
    if n < 2:
        return None
    left_out = [statistic([*draws[:i], *draws[i + 1 :]]) for i in range(n)]
    centre = math.fsum(left_out) / n
    error = math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in left_out))
    return float(stats.t.ppf(0.975, n - 1)) * error


def distances(rows: Sequence[Row]) -> list[Row]:
    """Compute the distance of every method and size to full-batch (EKFAC: to full-batch EKFAC).

    The distance is the mean over draws and prior precisions of |NLL − full-batch NLL|, in nats. The
    ratio is the distance divided by the distance of the mini-batch fit to as many examples, in the
    same draws. "worst" is the largest ratio at a single prior precision. Rows of full-batch have no
    draw.
    """
    full = {(r["method"], r["prior_precision"]): r["nll"] for r in rows if r["draw"] is None}
    grid = list(dict.fromkeys(delta for _, delta in full))
    gaps: dict[tuple[str, int | None], dict[tuple[int, float], float]] = {}
    for row in rows:
        if row["draw"] is not None:
            method, delta = row["method"], row["prior_precision"]
            gap = abs(row["nll"] - full[_kind(method) + FULL, delta])
            gaps.setdefault((method, row.get("size")), {})[row["draw"], delta] = gap

    def distance(key: tuple[str, int | None], draws: Sequence[int], deltas: list[float]) -> float:
        return fmean(gaps[key][draw, delta] for draw in draws for delta in deltas)

    def to_mini(key: tuple[str, int | None], draws: Sequence[int], deltas: list[float]) -> float:
        mini = _kind(key[0]) + MINI, key[1]
        return distance(key, draws, deltas) / distance(mini, draws, deltas)

    table = []
    for key in gaps:
        draws = list(dict.fromkeys(draw for draw, _ in gaps[key]))
        row: Row = {"method": key[0]} | ({"size": key[1]} if key[1] else {}) | {"draws": len(draws)}
        columns = {"NLL distance": distance}
        if (_kind(key[0]) + MINI, key[1]) in gaps:
            columns["ratio"] = to_mini
        for column, of in columns.items():
            statistic = partial(of, key, deltas=grid)
            row |= {column: statistic(draws), f"{column} ±": half_width(draws, statistic)}
        if "ratio" in columns:
            row["worst"] = max(to_mini(key, draws, [delta]) for delta in grid)
        table.append(row)
    return table


def _kind(method: str) -> str:
    return "EKFAC, " if method.startswith("EKFAC, ") else ""


def write(
    settings: Settings, tables: dict[str, list[Row]], pictures: dict[str, Figure], title: str
) -> None:
    """Print the last table, and write all tables and pictures into the output folder."""
    for name, rows in tables.items():
        write_csv(rows, settings.output / f"{name}.csv")
    for name, figure in pictures.items():
        save(figure, settings.output / f"{name}.png")
    print_table(list(tables.values())[-1], title)
    print(f"Tables and pictures: {settings.output}")
