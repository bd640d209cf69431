"""What the commands `fit` and `tune` share: a trained network, some of its images, an output."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.settings import ProblemSettings
from laplace_debias.problems import Images, ProblemData, get_problem, load_problem
from laplace_debias.system.atomic import check_target
from laplace_debias.system.device import device_from


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(ProblemSettings):
    """Which trained network, and where.

    Attributes:
        checkpoint: The trained network, a file of `laplace-debias train`; the published weights if
            None.
        batch_size: Images per batch.
        needed_by_most: Options that can be left out for few problems only.
    """

    needed_by_most: ClassVar = ("data", "checkpoint")

    checkpoint: Path | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "batch_size")

    def load(self) -> tuple[nn.Module, ProblemData]:
        """The network, in evaluation mode, on the device; and its data, on the CPU.

        Raises:
            ValueError: If data or checkpoint is missing, damaged or of another problem.
            ConnectionError: If a download fails.
        """
        device = device_from(self.device)
        problem = get_problem(self.problem)
        model, data = load_problem(problem, self.source, self.checkpoint, seed=self.seed)
        return model.to(device), data


def some_indices(
    images: Images, number: int | None, generator: torch.Generator, name: str
) -> Tensor:
    """Indices of some images chosen at random, or of all in random order.

    Args:
        images: The data set.
        number: How many; all if None.
        generator: Source of the choice.
        name: What the setting is called.

    Raises:
        ValueError: If there are fewer images.
    """
    if number is not None and number > len(images):
        raise ValueError(f"{name} is {number}; there are {len(images)} images: lower it")
    return torch.randperm(len(images), generator=generator)[:number]


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse an output that cannot be written or must not be replaced, before any work.

    Raises:
        FileExistsError: If the file exists and `overwrite` is false.
        OSError: If it cannot be written.
    """
    check_target(path, make_folders=True)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another --output, or give --overwrite")
