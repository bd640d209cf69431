"""Training recipes of the test problems, one loop for all of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.problems.data import ImageDataset
from laplace_debias.problems.models import parameter_like
from laplace_debias.problems.storage import write_tensors


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a classifier with the cross-entropy loss.

    The learning rate is either the constant `learning_rate` over `epochs`, or one or more `cycles`.
    A cycle rises along a cosine from a 25th of its peak over its first 30 %, then falls along a
    cosine to (almost) zero.

    Attributes:
        batch_size: Examples a step.
        epochs: Passes over the data at a constant learning rate.
        learning_rate: That rate.
        cycles: (epochs, peak learning rate) of each one-cycle schedule, in their order.
        optimizer: `"sgd"` or `"adam"`.
        momentum: Momentum of SGD; β₁ of Adam.
        nesterov: Whether SGD takes Nesterov's momentum.
        weight_decay: L2 penalty ½ · weight_decay · ‖W‖² on weights (parameters of more than one
            dimension); biases have none.
        clip_norm: Largest norm of the whole gradient; `None` for no limit.
        flips: Whether images are mirrored left to right at random.
        bfloat16: Whether the network runs under bfloat16 autocast.

    Raises:
        ValueError: If the schedule is given twice or not at all, or a number is out of range.

    Reference:
        Smith & Topin (2018), Super-Convergence (one-cycle schedule).
    """

    batch_size: int
    epochs: int | None = None
    learning_rate: float | None = None
    cycles: tuple[tuple[int, float], ...] = ()
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    flips: bool = False
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
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer {self.optimizer!r}; expected 'sgd' or 'adam'")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum}; expected 0 ≤ momentum < 1")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise ValueError("nesterov needs optimizer='sgd' and a positive momentum")
        if self.batch_size < 1 or self.weight_decay < 0:
            raise ValueError(
                f"batch_size {self.batch_size}, weight_decay {self.weight_decay}; "
                "expected at least 1 and 0"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm {self.clip_norm}; expected a positive number, or None")

    @property
    def schedule(self) -> tuple[tuple[int, float], ...]:
        """(epochs, learning rate) of each stretch, the rate being the peak in a cycle."""
        if self.epochs is not None and self.learning_rate is not None:
            return ((self.epochs, self.learning_rate),)
        return self.cycles

    def rates(self, steps_per_epoch: int) -> Iterator[float]:
        """The learning rate of every step.

        Args:
            steps_per_epoch: Optimiser steps in an epoch.

        Yields:
            One rate a step, over all epochs.
        """
        for epochs, rate in self.schedule:
            steps = epochs * steps_per_epoch
            for step in range(steps):
                yield rate * (_one_cycle((step + 1) / steps) if self.cycles else 1.0)


def _one_cycle(done: float) -> float:
    """Learning rate over its peak, at a fraction 0 … 1 of the cycle."""
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
"""`digits_net` on the digits: no regularisation, hence over-confident."""


def train(
    model: nn.Module,
    dataset: ImageDataset,
    recipe: Recipe,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> list[dict[str, float]]:
    """Train a model in place on the mean cross-entropy; leave it in evaluation mode.

    Every epoch visits each example once, in random order; its last batch may be smaller. Frozen
    parameters (`requires_grad=False`) stay as they are.

    Args:
        model: A network from images [B, C, H, W] to logits [B, classes].
        dataset: Images to train on.
        recipe: How to train.
        generator: CPU generator of the order and of the flips; torch's global one by default. The
            initialisation is the model's own.
        device: Where to train; the model is moved there and stays. Where it is, by default.
        progress: Whether to show a progress bar.

    Returns:
        For each epoch its number (`epoch`, from 1), the mean training loss (`loss`, nats an
        example) and accuracy (`accuracy`, 0 … 1) as they were when each batch was met, and the last
        `learning_rate`.

    Raises:
        ValueError: If the data set is empty or the model has nothing to train.
        FloatingPointError: If the loss becomes infinite or not a number.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no trainable parameters; expected some")
    if len(dataset) == 0:
        raise ValueError("an empty data set; expected at least one image")
    device = torch.device(device) if device is not None else parameters[0].device
    model.to(device).train()
    data = dataset.with_flips(generator) if recipe.flips else dataset
    optimizer = _optimizer(parameters, recipe)
    rates = recipe.rates(math.ceil(len(data) / recipe.batch_size))
    history: list[dict[str, float]] = []
    num_epochs = sum(epochs for epochs, _ in recipe.schedule)
    with tqdm(total=num_epochs, desc="training", unit="epoch", disable=not progress) as bar:
        for epoch in range(1, num_epochs + 1):
            totals = torch.zeros(2, device=device)
            for indices in torch.randperm(len(data), generator=generator).split(recipe.batch_size):
                images, labels = (t.to(device, non_blocking=True) for t in data.batch(indices))
                rate = next(rates)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                totals += _step(model, parameters, optimizer, recipe, images, labels)
            loss, accuracy = (totals / len(data)).tolist()
            if not math.isfinite(loss):
                model.eval()
                raise FloatingPointError(
                    f"the loss is {loss} in epoch {epoch}; lower the learning rate or clip_norm"
                )
            history.append(
                {"epoch": epoch, "loss": loss, "accuracy": accuracy, "learning_rate": rate}
            )
            bar.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}")
            bar.update()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return history


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, betas=(recipe.momentum, 0.999))
    return torch.optim.SGD(groups, lr=1.0, momentum=recipe.momentum, nesterov=recipe.nesterov)


def _step(
    model: nn.Module,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """One step; returns the batch's summed loss and number of hits, on the device."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.bfloat16):
        logits = model(images)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
    optimizer.step()
    hits = (logits.detach().argmax(1) == labels).sum()
    return torch.stack([loss.detach() * len(labels), hits.to(loss.dtype)])


def save_checkpoint(
    model: nn.Module, path: str | Path, extra: dict[str, Tensor] | None = None
) -> None:
    """Write a model's parameters and buffers to a safetensors file, whole or not at all.

    Args:
        model: The model.
        path: The file, which `load_checkpoint` reads.
        extra: More tensors to keep with them, e.g. `split.train` and `split.val`.

    Raises:
        ValueError: If the name of an extra tensor could be a parameter's (see `load_checkpoint`),
            or the file cannot be written.
    """
    extra = extra or {}
    taken = parameter_like(model, extra)
    if taken:
        raise ValueError(
            f"extra tensors {taken} could be parameters of {type(model).__name__}; "
            "give them names that end otherwise"
        )
    write_tensors(path, {**model.state_dict(), **extra})
