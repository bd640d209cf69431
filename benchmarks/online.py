"""Curvature from training runs, compared with full fits: `python -m benchmarks.online`.

Networks are trained on scikit-learn's digits and diabetes data, with `OnlineCurvature` in the loop.
At the end, posteriors from one batch (mini-batch, two halves, two folds) and posteriors from the
training run are compared with the fit to all training data. With `--folder`, the distances of each
seed are written to a file, and a second call continues after the last finished seed. With
`--seconds`, the time of an update is measured instead, in units of a training step.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from laplace_debias import Laplace
from laplace_debias.training import OnlineCurvature

NUM_DIGITS = 1024
NUM_TEST_DIGITS = 300
NUM_TABLE_ROWS = 320
TABLE_NOISE = 0.7
BATCH_SIZE = 32
PRIOR_PRECISIONS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)
REFRESH = 50
FULL = "full"
FITS = ("mini-batch", "two halves", "two folds")

Examples = tuple[Tensor, Tensor]


def digits() -> tuple[Examples, Examples]:
    """Load training and test images `[n, 1, 8, 8]` of unit variance with unit noise, and labels."""
    images, targets = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    x = ((torch.tensor(images, dtype=torch.float32) / 16 - 0.3053) / 0.3760)[order]
    x = (x + torch.randn(x.shape, generator=generator)).view(-1, 1, 8, 8)
    y = torch.tensor(targets)[order]
    test = slice(NUM_DIGITS, NUM_DIGITS + NUM_TEST_DIGITS)
    return (x[:NUM_DIGITS], y[:NUM_DIGITS]), (x[test], y[test])


def diabetes() -> tuple[Examples, Examples]:
    """Load standardised training and test rows `[n, 10]`, and targets `[n, 1]`."""
    features, targets = load_diabetes(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(features), generator=generator)
    x = torch.tensor(features, dtype=torch.float32)[order]
    y = torch.tensor(targets, dtype=torch.float32)[order].unsqueeze(1)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean(0)) / y.std(0)
    train = x[:NUM_TABLE_ROWS], y[:NUM_TABLE_ROWS]
    test = x[NUM_TABLE_ROWS:], y[NUM_TABLE_ROWS:]
    return train, test


class Residual(nn.Module):
    """Two convolutions with batch normalisation, to whose output the input is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of input and residual."""
        return torch.relu(x + self.inner(x))


def residual_network(in_channels: int = 1, channels: int = 12, stride: int = 1) -> nn.Sequential:
    """Build a residual network of five convolutions."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, stride=stride, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        Residual(channels),
        Residual(channels),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )


def dense_network(inputs: int = 64, outputs: int = 10) -> nn.Sequential:
    """Build a network with two hidden layers of 64 units."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


@dataclass(frozen=True)
class Problem:
    """A network and the data that it is trained on.

    Attributes:
        build: A function that builds the network.
        data: A function that loads the training and the test data.
        epochs: The epochs after which the posteriors are compared; the run ends after the last one.
        loss: The training loss.
        likelihood: The likelihood of the posteriors, and its noise.
    """

    build: Callable[[], nn.Sequential]
    data: Callable[[], tuple[Examples, Examples]]
    epochs: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    likelihood: Mapping[str, Any] = field(default_factory=lambda: {"likelihood": "classification"})


PROBLEMS = {
    "digits": Problem(dense_network, digits, (1, 2, 5, 10, 20)),
    "residual": Problem(residual_network, digits, (10,)),
    "table": Problem(
        lambda: dense_network(10, 1),
        diabetes,
        (60,),
        loss=mse_loss,
        likelihood={"likelihood": "regression", "sigma": TABLE_NOISE},
    ),
}


@dataclass(frozen=True)
class Distance:
    """The distance of a posterior from the fit to all data.

    Attributes:
        curvature: The Frobenius norm of the difference of curvatures, divided by the norm of the
            full fit's curvature.
        deviation: The mean absolute logarithm of the ratio of the outputs' standard deviations.
        nll: The absolute difference of the test NLLs in nats, averaged over prior precisions.
    """

    curvature: float
    deviation: float
    nll: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of one posterior with the fit to all data, at one epoch of a training run."""

    epoch: int
    posterior: str
    distance: Distance


@dataclass(frozen=True)
class Run:
    """How `OnlineCurvature` takes part in a training run.

    Attributes:
        fisher: The Fisher matrix.
        decay: The decay of the running means.
        every: The number of batches per measured batch.
    """

    fisher: str
    decay: float
    every: int = 4

    def __str__(self) -> str:
        return f"online, {self.fisher}, decay {self.decay}, every={self.every}"


RUNS = (
    Run("signs", 0.95),
    Run("signs", 0.98),
    Run("signs", 0.99),
    Run("signs", 0.98, every=1),
    Run("mc", 0.98),
    Run("mc", 0.98, every=1),
    Run("exact", 0.98, every=1),
)


def training(
    model: nn.Module, problem: Problem, data: Examples, onlines: Mapping[Run, OnlineCurvature]
) -> Iterator[int]:
    """Train with Adam and a learning rate that decreases to zero; yield each epoch's number."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = data
    num_epochs = max(problem.epochs)
    num_steps = num_epochs * (len(x) // BATCH_SIZE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for epoch in range(num_epochs):
        model.train()
        for indices in torch.randperm(len(x)).split(BATCH_SIZE):
            x_batch, y_batch = x[indices], y[indices]
            for online in onlines.values():
                online.update(x_batch, y_batch)
            optimizer.zero_grad()
            problem.loss(model(x_batch), y_batch).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        yield epoch + 1


def posteriors(
    model: nn.Module,
    problem: Problem,
    data: Examples,
    curvature: str,
    onlines: Mapping[Run, OnlineCurvature],
) -> dict[str, Laplace]:
    """Return the posteriors at the current weights, by name; the first is the full fit."""
    x, y = data
    num_data = len(x)
    all_batches = list(zip(x.split(256), y.split(256), strict=True))
    batch = x[:BATCH_SIZE], y[:BATCH_SIZE]
    middle = BATCH_SIZE // 2
    first_half = x[:middle], y[:middle]
    second_half = x[middle:BATCH_SIZE], y[middle:BATCH_SIZE]
    fits = {
        name: Laplace(model, curvature=curvature, **problem.likelihood) for name in (FULL, *FITS)
    }
    fits[FULL].fit_batches(all_batches, num_data=num_data)
    fits["mini-batch"].fit_batches([batch], num_data=num_data)
    fits["two halves"].fit_batches([first_half], [second_half], num_data=num_data)
    fits["two folds"].fit_batches([batch], folds=2, num_data=num_data)
    for run, online in onlines.items():
        fits[str(run)] = online.posterior(num_data)
    return fits


def distance(la: Laplace, full: Laplace, test: Examples) -> Distance:
    """Compare a posterior with the full one."""
    squared_difference = 0.0
    squared_norm = 0.0
    for name, block in full.posterior.curvature.blocks.items():
        reference = block.to_dense()
        difference = la.posterior.curvature.blocks[name].to_dense() - reference
        squared_difference += float(difference.square().sum())
        squared_norm += float(reference.square().sum())
    x, y = test
    deviations = []
    nlls = []
    for delta in PRIOR_PRECISIONS:
        la.prior_precision = delta
        full.prior_precision = delta
        _, variance = la.functional(x, diagonal=True)
        _, full_variance = full.functional(x, diagonal=True)
        deviations.append(float(0.5 * (variance / full_variance).log().abs().mean()))
        nlls.append(abs(nll(la, x, y) - nll(full, x, y)))
    return Distance(
        curvature=(squared_difference / squared_norm) ** 0.5,
        deviation=statistics.mean(deviations),
        nll=statistics.mean(nlls),
    )


def nll(la: Laplace, x: Tensor, y: Tensor) -> float:
    """Compute the mean negative log-likelihood in nats."""
    return -float(la.predict(x).log_prob(y).mean())


def interval(values: Sequence[float]) -> str:
    """Format a mean with the half width of its 95 % t interval."""
    quantile = stats.t.ppf(0.975, len(values) - 1)
    half_width = quantile * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half_width:.3f}"


def compare_posteriors(problem: Problem, seed: int, curvature: str) -> list[Comparison]:
    """Train once, and compare the posteriors with the full fits."""
    data, test = problem.data()
    torch.manual_seed(seed)
    model = problem.build()
    onlines = {
        run: OnlineCurvature(
            model,
            decay=run.decay,
            refresh=REFRESH,
            every=run.every,
            curvature=curvature,
            fisher=run.fisher,
            **problem.likelihood,
        )
        for run in RUNS
    }
    comparisons = []
    for epoch in training(model, problem, data, onlines):
        if epoch in problem.epochs:
            fits = posteriors(model, problem, data, curvature, onlines)
            full = fits.pop(FULL)
            for name, la in fits.items():
                comparisons.append(Comparison(epoch, name, distance(la, full, test)))
    return comparisons


def read_comparisons(path: Path) -> list[Comparison]:
    """Read the comparisons of one seed from a file."""
    rows = json.loads(path.read_text())
    return [Comparison(epoch, name, Distance(*values)) for epoch, name, values in rows]


def write_comparisons(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write the comparisons of one seed to a file."""
    rows = [astuple(comparison) for comparison in comparisons]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def compare_on_seeds(
    name: str, num_seeds: int, curvature: str, folder: Path | None
) -> list[Comparison]:
    """Compare the posteriors for each seed, or read the comparisons from the folder."""
    comparisons = []
    for seed in range(num_seeds):
        if folder is None:
            comparisons += compare_posteriors(PROBLEMS[name], seed, curvature)
            continue
        path = folder / f"{name}-{curvature}-{seed}.json"
        if not path.exists():
            write_comparisons(path, compare_posteriors(PROBLEMS[name], seed, curvature))
        comparisons += read_comparisons(path)
    return comparisons


def select_distances(
    comparisons: Sequence[Comparison], epoch: int, posterior: str
) -> list[Distance]:
    """Return the distances of a posterior at an epoch, one per seed."""
    return [
        comparison.distance
        for comparison in comparisons
        if comparison.epoch == epoch and comparison.posterior == posterior
    ]


def print_table(comparisons: Sequence[Comparison], epoch: int) -> None:
    """Print the distances after an epoch, one row per posterior."""
    print("| posterior | curvature | deviations of the outputs | NLL |")
    print("|---|---|---|---|")
    for name in dict.fromkeys(comparison.posterior for comparison in comparisons):
        distances = select_distances(comparisons, epoch, name)
        cells = [
            interval([distance.curvature for distance in distances]),
            interval([distance.deviation for distance in distances]),
            interval([distance.nll for distance in distances]),
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def draw(comparisons: Sequence[Comparison], epochs: Sequence[int], path: Path) -> None:
    """Draw the NLL distances along the training run."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name in (*FITS, *map(str, RUNS[:4])):
        means = []
        for epoch in epochs:
            distances = select_distances(comparisons, epoch, name)
            means.append(statistics.mean(distance.nll for distance in distances))
        line = "--" if name in FITS else "-"
        axes.plot(epochs, means, line, marker="o", label=name, markersize=3)
    axes.set(xlabel="epochs", ylabel="NLL distance from the full fit (nats)", yscale="log")
    axes.set_xticks(epochs, [str(epoch) for epoch in epochs])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def measure_seconds(repetitions: int, batch_size: int) -> None:
    """Print the processor time of training with updates, in units of plain training."""
    torch.manual_seed(0)
    x = torch.randn(batch_size, 3, 32, 32)
    y = torch.randint(10, (batch_size,))
    networks = {
        "residual network, 32 × 32 images": lambda: residual_network(3, 32, 2),
        "four hidden layers of 256, inputs of 256": lambda: nn.Sequential(
            nn.AvgPool2d(2),
            nn.Conv2d(3, 1, 1),
            nn.Flatten(),
            *_hidden(256, 256, 256, 256, 256),
            nn.Linear(256, 10),
        ),
    }
    print("| network | curvature | Fisher | every=4 | every=2 | every=1 | one refresh |")
    print("|---|---|---|---:|---:|---:|---:|")
    for name, build in networks.items():
        for curvature in ("kfac", "ekfac"):
            for fisher in ("empirical", "mc", "signs"):
                model = build()
                online = OnlineCurvature(
                    model, curvature=curvature, fisher=fisher, refresh=10**6, every=1
                )
                online.update(x, y)
                online.update(x, y)
                step, update, refresh = _minimum_seconds(model, online, (x, y), repetitions)
                cells = [
                    f"{1 + update / step / every + refresh / step / REFRESH:.2f}"
                    for every in (4, 2, 1)
                ]
                cells.append(f"{refresh / step:.1f}")
                row = f"| {name} | {curvature} | {fisher} | {' | '.join(cells)} |"
                print(row, flush=True)


def _hidden(*widths: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return layers


def _minimum_seconds(
    model: nn.Module, online: OnlineCurvature, batch: Examples, repetitions: int
) -> list[float]:
    """Return the minimum seconds of a training step, an update and a refresh, timed in turn."""
    x, y = batch
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    def update() -> None:
        online.update(x, y)

    def refresh() -> None:
        assert online._measurements is not None
        online._refresh_directions(online._measurements)

    minima = [math.inf] * 3
    for _ in range(repetitions):
        for index, function in enumerate((step, update, refresh)):
            start = time.process_time()
            function()
            minima[index] = min(minima[index], time.process_time() - start)
    return minima


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--curvature", choices=("kfac", "ekfac"), default="ekfac")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="files with the distances of each seed")
    parser.add_argument("--figure", type=Path, help="a picture of the first problem")
    parser.add_argument("--seconds", action="store_true", help="measure time, not distances")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.seconds:
        measure_seconds(options.repetitions, options.batch_size)
        return
    for name in options.problems:
        comparisons = compare_on_seeds(name, options.seeds, options.curvature, options.folder)
        epochs = PROBLEMS[name].epochs
        print(f"\n{name}, curvature={options.curvature!r}, {options.seeds} seeds\n")
        print_table(comparisons, max(epochs))
        if options.figure is not None and name == options.problems[0]:
            draw(comparisons, epochs, options.figure)


if __name__ == "__main__":
    main()
