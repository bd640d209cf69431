"""A posterior of a test problem's network, fitted into a file and tuned there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from laplace_debias.experiments.posteriors.evaluation import check_held_out, device_from, hits_of
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.files import posterior_file as serialization
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.problems import DataSource, Images, ProblemData, get_problem, load_problem
from laplace_debias.report.tables import print_table
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
        batch_size: Images a batch.
        seed: Seed of the choice of images, and of the split where the checkpoint holds none.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If the problem is unknown or a number out of range.
    """

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
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1")

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


@dataclass(frozen=True, kw_only=True)
class FittingSettings(NetworkSettings):
    """What is fitted.

    Attributes:
        output: The posterior, a `.safetensors` file.
        mode: What it is fitted to, as `Laplace.fit` takes it: `full`, all training images; `mini`,
            one batch of them; `debiased`, two; `crossfit`, one in folds.
        curvature: The posterior's structure, as `Laplace` takes it; so are the next five.
        params: Which parameters are Bayesian.
        fisher: How the curvature's columns are found.
        joint: Whether a layer's weight and bias make one block.
        sharing: How the positions of a convolution or a sequence share a weight.
        prior_precision: δ, before it is tuned.
        full_examples: How many training images, chosen at random, stand for all of them with
            `mode=full`; all if None.
        scale: Whether what few images tell is scaled by a forward pass over all of them; not with
            `mode=full`.
        overwrite: Whether an existing file is replaced.

    Raises:
        ValueError: If the problem is unknown, a number out of range, or an option is of another
            mode.
    """

    output: Path
    mode: Literal["full", "mini", "debiased", "crossfit"] = "full"
    curvature: Literal["kfac", "ekfac", "diag", "lowrank", "full"] = "kfac"
    params: Literal["all", "weights", "last_layer"] = "all"
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    joint: bool = False
    sharing: Literal["expand", "reduce"] = "expand"
    prior_precision: float = 1.0
    full_examples: int | None = None
    scale: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_examples is not None and self.full_examples < 1:
            raise ValueError(f"full_examples is {self.full_examples}; expected at least 1")
        if self.full_examples is not None and self.mode != "full":
            raise ValueError(
                f"full_examples is {self.full_examples} with mode={self.mode}; expected it with "
                "mode=full alone: the others see batches of batch_size"
            )
        if self.scale and self.mode == "full":
            raise ValueError("scale is true with mode=full, which sees all images: leave it out")


@dataclass(frozen=True, kw_only=True)
class TuningSettings(NetworkSettings):
    """How a posterior's prior precision is tuned.

    Attributes:
        posterior: The file of `laplace-debias fit`.
        output: Where the tuned posterior goes; back into its file if None.
        overwrite: Whether another existing file is replaced.
        method: `grid`, the best on validation images; `marglik`, the largest marginal likelihood.
        metric: What is best on the grid: `nll`, `ece`, `brier` or `accuracy`.
        prior_precisions: The grid; 21 values from 1e-4 to 1e4 if None.
        validation_examples: How many validation images, chosen at random; all if None.

    Raises:
        ValueError: If the problem is unknown, a number out of range, or an option is of the other
            method.
    """

    posterior: Path
    output: Path | None = None
    overwrite: bool = False
    method: Literal["grid", "marglik"] = "grid"
    metric: Literal["nll", "ece", "brier", "accuracy"] = "nll"
    prior_precisions: tuple[float, ...] | None = None
    validation_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_examples is not None and self.validation_examples < 1:
            raise ValueError(
                f"validation_examples is {self.validation_examples}; expected at least 1"
            )
        of_grid = (self.prior_precisions, self.validation_examples)
        if self.method == "marglik" and (of_grid != (None, None) or self.metric != "nll"):
            raise ValueError(
                "method=marglik needs no data: leave out metric, prior_precisions and "
                "validation_examples"
            )


def run_fit(settings: FittingSettings, console: Console | None = None) -> Laplace:
    """Fit a posterior to the training images and save it.

    Args:
        settings: What is fitted.
        console: Where to print; the standard output if None.

    Returns:
        The posterior.

    Raises:
        FileExistsError: If the file exists.
        ValueError: If data or checkpoint is missing, damaged or of another problem; as `Laplace`.
        OSError: If the file cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    output = settings.output
    check_target(output, make_folders=True)
    if output.exists() and not settings.overwrite:
        raise FileExistsError(f"{output} exists; choose another output, or --overwrite")
    output.parent.mkdir(parents=True, exist_ok=True)
    model, data = settings.load()
    la = Laplace(
        model,
        curvature=settings.curvature,
        params=settings.params,
        prior_precision=settings.prior_precision,
        fisher=settings.fisher,
        joint=settings.joint,
        sharing=settings.sharing,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    seen = _some(data.train, settings.full_examples, generator, "full_examples")
    batches = _Batches(data.train, seen, settings.batch_size)
    la.fit(
        *(batches, settings.mode, len(data.train), generator, settings.progress),
        scale=settings.scale,
    )
    la.save(output)
    console.print(
        f"{settings.curvature}, {settings.mode}: {len(la.mean):,} parameters in "
        f"{len(la.block_names)} blocks, N = {la.num_data:,}, prior precision "
        f"{settings.prior_precision:g}"
    )
    console.print(f"Posterior: {output}", soft_wrap=True)
    return la


def run_tune(settings: TuningSettings, console: Console | None = None) -> Tuning:
    """Tune a saved posterior's prior precision and save it again.

    Args:
        settings: Which, and how.
        console: Where to print; the standard output if None.

    Returns:
        What was tried and what was best.

    Raises:
        FileNotFoundError: If there is no such posterior.
        FileExistsError: If the output exists.
        ValueError: If data, checkpoint or posterior is missing, damaged or of another network; if
            the network seems to have been trained on the validation images; as `Laplace.tune`.
        OSError: If the file cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    if not settings.posterior.exists():
        raise FileNotFoundError(
            f"there is no posterior {settings.posterior}; make it with `laplace-debias fit`"
        )
    output = settings.output or settings.posterior
    check_target(output, make_folders=True)
    if settings.output is not None and output.exists() and not settings.overwrite:
        raise FileExistsError(f"{output} exists; choose another output, or --overwrite")
    # Data can take minutes: a damaged posterior is refused before it is read.
    serialization.load(settings.posterior)
    model, data = settings.load()
    la = Laplace.load(settings.posterior, model)
    if settings.method == "marglik":
        found = la.tune(method="marglik")
    else:
        generator = torch.Generator().manual_seed(settings.seed)
        seen = _some(data.val, settings.validation_examples, generator, "validation_examples")
        # As many test images: a prior precision tuned on images that the network was trained on
        # is far too sure.
        compared = torch.randperm(len(data.test), generator=generator)[: len(seen)]
        of_test, of_validation = (
            hits_of(model, images.subset(chosen), settings.batch_size, settings.progress)
            for images, chosen in ((data.test, compared), (data.val, seen))
        )
        check_held_out(of_test, of_validation)
        batches = _Batches(data.val, seen, settings.batch_size)
        found = la.tune(
            batches, settings.metric, settings.prior_precisions, progress=settings.progress
        )
        print_table(found.table, f"Validation images: {len(seen):,}", console=console)
        tried = [row["prior_precision"] for row in found.table]
        if len(tried) > 1 and found.prior_precision in (min(tried), max(tried)):
            console.print("The best is at the end of the grid: widen prior_precisions.")
    output.parent.mkdir(parents=True, exist_ok=True)
    la.save(output)
    name = found.metric.replace("_", " ")
    console.print(f"Prior precision {found.prior_precision:.4g}: {name} {found.value:.4f}")
    console.print(f"Posterior: {output}", soft_wrap=True)
    return found


class _Batches:
    """Batches of some images in a given order, any number of times."""

    def __init__(self, images: Images, order: Tensor, size: int) -> None:
        self._images = images
        self._parts = order.split(size)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._images.batch(part) for part in self._parts)


def _some(images: Images, number: int | None, generator: torch.Generator, name: str) -> Tensor:
    """Indices of so many images at random."""
    if number is not None and number > len(images):
        raise ValueError(f"{name} is {number}; there are {len(images)} images: lower it")
    return torch.randperm(len(images), generator=generator)[:number]
