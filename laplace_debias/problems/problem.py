"""What a test problem is: a model, its data in three parts, and how it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.problems.data import random_split
from laplace_debias.problems.images import Images
from laplace_debias.problems.models import load_checkpoint
from laplace_debias.problems.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a problem's data is.

    Attributes:
        root: Folder or archive, as `cifar10`, `cifar100` and `imagenet` take it; the digits need
            none.
        cache: Folder for decoded images; see `cifar10`.
        download: Whether CIFAR may be downloaded to `root` where nothing is there.
        progress: Whether to show a progress bar while images are decoded.
    """

    root: Path | None = None
    cache: Path | None = None
    download: bool = False
    progress: bool = False


@dataclass(frozen=True, eq=False)
class ProblemData:
    """A problem's data in three parts.

    Attributes:
        train: Images to train on and to fit with; never mirrored or cropped at random.
        val: Images to tune on.
        test: Images to report on.
        train_indices: Which images of the source's pool are `train`, int64. Validation images are
            taken from the pool: the training images, or `val/` for ImageNet.
        val_indices: Which of them are `val`. A checkpoint keeps both.
    """

    train: Images
    val: Images
    test: Images
    train_indices: Tensor
    val_indices: Tensor


@dataclass(frozen=True, kw_only=True)
class TestProblem:
    """A model, its data and how it is trained.

    Attributes:
        name: Name, as in `get_problem`.
        letter: Letter of the paper's problem that this is, or is a relative of.
        summary: What it is, in one line.
        is_reduced: Whether this is a small relative.
        model: Makes the network, with random weights from torch's global generator.
        read: Reads the data of a source: (training, test).
        recipe: How the network is trained, on the mean cross-entropy.
        num_validation: How many images are held out of the whole data set.
        num_checkpoints: How many checkpoints are stored, at log-equidistant epochs.
        published: Makes the network with published weights; None where there are none.
        validates_on_test: Whether the validation images are part of the test images, because the
            published weights have seen all training images.
    """

    # Pytest collects classes of this name where a test module imports them, unless told not to.
    __test__ = False

    name: str
    letter: str
    summary: str
    is_reduced: bool = False
    model: Callable[[], nn.Module]
    read: Callable[[DataSource], tuple[Images, Images]]
    recipe: Recipe
    num_validation: int
    num_checkpoints: int = 10
    published: Callable[[], nn.Module] | None = None
    validates_on_test: bool = False

    @property
    def loss(self) -> nn.Module:
        """The loss of all problems, the mean cross-entropy."""
        return nn.CrossEntropyLoss()

    @property
    def likelihood(self) -> str:
        """Name of that loss for `Laplace`."""
        return "classification"

    def initial_model(self, seed: int) -> nn.Module:
        """The network with the random weights of a seed, apart from torch's global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def data(
        self,
        source: DataSource | None = None,
        *,
        num_validation: int | None = None,
        seed: int = 0,
        split: tuple[Tensor, Tensor] | None = None,
    ) -> ProblemData:
        """The problem's data: 40,000, 10,000 and 10,000 images where CIFAR is whole.

        Args:
            source: Where the data is; not needed for the digits.
            num_validation: How many images are held out; `num_validation` by default, or a fifth of
                a pool of less than twice as many.
            seed: Seed of the split.
            split: Indices of the pool to train on and to hold out, e.g. those of a checkpoint.

        Returns:
            The three parts.

        Raises:
            ValueError: If the data is missing or damaged, or does not fit the split.
            ConnectionError: If the download fails.
            ImportError: If a package that reads the data is missing.
        """
        training, test = self.read(source or DataSource())
        pool = test if self.validates_on_test else training
        if split is None:
            usual = self.num_validation
            if len(pool) < 2 * usual:
                usual = max(1, len(pool) // 5)
            held_out = usual if num_validation is None else num_validation
            split = random_split(len(pool), held_out, seed)
        kept, held = split
        if self.validates_on_test:
            return ProblemData(training, test.subset(held), test.subset(kept), kept, held)
        return ProblemData(training.subset(kept), training.subset(held), test, kept, held)


def load_problem(
    problem: TestProblem,
    source: DataSource | None = None,
    checkpoint: str | Path | None = None,
    *,
    seed: int = 0,
) -> tuple[nn.Module, ProblemData]:
    """A problem's trained model, in evaluation mode, and its data in the split of its training.

    Args:
        problem: The problem.
        source: Where the data is.
        checkpoint: A file of `laplace-debias train`; the published weights by default.
        seed: Seed of the split where the checkpoint holds none.

    Returns:
        The model and the data.

    Raises:
        ValueError: If the data or the checkpoint is missing, damaged or of another problem, or
            there are no published weights.
        ConnectionError: If weights or data cannot be downloaded.
        ImportError: If a package that they come from is missing.
    """
    if checkpoint is None:
        if problem.published is None:
            missing = (
                f"{problem.name} has no published weights; train it (laplace-debias train "
                f"--problem={problem.name}) and give the checkpoint"
            )
            if source is None or source.root is None:
                # What else is missing is told at once; the digits, which need no path, are small.
                try:
                    problem.data(source, seed=seed)
                except ValueError as error:
                    missing = f"{missing}; {error}"
            raise ValueError(missing)
        return problem.published().eval(), problem.data(source, seed=seed)
    model = problem.model()
    extra = load_checkpoint(model, checkpoint)
    split = None
    if "split.train" in extra and "split.val" in extra:
        split = extra["split.train"], extra["split.val"]
    return model.eval(), problem.data(source, seed=seed, split=split)
