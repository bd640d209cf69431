"""Training recipes: schedule, optimiser and augmentation of a test problem."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a classifier with the cross-entropy loss.

    The learning rate is either `learning_rate` over `epochs`, multiplied by `decay` after each of
    the `milestones`; or it follows one or more `cycles`. A cycle rises along a cosine from a 25th
    of its peak over its first 30 %, then falls along a cosine to (almost) zero.

    Attributes:
        batch_size: Examples per step.
        epochs: Passes over the data.
        learning_rate: The initial learning rate.
        milestones: Numbers of epochs, increasing, after which the rate is multiplied by `decay`.
        decay: That factor.
        cycles: (epochs, peak learning rate) of each one-cycle schedule, in their order.
        optimizer: `"sgd"`; `"adam"` (β₂ = 0.999, ε = 1e-8); or `"nadamw"`, Adam with Nesterov's
            momentum and decoupled weight decay.
        momentum: Momentum of SGD; β₁ of Adam.
        nesterov: Whether SGD takes Nesterov's momentum.
        weight_decay: L2 penalty ½ · weight_decay · ‖W‖² on weights (parameters of more than one
            dimension); biases and the scales of normalisations have none. For `"nadamw"` the
            weights shrink by learning rate · weight_decay per step instead.
        clip_norm: Largest norm of the whole gradient; `None` for no limit.
        flips: Whether images are mirrored left to right at random.
        crops: Whether images are cropped at random; the data set says how.
        bfloat16: Whether the network runs under bfloat16 autocast.

    Raises:
        ValueError: If the schedule is given twice or not at all, or a number is out of range.

    Reference:
        Smith & Topin (2018), Super-Convergence (one-cycle schedule).
    """

    batch_size: int
    epochs: int | None = None
    learning_rate: float | None = None
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    cycles: tuple[tuple[int, float], ...] = ()
    optimizer: Literal["sgd", "adam", "nadamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    flips: bool = False
    crops: bool = False
    bfloat16: bool = False

    def __post_init__(self) -> None:
        constant = (self.epochs is not None, self.learning_rate is not None)
        if constant != ((False, False) if self.cycles else (True, True)):
            raise ValueError(
                f"epochs={self.epochs}, learning_rate={self.learning_rate}, cycles={self.cycles}; "
                "expected epochs and learning_rate for a constant rate, or cycles alone"
            )
        for epochs, rate in self.schedule:
            if epochs < 1 or not 0 < rate < math.inf:
                raise ValueError(
                    f"{epochs} epochs at learning rate {rate}; expected positive numbers"
                )
        inner = (0, *self.milestones, self.num_epochs)
        if self.milestones and (self.cycles or any(b <= a for a, b in pairwise(inner))):
            raise ValueError(
                f"milestones {self.milestones} of {self.num_epochs} epochs, cycles={self.cycles}; "
                "expected increasing numbers of epochs between 0 and all, and no cycles"
            )
        if not 0 < self.decay < math.inf:
            raise ValueError(f"decay {self.decay}; expected a positive number")
        if self.optimizer not in ("sgd", "adam", "nadamw"):
            raise ValueError(f"optimizer {self.optimizer!r}; expected 'sgd', 'adam' or 'nadamw'")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum}; expected 0 ≤ momentum < 1")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise ValueError("nesterov needs optimizer='sgd' and a positive momentum")
        if self.batch_size < 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"batch_size {self.batch_size}, weight_decay {self.weight_decay}; "
                "expected at least 1 and 0, and finite"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm {self.clip_norm}; expected a positive number, or None")

    @property
    def penalty(self) -> float:
        """β of the loss that is trained on (Eq. 1); 0 for decoupled decay, which has no loss."""
        return 0.0 if self.optimizer == "nadamw" else self.weight_decay

    @property
    def schedule(self) -> tuple[tuple[int, float], ...]:
        """(epochs, learning rate) of each part: the initial rate, or a cycle's peak."""
        if self.epochs is not None and self.learning_rate is not None:
            return ((self.epochs, self.learning_rate),)
        return self.cycles

    @property
    def num_epochs(self) -> int:
        """Passes over the data in all."""
        return sum(epochs for epochs, _ in self.schedule)

    def rates(self, steps_per_epoch: int) -> Iterator[float]:
        """The learning rate of every step.

        Args:
            steps_per_epoch: Optimiser steps in an epoch.

        Yields:
            One rate per step, over all epochs.
        """
        for epochs, rate in self.schedule:
            steps = epochs * steps_per_epoch
            for step in range(steps):
                if self.cycles:
                    yield rate * _one_cycle((step + 1) / steps)
                else:
                    passed = sum(step >= after * steps_per_epoch for after in self.milestones)
                    yield rate * self.decay**passed


def _one_cycle(done: float) -> float:
    """Learning rate relative to its peak, at a fraction 0 … 1 of the cycle."""
    if done < 0.3:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * done / 0.3)) / 2
    return 4e-6 + (1 - 4e-6) * (1 + math.cos(math.pi * (done - 0.3) / 0.7)) / 2


ALLCNNC_CIFAR10_RECIPE = Recipe(
    batch_size=128,
    cycles=((16, 0.04), (28, 0.05)),
    nesterov=True,
    weight_decay=1e-3,
    clip_norm=5.0,
    flips=True,
    bfloat16=True,
)
"""All-CNN-C on CIFAR-10."""

DIGITS_RECIPE = Recipe(batch_size=50, cycles=((40, 0.1),), clip_norm=5.0)
"""`digits_net` on the digits: no regularisation, so it is over-confident."""


def log_epochs(num_epochs: int, count: int) -> tuple[int, ...]:
    """Epochs between the first and the last, equidistant in their logarithm.

    Args:
        num_epochs: The last epoch.
        count: How many epochs; 1 gives the last, 0 none.

    Returns:
        Increasing numbers from 1 to `num_epochs`; fewer than `count` where neighbours round to the
        same epoch.

    Raises:
        ValueError: If there is no epoch or the count is negative.
    """
    if num_epochs < 1 or count < 0:
        raise ValueError(
            f"{count} of {num_epochs} epochs; expected a count of at least 0 and at least 1 epoch"
        )
    if count < 2:
        return (num_epochs,) * count
    steps = (n / (count - 1) for n in range(count))
    return tuple(sorted({round(num_epochs**step) for step in steps}))
