"""Problems: networks that train in seconds, with examples for training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from sklearn import datasets
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]
"""Inputs `[N, ...]`, and class indices `[N]` or the targets of a regression `[N, 1]`."""


class MissingError(Exception):
    """An error for a problem that needs a missing package or file."""


@dataclass(frozen=True)
class Problem:
    """Trained networks, with their data.

    Attributes:
        networks: Networks that differ only in their seeds, or a single network. Only ensembles use
            more than the first network.
        train: The examples to which posteriors are fitted.
        validation: The examples on which everything is tuned.
        test: Examples like the training examples.
        shifted: Examples with noisy or corrupted inputs.
        foreign: Inputs `[N, ...]` that are unlike the training inputs.
        num_data: The number of examples on which the networks were trained, if not all of them are
            in `train`.
        mode: The mode of a fit to all parameters.
    """

    networks: list[nn.Module]
    train: Examples
    validation: Examples
    test: Examples
    shifted: Examples
    foreign: Tensor
    num_data: int | None = None
    mode: str = "full"

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers, not classes."""
        _, y = self.train
        return y.is_floating_point()


def train_network(
    build: Callable[[], nn.Module],
    examples: Examples,
    seed: int,
    epochs: int = 100,
    max_learning_rate: float = 6e-3,
) -> nn.Module:
    """Build and train a network by Adam in batches of 32, with a one-cycle learning rate."""
    torch.manual_seed(seed)
    network = build()
    x, y = examples
    loss_function = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trainable, weight_decay=1e-4)
    num_batches = max(1, len(y) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_learning_rate, total_steps=epochs * num_batches
    )
    for _ in range(epochs):
        for indices in torch.randperm(len(y)).split(32)[:num_batches]:
            optimizer.zero_grad()
            loss_function(network(x[indices]), y[indices]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def perceptron_problem(
    x: Tensor, y: Tensor, num_train: int, num_validation: int, g: torch.Generator
) -> Problem:
    """Split examples, and train three perceptrons.

    Noise is added to the shifted inputs. For a classification, the foreign inputs are the test
    inputs with every column shuffled; for a regression, they are twice as far from the mean.

    Args:
        x: Standardised inputs, `[N, D]`, in random order.
        y: Targets.
        num_train: The number of training examples, which come first.
        num_validation: The number of validation examples, which come next. All others are test
            examples.
        g: The generator of noise and permutations; its seed is also the seed of the networks.
    """
    sizes = [num_train, num_validation, len(y) - num_train - num_validation]
    train, validation, test = zip(x.split(sizes), y.split(sizes), strict=True)
    activation: type[nn.Module]
    if y.is_floating_point():
        activation = nn.Tanh
        num_outputs = 1
    else:
        activation = nn.ReLU
        num_outputs = int(y.max()) + 1

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(x.shape[1], 50),
            activation(),
            nn.Linear(50, 50),
            activation(),
            nn.Linear(50, num_outputs),
        )

    seeds = [1000 * index + g.initial_seed() for index in range(3)]
    networks = [train_network(build, train, seed) for seed in seeds]
    x_test, y_test = test
    x_shifted = x_test + 0.5 * torch.randn(x_test.shape, generator=g)
    permutations = torch.rand(x_test.shape, generator=g).argsort(0)
    foreign = 2 * x_test if y.is_floating_point() else x_test.gather(0, permutations)
    return Problem(networks, train, validation, test, shifted=(x_shifted, y_test), foreign=foreign)


def table_problem(
    load: Callable[..., Examples],
    seed: int,
    num_train: int,
    num_validation: int,
    labels: Literal["clean", "rare", "wrong"] = "clean",
) -> Problem:
    """Train perceptrons on a table of scikit-learn.

    Args:
        load: A loader of scikit-learn with the argument `return_X_y`.
        seed: The seed of the split, the labels, the noise and the networks.
        num_train: The number of training examples.
        num_validation: The number of validation examples. All other rows are test examples.
        labels: With `"wrong"`, 15 % of all labels are drawn at random. With `"rare"`, each class
            has 0.7 times as many examples as the class before.
    """
    g = torch.Generator().manual_seed(seed)
    x, y = map(torch.as_tensor, load(return_X_y=True))
    order = torch.randperm(len(y), generator=g)
    x = x[order].float()
    y = y[order].clone()
    if labels == "rare":
        is_selected = torch.rand(len(y), generator=g) < 0.7**y
        x = x[is_selected]
        y = y[is_selected]
    if labels == "wrong":
        is_wrong = torch.rand(len(y), generator=g) < 0.15
        y[is_wrong] = torch.randint(int(y.max()) + 1, (int(is_wrong.sum()),), generator=g)
    if load is datasets.load_digits:
        # All pixels get the same scale, because some pixels are equal in all images.
        x = (x - x[:num_train].mean()) / x[:num_train].std()
    else:
        x = (x - x[:num_train].mean(0)) / x[:num_train].std(0)
    if y.is_floating_point():
        y = ((y - y[:num_train].mean()) / y[:num_train].std()).float()[:, None]
    return perceptron_problem(x, y, num_train, num_validation, g)


def load_friedman(return_X_y: bool) -> Examples:
    """Return Friedman's first function of ten variables, five of which matter."""
    return datasets.make_friedman1(860, noise=1.0, random_state=0)


def gap_problem(seed: int) -> Problem:
    """Train perceptrons on a noisy sine whose inputs have a gap between −1 and 1.

    The shifted inputs are in the gap, and the foreign inputs are outside the range of the training
    inputs.
    """
    g = torch.Generator().manual_seed(seed)

    def noisy_sine(*intervals: tuple[float, float], num_per_interval: int) -> Examples:
        x = torch.cat(
            [
                low + (high - low) * torch.rand(num_per_interval, 1, generator=g)
                for low, high in intervals
            ]
        )
        y = x.sin() + 0.15 * torch.randn(x.shape, generator=g)
        return x / 2.5, y

    order = torch.randperm(680, generator=g)
    x, y = noisy_sine((-4, -1), (1, 5), num_per_interval=340)
    problem = perceptron_problem(x[order], y[order], 120, 60, g)
    shifted = noisy_sine((-1, 1), num_per_interval=500)
    foreign, _ = noisy_sine((-7, -4), (5, 8), num_per_interval=250)
    return replace(problem, shifted=shifted, foreign=foreign)


wine = partial(table_problem, datasets.load_wine)
cancer = partial(table_problem, datasets.load_breast_cancer)
diabetes = partial(table_problem, datasets.load_diabetes)
friedman = partial(table_problem, load_friedman)
digits = partial(table_problem, datasets.load_digits)

PERCEPTRON_PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "wine-few": partial(wine, num_train=30, num_validation=30),
    "wine": partial(wine, num_train=70, num_validation=36),
    "cancer-few": partial(cancer, num_train=50, num_validation=50),
    "cancer": partial(cancer, num_train=230, num_validation=115),
    "diabetes": partial(diabetes, num_train=200, num_validation=60),
    "friedman": partial(friedman, num_train=100, num_validation=60),
    "gap": gap_problem,
    "digits-few": partial(digits, num_train=100, num_validation=100),
    "digits-rare": partial(digits, num_train=240, num_validation=120, labels="rare"),
    "digits-wrong": partial(digits, num_train=720, num_validation=360, labels="wrong"),
    "digits": partial(digits, num_train=720, num_validation=360),
}
"""For each problem, the function that makes it from a seed."""
