"""Problems: networks that train in seconds, with examples for training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sklearn import datasets
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]


class MissingError(Exception):
    """An error for a problem that needs a missing package or file."""


@dataclass(frozen=True)
class Problem:
    """Trained networks, with their data.

    Attributes:
        networks: Networks that differ only in their seeds, or a single network. Only ensembles use
            more than the first network.
        train: The inputs and targets to which posteriors are fitted.
        validation: The examples on which everything is tuned.
        sets: The examples for the evaluation: `test`, `shifted` (with targets) and `foreign`.
        num_data: The number of examples on which the networks were trained.
        mode: The mode of a fit to all parameters.
    """

    networks: list[nn.Module]
    train: Examples
    validation: Examples
    sets: dict[str, Examples]
    num_data: int | None = None
    mode: str = "full"

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers, not classes."""
        return self.train[1].is_floating_point()


def trained(
    build: Callable[[], nn.Module], data: Examples, seed: int, epochs: int = 100, rate: float = 6e-3
) -> nn.Module:
    """Train a network by Adam in batches of 32, with a one-cycle learning rate up to `rate`."""
    torch.manual_seed(seed)
    network, (x, y) = build(), data
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, weight_decay=1e-4)
    steps = len(y) // 32 or 1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * steps)
    for _ in range(epochs):
        for part in torch.randperm(len(y)).split(32)[:steps]:
            optimizer.zero_grad()
            loss(network(x[part]), y[part]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def perceptrons(x: Tensor, y: Tensor, numbers: tuple[int, int], g: torch.Generator) -> Problem:
    """Train three perceptrons; noisy test examples are shifted, shuffled columns are foreign.

    For a regression, foreign examples are twice as far from the mean.

    Args:
        x: Standardised inputs.
        y: Targets.
        numbers: The numbers of training and of validation examples, which come first.
        g: The generator of noise and order; its seed is also the seed of the networks.
    """
    sizes = [*numbers, len(y) - sum(numbers)]
    train, validation, test = zip(x.split(sizes), y.split(sizes), strict=True)
    is_regression = y.is_floating_point()
    activation = nn.Tanh if is_regression else nn.ReLU
    num_outputs = 1 if is_regression else int(y.max()) + 1

    def build() -> nn.Module:
        first, second = nn.Linear(x.shape[1], 50), nn.Linear(50, 50)
        return nn.Sequential(first, activation(), second, activation(), nn.Linear(50, num_outputs))

    networks = [trained(build, train, 1000 * number + g.initial_seed()) for number in range(3)]
    shifted = test[0] + 0.5 * torch.randn(test[0].shape, generator=g)
    order = torch.rand(test[0].shape, generator=g).argsort(0)
    foreign = 2 * test[0] if is_regression else test[0].gather(0, order)
    sets = {"test": test, "shifted": (shifted, test[1]), "foreign": (foreign, test[1])}
    return Problem(networks, train, validation, sets)


def table(
    load: Callable[..., Examples], train: int, validation: int, seed: int, labels: str = ""
) -> Problem:
    """Load a table of scikit-learn; all rows after training and validation are test examples.

    With `wrong` labels, 15 % of all labels are drawn at random. With `rare` labels, each class has
    0.7 times as many examples as the class before.
    """
    g = torch.Generator().manual_seed(seed)
    x, y = map(torch.as_tensor, load(return_X_y=True))
    order = torch.randperm(len(y), generator=g)
    x, y = x[order].float(), y[order].clone()
    if labels == "rare":
        kept = torch.rand(len(y), generator=g) < 0.7**y
        x, y = x[kept], y[kept]
    if labels == "wrong":
        wrong = torch.rand(len(y), generator=g) < 0.15
        y[wrong] = torch.randint(int(y.max()) + 1, (int(wrong.sum()),), generator=g)
    # All pixels get the same scale, because some pixels are equal in all images.
    along = None if x.shape[1] == 64 else 0
    x = (x - x[:train].mean(along)) / x[:train].std(along)
    if y.is_floating_point():
        y = ((y - y[:train].mean()) / y[:train].std()).float()[:, None]
    return perceptrons(x, y, (train, validation), g)


def friedman(return_X_y: bool) -> Examples:
    """Return Friedman's first function of ten variables, five of which matter."""
    return datasets.make_friedman1(860, noise=1.0, random_state=0)


def gap(seed: int) -> Problem:
    """Make a noisy sine; shifted inputs are in its gap between −1 and 1, foreign ones outside."""
    g = torch.Generator().manual_seed(seed)

    def between(*ends: tuple[float, float], number: int) -> Examples:
        x = torch.cat(
            [low + (high - low) * torch.rand(number, 1, generator=g) for low, high in ends]
        )
        return x / 2.5, x.sin() + 0.15 * torch.randn(x.shape, generator=g)

    order = torch.randperm(680, generator=g)
    x, y = (part[order] for part in between((-4, -1), (1, 5), number=340))
    found = perceptrons(x, y, (120, 60), g)
    found.sets["shifted"] = between((-1, 1), number=500)
    found.sets["foreign"] = between((-7, -4), (5, 8), number=250)
    return found


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "wine-few": partial(table, datasets.load_wine, 30, 30),
    "wine": partial(table, datasets.load_wine, 70, 36),
    "cancer-few": partial(table, datasets.load_breast_cancer, 50, 50),
    "cancer": partial(table, datasets.load_breast_cancer, 230, 115),
    "diabetes": partial(table, datasets.load_diabetes, 200, 60),
    "friedman": partial(table, friedman, 100, 60),
    "gap": gap,
    "digits-few": partial(table, datasets.load_digits, 100, 100),
    "digits-rare": partial(table, datasets.load_digits, 240, 120, labels="rare"),
    "digits-wrong": partial(table, datasets.load_digits, 720, 360, labels="wrong"),
    "digits": partial(table, datasets.load_digits, 720, 360),
}
"""The functions that make the problem of a seed, by name. Those of `more` are added there."""
