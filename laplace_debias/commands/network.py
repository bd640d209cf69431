"""What the commands `fit` and `tune` share: a trained network, some of its images, an output."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.device import device_from
from laplace_debias.problems import DataSource, Images, ProblemData, get_problem, load_problem
from laplace_debias.system.atomic import check_target


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Which trained network, and where.

    Attributes:
        problem: Name of the test problem, or its letter in the paper.
        data: Its data: for CIFAR an image folder, an archive of one, or a torchvision root; for
            ImageNet a folder with `train/` and `val/`; nothing for the digits.
        checkpoint: The trained network, a file of `laplace-debias train`; the published weights if
            None.
        cache: Folder for decoded images; see `problems.cifar10`.
        download: Whether CIFAR may be downloaded to `data` where nothing is there.
        batch_size: Images per batch.
        seed: Seed of the choice of images, and of the split where the checkpoint holds none.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        progress: Whether to show progress bars.
        needed_by_most: Options that can be left out for few problems only.

    Raises:
        ValueError: If the problem is unknown or a number out of range.
    """

    needed_by_most: ClassVar = ("data", "checkpoint")

    problem: str = "allcnnc-cifar10-one-cycle"
    data: Path | None = None
    checkpoint: Path | None = None
    cache: Path | None = None
    download: bool = False
    batch_size: int = 64
    seed: int = 0
    device: str = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        get_problem(self.problem)
        check_at_least(self, 1, "batch_size")

    def load(self) -> tuple[nn.Module, ProblemData]:
        """The network, in evaluation mode, on the device; and its data, on the CPU.

        Raises:
            ValueError: If data or checkpoint is missing, damaged or of another problem.
            ConnectionError: If a download fails.
        """
        device = device_from(self.device)
        source = DataSource(
            root=self.data, cache=self.cache, download=self.download, progress=self.progress
        )
        problem = get_problem(self.problem)
        model, data = load_problem(problem, source, self.checkpoint, seed=self.seed)
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
