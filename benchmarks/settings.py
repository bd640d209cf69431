"""The settings of the comparisons: the network, its data, and the device."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.paper.networks import all_cnn_c, digits_net
from laplace_debias.sources.weights import load_weights

CHECKPOINT = "LAPLACE_DEBIAS_CHECKPOINT"


@dataclass(frozen=True)
class Settings:
    """The common settings of the comparisons.

    Attributes:
        device: `"cpu"` or `"cuda"`.
        quick: Whether to use a tiny network and tiny batches, which only show that everything runs.
        repetitions: The number of rounds, in each of which every contender is measured.
        threads: The number of threads of torch.
    """

    device: str = "cpu"
    quick: bool = False
    repetitions: int = 3
    threads: int = 2

    @property
    def batch(self) -> int:
        """The number of images of a fit."""
        return 8 if self.quick else 128

    @property
    def images(self) -> int:
        """The number of images of a prediction."""
        return 2 if self.quick else 8

    @property
    def network(self) -> str:
        """A description of the network."""
        if self.quick:
            return "a small convolutional network (11,970 parameters), random weights"
        weights = "trained" if CHECKPOINT in os.environ else "random"
        return f"All-CNN-C (1.37 M parameters), {weights} weights"

    def start(self) -> None:
        """Prepare torch in the process of a comparison."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)

    def model(self) -> nn.Sequential:
        """Return the network in eval mode, always with the same weights but with new modules."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = digits_net() if self.quick else all_cnn_c()
        if CHECKPOINT in os.environ and not self.quick:
            load_weights(model, Path(os.environ[CHECKPOINT]))
        return model.eval().to(self.device)

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random images `[size, ...]` and labels `[size]`."""
        image_shape = (1, 8, 8) if self.quick else (3, 32, 32)
        return _random_data((size, *image_shape), seed, self.device)


# The data are cached, so that a timed call does not draw them.
@lru_cache
def _random_data(shape: tuple[int, ...], seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(shape, generator=generator)
    labels = torch.randint(10, shape[:1], generator=generator)
    return images.to(device), labels.to(device)
