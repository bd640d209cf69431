"""Continual learning: the posterior after the tasks so far is the prior for the next task.

Each task shows the digits with the pixels in a different order. A network that is simply trained on
one task after another forgets the earlier tasks. Here, `posterior_as_prior(la).penalty(model)` is
added to the loss of the next task, and `Laplace(model, prior=prior)` adds the curvature of this
task's data to the prior (Ritter et al., 2018, "Online structured Laplace approximations for
overcoming catastrophic forgetting"). No earlier image is kept. With
`--methods "laplace-torch, diag"`, laplace-torch does the same with one precision per parameter, the
only precision matrix that its prior supports.

Run with `python examples/continual_learning.py`.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, posterior_as_prior

Penalty = Callable[[nn.Module], Tensor]
"""The negative logarithm of the prior's density, in nats, without its constant."""

PRIOR_PRECISION = 1.0
PEER = "laplace-torch, diag"
METHODS = ("fine-tuning", "diag", "ekfac", "kfac")
"""Plain training on one task after another, and the curvatures of the posterior."""


@dataclass(frozen=True)
class Task:
    """Images `[N, 64]` and labels `[N]`, for training and for the test."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def permuted_digits(num_tasks: int, seed: int) -> list[Task]:
    """Return the digits, with the pixels in a different order for each task."""
    pixels, digits = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16).float()
    y = torch.tensor(digits)
    g = torch.Generator().manual_seed(seed)
    train, test = torch.randperm(len(x), generator=g).split([1200, len(x) - 1200])
    tasks = []
    for _ in range(num_tasks):
        images = x[:, torch.randperm(64, generator=g)]
        tasks.append(Task(images[train], y[train], images[test], y[test]))
    return tasks


def train_network(model: nn.Module, task: Task, penalty: Penalty, steps: int) -> None:
    """Train on a task, starting from the current weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(task.x), task.y) + penalty(model) / len(task.x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def first_penalty(model: nn.Module) -> Tensor:
    """Compute the penalty of the first task's prior, N(0, 1 / PRIOR_PRECISION)."""
    return PRIOR_PRECISION / 2 * parameters_to_vector(model.parameters()).square().sum()


def fit_posterior(
    model: nn.Module, data: DataLoader, curvature: str, earlier: Laplace | None
) -> tuple[Laplace, Penalty]:
    """Return the posterior after a task, and the penalty for the next task."""
    if earlier is None:
        la = Laplace(model, curvature=curvature, prior_precision=PRIOR_PRECISION)
    else:
        la = Laplace(model, curvature=curvature, prior=posterior_as_prior(earlier))
    la.fit(data)
    return la, posterior_as_prior(la).penalty


def fit_with_laplace_torch(model: nn.Module, data: DataLoader, earlier: Any) -> tuple[Any, Penalty]:
    """Do the same as `fit_posterior` with laplace-torch's diagonal posterior."""
    from laplace import DiagLaplace

    prior: dict[str, Any] = {"prior_precision": PRIOR_PRECISION}
    if earlier is not None:
        prior = {"prior_precision": earlier.posterior_precision, "prior_mean": earlier.mean}
    la = DiagLaplace(model, "classification", **prior)
    la.fit(data)
    mean = la.mean.clone()
    precision = la.posterior_precision.clone()

    def penalty(model: nn.Module) -> Tensor:
        distance = parameters_to_vector(model.parameters()) - mean
        return (precision * distance.square()).sum() / 2

    return la, penalty


def accuracy_over(tasks: Sequence[Task], model: nn.Module) -> float:
    """Compute the mean test accuracy over tasks."""
    with torch.no_grad():
        accuracies = [
            (model(task.x_test).argmax(1) == task.y_test).float().mean() for task in tasks
        ]
    return float(torch.stack(accuracies).mean())


def learn(method: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the mean test accuracy over the tasks so far, after each task."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).eval()
    tasks = permuted_digits(options.tasks, seed)
    penalty = first_penalty
    la: Any = None
    curve = []
    for index, task in enumerate(tasks):
        train_network(model, task, penalty, options.steps)
        data = DataLoader(TensorDataset(task.x, task.y), batch_size=300)
        if method == PEER:
            la, penalty = fit_with_laplace_torch(model, data, la)
        elif method != "fine-tuning":
            la, penalty = fit_posterior(model, data, method, la)
        curve.append(accuracy_over(tasks[: index + 1], model))
    return curve


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Learn the tasks with every method and several seeds; return curves, `[seeds][tasks]`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="repetitions with other orders")
    parser.add_argument("--tasks", type=int, default=5, help="tasks, one after the other")
    parser.add_argument("--steps", type=int, default=200, help="steps of training on a task")
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, PEER), default=METHODS)
    options = parser.parse_args(arguments)
    if PEER in options.methods and importlib.util.find_spec("laplace") is None:
        parser.error("laplace-torch is not installed. Run pip install laplace-torch.")
    curves = {}
    print("mean test accuracy over all tasks, after the last one")
    for method in options.methods:
        curves[method] = [learn(method, seed, options) for seed in range(options.seeds)]
        last = torch.tensor(curves[method])[:, -1]
        by_seed = ", ".join(f"{value:.3f}" for value in last)
        print(f"{method}: {last.mean():.3f}, by seed {by_seed}")
    return curves


if __name__ == "__main__":
    main()
