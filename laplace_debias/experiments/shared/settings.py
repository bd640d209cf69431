"""Settings that commands and experiments have in common."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.problems import DataSource, get_problem


@dataclass(frozen=True, kw_only=True)
class ProblemSettings:
    """Which test problem, where its data is, and where to run.

    Attributes:
        problem: Name of the test problem, or its letter in the paper.
        data: Its data: for CIFAR an image folder, an archive of one, or a torchvision root; for
            ImageNet a folder with `train/` and `val/`; nothing for the digits.
        cache: Folder for decoded images; see `problems.cifar10`.
        download: Whether CIFAR may be downloaded to `data` where nothing is there.
        seed: Seed of all random choices: of examples, of the split where no checkpoint holds one,
            of a training.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If the problem is unknown, or another setting is out of range; so do all
            settings that extend these.
    """

    problem: str = "allcnnc-cifar10-one-cycle"
    data: Path | None = None
    cache: Path | None = None
    download: bool = False
    seed: int = 0
    device: str = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        get_problem(self.problem)

    @property
    def source(self) -> DataSource:
        """Where the problem's data is."""
        return DataSource(
            root=self.data, cache=self.cache, download=self.download, progress=self.progress
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ProblemSettings):
    """Settings of what may train a network.

    Attributes:
        recipe: What differs from the problem's recipe, where the network is trained.
        resume: Whether to continue an interrupted run of the same settings.
    """

    recipe: RecipeChanges = field(default_factory=RecipeChanges)
    resume: bool = False

    def __post_init__(self) -> None:
        self.recipe.applied_to(get_problem(self.problem).recipe)


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(TrainingSettings):
    """Settings that every experiment of the paper has.

    Attributes:
        output: Folder of the tables, the pictures and the parts that a resumed run reads. Results
            of other settings there are never overwritten.
        checkpoint: The trained network, a file of `laplace-debias train`. If None, the published
            network; where there is none, the network is trained first and kept in `output`.
    """

    output: Path
    checkpoint: Path | None = None

    def check_counts(self, num_train: int, num_test: int) -> None:
        """Refuse settings that ask for more images than there are, before any work.

        Settings with numbers of their own override this.

        Args:
            num_train: How many training images there are.
            num_test: How many test images.

        Raises:
            ValueError: If there are too few.
        """
        training = dict.fromkeys(("batch_size", "full_examples", "train_examples"), num_train)
        for name, there in {**training, "test_examples": num_test}.items():
            wanted = getattr(self, name, None)
            if wanted is not None and wanted > there:
                kind = "test" if name == "test_examples" else "training"
                raise ValueError(f"{name} is {wanted}; there are {there} {kind} images: lower it")


@dataclass(frozen=True, kw_only=True)
class QuadraticSettings(ExperimentSettings):
    """Settings of experiments on the quadratics of several draws of examples.

    Attributes:
        draws: How many mini-batches are drawn.
        curvature: `ggn` or `hessian`, the quadratic's matrix.
        weight_decay: β of ½ β ‖weights‖², which acts on weights alone, as in training; the
            training's β if None (see `Trained`).
    """

    draws: int = 1
    curvature: Literal["ggn", "hessian"] = "ggn"
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "draws")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"weight_decay is {self.weight_decay}; expected a finite number of at least 0"
            )

    def decay(self, of_training: float) -> float:
        """β: the given one, or that of the training."""
        return of_training if self.weight_decay is None else self.weight_decay
