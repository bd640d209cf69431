"""`laplace-debias demo`: four posteriors of a small network on corrupted digits, compared."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from laplace_debias.experiments.posteriors.comparison import (
    ComparisonResult,
    ComparisonSettings,
    compare,
)
from laplace_debias.experiments.posteriors.comparison_report import report_comparison
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.setup import plain_console
from laplace_debias.problems import ImageDataset, Recipe, corrupt, digits, train, wide_digits_net
from laplace_debias.system.atomic import check_target


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the demo trains and compares.

    Attributes:
        train_examples: How many of the 1,000 training images are used.
        image_severity: Severity at which all images are corrupted from the start, which makes the
            digits hard enough for an over-confident network; 0 for clean ones. The severities of
            the comparison are applied in addition.
        width: Channels of the network's first convolution.
        recipe: How it is trained.
        comparison: What is compared.
        output: Folder of the tables and pictures.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a number is out of range.
    """

    train_examples: int = 1000
    image_severity: int = 5
    width: int = 24
    recipe: Recipe = field(
        default_factory=lambda: Recipe(batch_size=50, cycles=((10, 0.05),), clip_norm=5.0)
    )
    comparison: ComparisonSettings = field(
        default_factory=lambda: ComparisonSettings(
            batch_size=16,
            draws=5,
            prior_precisions=(0.001, 0.00562, 0.0316, 0.178, 1.0, 5.62, 31.6, 178.0, 1000.0),
            validation_examples=200,
            ood_examples=250,
        )
    )
    output: Path = Path("results/demo")
    progress: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.train_examples <= 1000:
            raise ValueError(f"train_examples is {self.train_examples}; expected 1 … 1000")
        if not 0 <= self.image_severity <= 5:
            raise ValueError(f"image_severity is {self.image_severity}; expected 0 … 5")
        check_at_least(self, 1, "width")


def run(settings: Settings, console: Console | None = None) -> ComparisonResult:
    """Train, compare, print tables and write pictures.

    Returns:
        What was measured.

    Raises:
        ValueError: As `compare`.
        ImportError: If scikit-learn or Pillow is missing.
        OSError: If the results cannot be written.
    """
    console = console or plain_console()
    check_target(settings.output / "sweep.csv", make_folders=True)
    settings.output.mkdir(parents=True, exist_ok=True)
    split = digits(settings.comparison.seed)
    training = split.train.subset(range(settings.train_examples))
    training, validation, test = (
        _hard(data, settings, offset)
        for data, offset in ((training, 0), (split.val, 1000), (split.test, 2000))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.comparison.seed)
        model = wide_digits_net(settings.width)
    history = train(
        model,
        training,
        settings.recipe,
        generator=torch.Generator().manual_seed(settings.comparison.seed),
        progress=settings.progress,
    )
    console.print(
        f"Trained {sum(p.numel() for p in model.parameters()):,} parameters on {len(training):,} "
        f"handwritten digits, corrupted at severity {settings.image_severity}: training accuracy "
        f"{history[-1]['accuracy']:.3f}."
    )
    result = compare(model, training, validation, test, settings.comparison, settings.progress)
    report_comparison(result, settings.output, console)
    return result


def _hard(data: ImageDataset, settings: Settings, offset: int) -> ImageDataset:
    """The images corrupted from the start, each by its own random numbers."""
    if settings.image_severity == 0:
        return data
    return data.with_images(
        corrupt(data.images, settings.image_severity, seed=settings.comparison.seed, offset=offset)
    )
