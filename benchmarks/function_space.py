"""Errors of function-space posteriors: `python -m benchmarks.function_space`.

The standard deviations of the outputs from `curvature="gp"` and from laplace-torch's
`FunctionalLaplace` are compared with the standard deviations from `curvature="full"`. The error is
the norm of the difference, divided by the norm of the full posterior's standard deviations, and
averaged over seeds. For classes, the mean of the logits is subtracted first, because probabilities
depend only on differences between logits.

The module prints the table of `docs/how-to/function-space.md`, and its numbers for
`docs/results.toml`.
"""

import argparse
import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

NUM_TRAINING = 128
NUM_FEATURES = 4
NUM_TEST = 200
STEPS = 300
NUM_INDUCING = (16, 32, 64)
FAR = 3.0
"""The scale of the far inputs, relative to the training inputs."""

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A network to train, and the options of its posteriors.

    Attributes:
        task: A description.
        num_outputs: The number of classes, or of outputs of the regression.
        width: The number of units of each of the two hidden layers.
        prior_precision: δ.
        sigma: Standard deviation of a regression's noise; None for classes.
    """

    task: str
    num_outputs: int
    width: int
    prior_precision: float
    sigma: float | None = None

    @property
    def likelihood(self) -> str:
        """The name of the likelihood in both libraries."""
        return "classification" if self.sigma is None else "regression"


PROBLEMS = {
    "classes-1": Problem("three classes", 3, width=16, prior_precision=1.0),
    "classes-weak-prior": Problem("three classes", 3, width=16, prior_precision=0.01),
    "classes-wide": Problem("three classes", 3, width=50, prior_precision=0.1),
    "two-outputs": Problem(
        "regression, two outputs, σ = 0.3", 2, width=16, prior_precision=1.0, sigma=0.3
    ),
    "one-output": Problem(
        "regression, one output, σ = 1", 1, width=16, prior_precision=1.0, sigma=1.0
    ),
    "one-output-wide": Problem(
        "regression, one output, σ = 0.3", 1, width=50, prior_precision=1.0, sigma=0.3
    ),
}
COLUMNS = ("value", "peer", "far", "far-peer")
"""The columns of an entry in `docs/results.toml`: our error and the error of laplace-torch, near
the data and far from the data."""


def examples(problem: Problem, generator: torch.Generator) -> Examples:
    """Draw inputs and noisy targets of a smooth function."""
    x = torch.randn(NUM_TRAINING, NUM_FEATURES, generator=generator, dtype=torch.float64)
    directions = torch.randn(
        NUM_FEATURES, problem.num_outputs, generator=generator, dtype=torch.float64
    )
    f = (x @ directions).sin()
    noise = torch.randn(f.shape, generator=generator, dtype=torch.float64)
    if problem.sigma is None:
        return x, (f + 0.3 * noise).argmax(1)
    return x, f + problem.sigma * noise


def train_network(problem: Problem, data: Examples) -> nn.Module:
    """Train a network with two hidden layers to the posterior's mode."""
    layers = [nn.Linear(NUM_FEATURES, problem.width), nn.Tanh()]
    layers += [nn.Linear(problem.width, problem.width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(problem.width, problem.num_outputs)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = data
    for _ in range(STEPS):
        if problem.sigma is None:
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        else:
            loss = (model(x) - y).square().sum() / (2 * problem.sigma**2)
        norm = sum(parameter.square().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        ((loss + problem.prior_precision / 2 * norm) / len(x)).backward()
        optimizer.step()
    return model.eval()


def deviations(problem: Problem, covariance: Tensor) -> Tensor:
    """Compute standard deviations of outputs (for classes, of centred logits), `[n, outputs]`."""
    if problem.sigma is None:
        size = problem.num_outputs
        centring = torch.eye(size, dtype=covariance.dtype) - 1 / size
        covariance = centring @ covariance @ centring
    return covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()


def errors(problem: Problem, num_inducing: Sequence[int], seed: int, has_peer: bool) -> Tensor:
    """Compute errors of both libraries, near and far from the data, `[num_inducing, COLUMNS]`."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data = examples(problem, generator)
    model = train_network(problem, data)
    near = torch.randn(NUM_TEST, NUM_FEATURES, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {"prior_precision": problem.prior_precision, "sigma": problem.sigma}
    full = Laplace(model, problem.likelihood, "full", **options).fit([data])
    rows = []
    for number in num_inducing:
        la = Laplace(model, problem.likelihood, "gp", inducing=number, **options)
        la.fit([data], generator=torch.Generator().manual_seed(seed))
        peer = None
        if has_peer:
            peer = fit_laplace_torch(problem, model, data, number, seed)
        row = []
        for x in (near, FAR * near):
            expected = deviations(problem, full.functional(x)[1])
            our_deviations = deviations(problem, la.functional(x)[1])
            row.append(relative_error(our_deviations, expected))
            peer_error = torch.nan
            if peer is not None:
                _, peer_covariance = peer._glm_predictive_distribution(x)
                peer_deviations = deviations(problem, peer_covariance.double())
                peer_error = relative_error(peer_deviations, expected)
            row.append(peer_error)
        rows.append(row)
    return torch.tensor(rows)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute the norm of the difference, divided by the norm of the expected values."""
    return float((actual - expected).norm() / expected.norm())


def fit_laplace_torch(
    problem: Problem, model: nn.Module, data: Examples, number: int, seed: int
) -> Any:
    """Fit laplace-torch's Gaussian process on a random subset of the examples."""
    from laplace import FunctionalLaplace

    options: dict[str, Any] = {"prior_precision": problem.prior_precision, "seed": seed}
    if problem.sigma is not None:
        options["sigma_noise"] = problem.sigma
    peer = FunctionalLaplace(copy.deepcopy(model), problem.likelihood, n_subset=number, **options)
    peer.fit(DataLoader(TensorDataset(*data), batch_size=number))
    return peer


def table_row(problem: Problem, name: str, number: int, is_first: bool, row: list[float]) -> str:
    """Return a row of the page's table; the smaller error of each pair is bold."""
    problem_cells = ["", "", ""]
    if is_first:
        problem_cells = [problem.task, str(problem.width), f"{problem.prior_precision:g}"]
    cells = []
    for first in (0, 2):
        pair = row[first : first + 2]
        smaller = min(pair)
        for column, error in zip(COLUMNS[first : first + 2], pair, strict=True):
            text = rounded(error)
            if error == smaller:
                text = f"**{text}**"
            suffix = "" if column == "value" else f".{column}"
            cells.append(f"{text}<!-- function-space.{name}-{number}{suffix} -->")
    return f"| {' | '.join([*problem_cells, str(number), *cells])} |"


def rounded(error: float) -> str:
    """Format an error with two decimals, or with one digit if it is too small."""
    if error >= 0.01:
        return f"{error:.2f}"
    return f"{error:.1g}"


def entry(problem: Problem, name: str, number: int, row: list[float]) -> str:
    """Format the numbers of a row as an entry of `docs/results.toml`."""
    values = [f"{column} = {rounded(error)}" for column, error in zip(COLUMNS, row, strict=True)]
    description = (
        f"{problem.task}, width {problem.width}, δ = {problem.prior_precision:g}, M = {number}: "
        "error near the data and far from them, of gp and of laplace-torch"
    )
    return f'{name}-{number} = {{{", ".join(values)}, unit = "", what = "{description}"}}'


def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Print both tables; return mean errors by problem, `[M, COLUMNS]`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--inducing", nargs="+", type=int, default=list(NUM_INDUCING))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    has_peer = importlib.util.find_spec("laplace") is not None
    means = {}
    for name in options.problems:
        problem = PROBLEMS[name]
        by_seed = [
            errors(problem, options.inducing, seed, has_peer) for seed in range(options.seeds)
        ]
        means[name] = torch.stack(by_seed).mean(0)
        print(f"{name}: done", flush=True)
    for name, rows in means.items():
        for number, row in zip(options.inducing, rows.tolist(), strict=True):
            is_first = number == options.inducing[0]
            print(table_row(PROBLEMS[name], name, number, is_first, row))
    for name, rows in means.items():
        for number, row in zip(options.inducing, rows.tolist(), strict=True):
            print(entry(PROBLEMS[name], name, number, row))
    return means


if __name__ == "__main__":
    main()
