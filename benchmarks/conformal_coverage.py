"""The coverage of conformal sets and intervals: `python -m benchmarks.conformal_coverage`.

Networks are trained on noisy digits and on a table of patients (scikit-learn's `diabetes`). Each
seed uses a different split of the data. The coverage at level 0.9 is compared with the coverage of
the posterior's own sets and intervals. If a method is correct, the number of covered test examples
has a beta-binomial distribution, because the rank of a new score among the calibration scores is
uniform.

The module prints the table of `docs/how-to/conformal.md`, and its numbers for `docs/results.toml`.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import betabinom
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.distributions import Categorical

from laplace_debias import Conformal, Laplace

LEVEL = 0.9
RANDOM_LABELS = 0.2

Examples = tuple[Tensor, Tensor]


def noisy_digits(generator: torch.Generator) -> Examples:
    """Return images `[n, 64]` and digits; a fifth of the digits is drawn at random."""
    pixels, digits = load_digits(return_X_y=True)
    y = torch.tensor(digits)
    is_random = torch.rand(len(y), generator=generator) < RANDOM_LABELS
    labels = torch.randint(10, (len(y),), generator=generator)
    return torch.tensor(pixels, dtype=torch.float64) / 16, labels.where(is_random, y)


def patients(generator: torch.Generator) -> Examples:
    """Return ten standardised features, and the standardised disease progression, `[n, 1]`."""
    features, targets = load_diabetes(return_X_y=True)
    x = torch.tensor(features)
    y = torch.tensor(targets)
    return x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)


def by_ink(x: Tensor) -> Tensor:
    """Return group 1 for images with more ink than most images, otherwise group 0."""
    return (x.mean(1) > 0.305).long()


def by_age(x: Tensor) -> Tensor:
    """Return group 1 for patients who are older than the mean, otherwise group 0."""
    return (x[:, 0] > 0).long()


@dataclass(frozen=True)
class Problem:
    """Data, a network and groups of its inputs.

    Attributes:
        likelihood: The likelihood.
        data: A function that draws all examples.
        num_outputs: The number of outputs of the network.
        num_training: The number of training examples.
        num_calibration: The number of calibration examples; all other examples are test examples.
        groups: A function from inputs to groups 0 and 1.
        group_names: Descriptions of both groups.
    """

    likelihood: str
    data: Callable[[torch.Generator], Examples]
    num_outputs: int
    num_training: int
    num_calibration: int
    groups: Callable[[Tensor], Tensor]
    group_names: tuple[str, str]


PROBLEMS = {
    "digits": Problem(
        "classification",
        noisy_digits,
        num_outputs=10,
        num_training=500,
        num_calibration=500,
        groups=by_ink,
        group_names=("little ink", "much ink"),
    ),
    "diabetes": Problem(
        "regression",
        patients,
        num_outputs=1,
        num_training=142,
        num_calibration=150,
        groups=by_age,
        group_names=("younger", "older"),
    ),
}


@dataclass(frozen=True)
class Coverage:
    """The numbers of covered test examples for one seed.

    Attributes:
        covered: The number covered by conformal sets or intervals.
        covered_by_posterior: The number covered by the posterior's own sets or intervals.
        num_test: The number of test examples.
        num_calibration: The number of calibration examples of the same group.
    """

    covered: int
    covered_by_posterior: int
    num_test: int
    num_calibration: int

    def has_level(self, probability: float) -> bool:
        """Whether the number of covered examples is in the central interval of its distribution."""
        rank = math.ceil((self.num_calibration + 1) * LEVEL)
        distribution = betabinom(self.num_test, rank, self.num_calibration + 1 - rank)
        low, high = distribution.interval(probability)
        return bool(low <= self.covered <= high)


def train_network(problem: Problem, data: Examples, seed: int) -> nn.Module:
    """Train a network with a hidden layer of 32 units until it fits noise."""
    x, y = data
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(x.shape[1], 32), nn.Tanh(), nn.Linear(32, problem.num_outputs)
    ).double()
    loss = nn.functional.cross_entropy if problem.num_outputs > 1 else nn.functional.mse_loss
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def covered_by_posterior(problem: Problem, la: Laplace, x: Tensor, y: Tensor) -> Tensor:
    """Return whether the posterior's own sets or intervals cover the targets, `[n]`.

    A set contains the most probable classes, up to a total probability of the level.
    """
    if problem.likelihood == "regression":
        predictive = la.marginals(x)
        tail = torch.tensor((1 - LEVEL) / 2, dtype=torch.float64)
        return ((predictive.icdf(tail) <= y) & (y <= predictive.icdf(1 - tail)))[:, 0]
    predictive = la.predict(x)
    assert isinstance(predictive, Categorical)
    probs = predictive.probs
    target_probs = probs.gather(1, y.unsqueeze(1))
    return (probs * (probs > target_probs)).sum(1) < LEVEL


def coverages(name: str, seed: int) -> dict[str, Coverage]:
    """Compute the coverage of all test examples, and of each group with its own threshold."""
    problem = PROBLEMS[name]
    generator = torch.Generator().manual_seed(seed)
    x, y = problem.data(generator)
    order = torch.randperm(len(x), generator=generator)
    first_test = problem.num_training + problem.num_calibration
    train, calibration, test = order.tensor_split((problem.num_training, first_test))
    model = train_network(problem, (x[train], y[train]), seed)
    is_regression = problem.likelihood == "regression"
    la = Laplace(model, problem.likelihood, sigma=1.0 if is_regression else None)
    la.fit([(x[train], y[train])])
    la.tune_evidence(sigma=is_regression)
    held_out = [(x[calibration], y[calibration])]
    is_covered = Conformal(la).calibrate(held_out, LEVEL).predict(x[test]).covers(y[test])
    by_group = Conformal(la, groups=problem.groups).calibrate(held_out, LEVEL)
    is_covered_by_group = by_group.predict(x[test]).covers(y[test]).flatten()
    is_covered_by_posterior = covered_by_posterior(problem, la, x[test], y[test])
    results = {
        "all": Coverage(
            int(is_covered.sum()),
            int(is_covered_by_posterior.sum()),
            len(test),
            problem.num_calibration,
        )
    }
    groups = problem.groups(x)
    for group, group_name in enumerate(problem.group_names):
        in_test = groups[test] == group
        results[group_name] = Coverage(
            int(is_covered_by_group[in_test].sum()),
            int(is_covered_by_posterior[in_test].sum()),
            int(in_test.sum()),
            int((groups[calibration] == group).sum()),
        )
    return results


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, Coverage]]]:
    """Print the table and the numbers; return coverages by problem, seed and group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args(arguments)
    results = {
        name: [coverages(name, seed) for seed in range(options.seeds)] for name in options.problems
    }
    rows = []
    entries = []
    for name, by_seed in results.items():
        for group in by_seed[0]:
            numbers = summarise([coverage_by_group[group] for coverage_by_group in by_seed])
            entry = f"{name}-{group.replace(' ', '-')}"
            rows.append(table_row(name, group, entry, numbers))
            values = ", ".join(f"{key} = {value}" for key, value in numbers.items())
            entries.append(
                f'{entry} = {{{values}, unit = "", what = "coverage, {name}, {group}: mean, least '
                "and greatest of the seeds, of the posterior's own sets, and seeds inside the 95 % "
                'interval"}'
            )
    print("\n".join([*rows, *entries]))
    return results


def summarise(coverages: Sequence[Coverage]) -> dict[str, str]:
    """Return the numbers of an entry in `docs/results.toml`, over the coverages of all seeds."""
    shares = torch.tensor([coverage.covered / coverage.num_test for coverage in coverages])
    posterior_shares = [coverage.covered_by_posterior / coverage.num_test for coverage in coverages]
    num_inside = sum(coverage.has_level(0.95) for coverage in coverages)
    return {
        "value": f"{shares.mean():.3f}",
        "least": f"{shares.min():.3f}",
        "greatest": f"{shares.max():.3f}",
        "own": f"{statistics.mean(posterior_shares):.3f}",
        "inside": f"{num_inside}",
    }


def table_row(name: str, group: str, entry: str, numbers: dict[str, str]) -> str:
    """Return a row of the page's table, in which numbers refer to their entries."""
    cells = {}
    for key, value in numbers.items():
        suffix = "" if key == "value" else f".{key}"
        cells[key] = f"{value}<!-- conformal.{entry}{suffix} -->"
    extremes = f"{cells['least']} to {cells['greatest']}"
    return (
        f"| {name}, {group} | {cells['own']} | {cells['value']} | {extremes} | {cells['inside']} |"
    )


if __name__ == "__main__":
    main()
