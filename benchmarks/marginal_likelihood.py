"""Marginal-likelihood training and laplace-torch: `python -m benchmarks.marginal_likelihood`.

Both libraries train the same network from the same weights, with the same optimizer and batch size.
The data are the noisy sine of laplace-torch's regression example, and scikit-learn's digits. The
test NLL is the NLL of the linearised predictive, with the probit link for classes.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.training import marginal_likelihood_training

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        nll: The test NLL per example, in nats.
        network_nll: The test NLL of the trained network without a posterior.
        evidence: The log marginal likelihood per training example that the library reports.
        sigma: The noise; None for classes.
        prior_precisions: δ of every parameter.
        seconds: The duration of the run.
    """

    nll: float
    network_nll: float
    evidence: float
    sigma: float | None
    prior_precisions: list[float]
    seconds: float


@dataclass(frozen=True)
class Problem:
    """A data set, a network and its training.

    Attributes:
        likelihood: The name of the likelihood in both libraries.
        data: A function that makes training and test examples.
        network: A function that builds the network.
        epochs: The number of epochs.
        every: The number of epochs between two fits.
        batch_size: The number of examples of a batch.
        learning_rate: The learning rate of Adam.
    """

    likelihood: str
    data: Callable[[], tuple[Examples, Examples]]
    network: Callable[[], nn.Module]
    epochs: int
    every: int
    batch_size: int
    learning_rate: float


def sine() -> tuple[Examples, Examples]:
    """Make 150 examples of a sine on [0, 8] with noise 0.3, and as many for the test."""

    def draw() -> Examples:
        x = 8 * torch.rand(150, 1)
        return x, x.sin() + 0.3 * torch.randn(150, 1)

    return draw(), draw()


def digits() -> tuple[Examples, Examples]:
    """Load 1,000 training images and 797 test images, with variance 1."""
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x = ((torch.tensor(images, dtype=torch.float32) / 16 - 0.3053) / 0.3760)[order]
    y = torch.tensor(targets)[order]
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


PROBLEMS = {
    "sine": Problem(
        "regression",
        sine,
        lambda: nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)),
        epochs=500,
        every=5,
        batch_size=150,
        learning_rate=1e-2,
    ),
    "digits": Problem(
        "classification",
        digits,
        lambda: nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)),
        epochs=60,
        every=5,
        batch_size=100,
        learning_rate=3e-3,
    ),
}


def run_ours(problem: Problem, model: nn.Module, train: Examples, test: Examples) -> Result:
    """Train with this package."""
    loader = DataLoader(TensorDataset(*train), problem.batch_size, shuffle=True)
    started = time.perf_counter()
    training_run = marginal_likelihood_training(
        model,
        loader,
        problem.likelihood,
        optimizer=torch.optim.Adam(model.parameters(), lr=problem.learning_rate),
        epochs=problem.epochs,
        every=problem.every,
    )
    seconds = time.perf_counter() - started
    la = training_run.laplace
    x, y = test
    evidence = float(la.log_marginal_likelihood()) / len(train[0])
    if problem.likelihood == "regression":
        nll = -float(la.predict(x).log_prob(y).mean())
        sigma = float(la.sigma)
        network_nll = _gaussian_nll(model(x).detach(), torch.tensor(sigma), y)
    else:
        nll = -float(la.predict(x, link="probit").log_prob(y).mean())
        sigma = None
        network_nll = float(nn.functional.cross_entropy(model(x), y).detach())
    return Result(
        nll=nll,
        network_nll=network_nll,
        evidence=evidence,
        sigma=sigma,
        prior_precisions=la.prior_precision.tolist(),
        seconds=seconds,
    )


def run_laplace_torch(
    problem: Problem, model: nn.Module, train: Examples, test: Examples
) -> Result:
    """Train with laplace-torch, with curvlinops as its backend."""
    from laplace import marglik_training
    from laplace.curvature import CurvlinopsGGN

    loader = DataLoader(TensorDataset(*train), problem.batch_size, shuffle=True)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, model, evidences, _ = marglik_training(
            model,
            loader,
            problem.likelihood,
            hessian_structure="kron",
            backend=CurvlinopsGGN,
            optimizer_kwargs={"lr": problem.learning_rate},
            n_epochs=problem.epochs,
            marglik_frequency=problem.every,
            prior_structure="layerwise",
        )
    seconds = time.perf_counter() - started
    x, y = test
    if problem.likelihood == "regression":
        mean, variance = la(x, pred_type="glm")
        sigma = float(la.sigma_noise)
        deviation = (variance.reshape(mean.shape) + sigma**2).sqrt()
        nll = _gaussian_nll(mean, deviation, y)
        network_nll = _gaussian_nll(mean, torch.tensor(sigma), y)
    else:
        probs: Any = la(x, pred_type="glm", link_approx="probit")
        sigma = None
        nll = -float(probs[torch.arange(len(y)), y].log().mean())
        network_nll = float(nn.functional.cross_entropy(model(x), y).detach())
    return Result(
        nll=nll,
        network_nll=network_nll,
        evidence=-min(evidences) / len(train[0]),
        sigma=sigma,
        prior_precisions=la.prior_precision.tolist(),
        seconds=seconds,
    )


def _gaussian_nll(mean: Tensor, deviation: Tensor, y: Tensor) -> float:
    return -float(Normal(mean, deviation).log_prob(y).mean())


LIBRARIES = {"laplace-debias": run_ours, "laplace-torch": run_laplace_torch}


def run_problem(
    problem: Problem, libraries: Sequence[str], num_seeds: int
) -> dict[str, list[Result]]:
    """Train with each library; return a result per seed, by library."""
    results: dict[str, list[Result]] = {library: [] for library in libraries}
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        train, test = problem.data()
        model = problem.network()
        for library in libraries:
            torch.manual_seed(seed)
            run = LIBRARIES[library]
            results[library].append(run(problem, copy.deepcopy(model), train, test))
    return results


def mean_and_range(values: Sequence[float]) -> str:
    """Format the mean, with the smallest and the largest value."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.problems:
        results = run_problem(PROBLEMS[name], options.libraries, options.seeds)
        print(f"\n{name}, {options.seeds} seeds: mean (least to greatest)\n")
        print("| library | test NLL | NLL of the network | log evidence per example | sigma | s |")
        print("|---|---|---|---|---|---|")
        for library, runs in results.items():
            cells = [
                mean_and_range([getattr(result, field) for result in runs])
                for field in ("nll", "network_nll", "evidence")
            ]
            sigmas = [result.sigma for result in runs if result.sigma is not None]
            cells.append(mean_and_range(sigmas) if sigmas else "–")
            cells.append(f"{statistics.mean([result.seconds for result in runs]):.1f}")
            print(f"| {library} | {' | '.join(cells)} |")
        for library, runs in results.items():
            deltas = ", ".join(f"{delta:.3g}" for delta in runs[0].prior_precisions)
            print(f"\nprior precisions of the first seed, {library}: {deltas}", flush=True)


if __name__ == "__main__":
    main()
