"""Four posteriors of a trained All-CNN-C on CIFAR-10, compared: the README's picture."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from laplace_debias.experiments.posteriors.comparison import (
    ComparisonResult,
    ComparisonSettings,
    compare,
)
from laplace_debias.experiments.posteriors.comparison_report import report_comparison
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.held_out import check_held_out, hits_of
from laplace_debias.experiments.shared.setup import plain_console
from laplace_debias.problems import (
    ImageDataset,
    all_cnn_c,
    cifar10,
    load_checkpoint,
    random_split,
)
from laplace_debias.system.atomic import check_target
from laplace_debias.system.device import device_from

NUM_VALIDATION = 5000
"""How many of the 50,000 training images are held out by default."""


@dataclass(frozen=True, kw_only=True)
class ComparisonExperimentSettings:
    """Which network and data, and what is compared.

    Attributes:
        data: CIFAR-10: an image folder, an archive of one, or a torchvision root.
        checkpoint: The trained All-CNN-C, a safetensors file; it may hold `split.train` and
            `split.val`, indices into the training images in the order of the data it was trained
            on.
        output: Folder of the tables and pictures.
        cache: Folder for decoded images; see `problems.cifar10`.
        check_examples: How many test images the checkpoint is checked on first; all if None.
        min_accuracy: The least accuracy of the trained network that is accepted there.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        comparison: What is compared.
        progress: Whether to show progress bars.
    """

    data: Path
    checkpoint: Path
    output: Path = Path("results/comparison")
    cache: Path | None = None
    check_examples: int | None = None
    min_accuracy: float = 0.5
    device: str = "auto"
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    progress: bool = True

    def __post_init__(self) -> None:
        check_at_least(self, 1, "check_examples")


def run_comparison(
    settings: ComparisonExperimentSettings, console: Console | None = None
) -> ComparisonResult:
    """Load, check, compare, print tables and write pictures.

    Returns:
        What was measured.

    Raises:
        ValueError: If the data or the checkpoint is missing, damaged, or belongs to another
            network or other data; as `compare`.
        OSError: If the results cannot be written.
    """
    console = console or plain_console()
    check_target(settings.output / "sweep.csv", make_folders=True)
    settings.output.mkdir(parents=True, exist_ok=True)
    device = device_from(settings.device)
    model = all_cnn_c()
    extra = load_checkpoint(model, settings.checkpoint)
    model.eval().to(device)
    training = cifar10(settings.data, True, settings.cache, progress=settings.progress)
    test = cifar10(settings.data, False, settings.cache, progress=settings.progress)
    if "split.train" in extra and "split.val" in extra:
        split = extra["split.train"], extra["split.val"]
    else:
        split = random_split(len(training), NUM_VALIDATION, settings.comparison.seed)
        console.print(
            "The checkpoint holds no split: the validation images are a random choice, which the "
            "network may have been trained on."
        )
    train, validation = (training.subset(indices) for indices in split)
    _check_network(model, test, validation, settings, console)
    result = compare(model, train, validation, test, settings.comparison, settings.progress)
    report_comparison(result, settings.output, console)
    return result


def _check_network(
    model: nn.Module,
    test: ImageDataset,
    validation: ImageDataset,
    settings: ComparisonExperimentSettings,
    console: Console,
) -> None:
    """Refuse a network that knows too little, or was trained on the validation images."""
    checked, held_out = (
        hits_of(
            model,
            _every_kth(data, settings.check_examples),
            settings.comparison.eval_batch_size,
            settings.progress,
        )
        for data in (test, validation)
    )
    accuracy = checked.mean().item()
    console.print(f"Test accuracy of the trained network, {len(checked):,} images: {accuracy:.4f}")
    if accuracy < settings.min_accuracy:
        raise ValueError(
            f"the network's test accuracy is {accuracy:.3f}; expected at least "
            f"{settings.min_accuracy}: check that checkpoint and data belong together, or lower "
            "min_accuracy"
        )
    check_held_out(checked, held_out)


def _every_kth(data: ImageDataset, number: int | None) -> ImageDataset:
    # Images come class by class, so every k-th one is taken.
    if number is None or number >= len(data):
        return data
    return data.subset(torch.arange(number) * len(data) // number)


COMPARISON = Experiment(
    name="comparison",
    figure="Figure 6",
    help="Posteriors of All-CNN-C from few examples, and from all, at a tuned prior precision.",
    settings=ComparisonExperimentSettings,
    run=run_comparison,
)
