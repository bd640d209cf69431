"""What the comparisons run on: the network, its data, the device."""

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
    """What the comparisons have in common.

    Attributes:
        device: `"cpu"` or `"cuda"`.
        quick: A tiny network and tiny batches: shows that everything runs, not how fast.
        repetitions: Rounds in which every contender has its turn.
        threads: Of torch.
    """

    device: str = "cpu"
    quick: bool = False
    repetitions: int = 3
    threads: int = 2

    @property
    def batch(self) -> int:
        """Images of a fit."""
        return 8 if self.quick else 128

    @property
    def images(self) -> int:
        """Images of a prediction."""
        return 2 if self.quick else 8

    @property
    def network(self) -> str:
        """The network in words."""
        if self.quick:
            return "a small convolutional network (11,970 parameters), random weights"
        trained = "trained" if CHECKPOINT in os.environ else "random"
        return f"All-CNN-C (1.37 M parameters), {trained} weights"

    def start(self) -> None:
        """Prepare torch in a comparison's process."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)

    def model(self) -> nn.Sequential:
        """The network in eval mode: always the same weights, no module shared between calls."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = digits_net() if self.quick else all_cnn_c()
        if CHECKPOINT in os.environ and not self.quick:
            load_weights(model, Path(os.environ[CHECKPOINT]))
        return model.eval().to(self.device)

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random images `[size, ...]` and labels `[size]`, made once: no turn pays for them."""
        return _data((size, 1, 8, 8) if self.quick else (size, 3, 32, 32), seed, self.device)


@lru_cache
def _data(shape: tuple[int, ...], seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(shape, generator=generator)
    labels = torch.randint(10, shape[:1], generator=generator)
    return images.to(device), labels.to(device)
