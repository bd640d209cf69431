"""The real run: All-CNN-C on CIFAR-10, four posteriors compared on test images."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.experiments.posteriors.comparison import (
    ComparisonResult,
    ComparisonSettings,
    compare,
)
from laplace_debias.experiments.posteriors.comparison_report import (
    findings,
    print_comparison,
    write_comparison,
)
from laplace_debias.problems import (
    ImageDataset,
    Images,
    all_cnn_c,
    cifar10,
    load_checkpoint,
    random_split,
)

NUM_VALIDATION = 5000
"""How many of the 50,000 training images are held out by default."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is evaluated.

    Attributes:
        data: CIFAR-10: an image folder, an archive of one, or a torchvision root.
        checkpoint: The trained All-CNN-C, a safetensors file; it may hold `split.train` and
            `split.val`, indices into the training images in the order of the data it was trained
            on.
        output: Folder of the tables and pictures.
        cache: Folder for decoded images; see `problems.cifar10`.
        check_examples: How many test images the checkpoint is checked on first; all if None.
        min_accuracy: The accuracy of the trained network that is the least expected there.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        comparison: What is compared.
        progress: Whether to show progress bars.
    """

    data: Path
    checkpoint: Path
    output: Path = Path("results/allcnnc_cifar10")
    cache: Path | None = None
    check_examples: int | None = None
    min_accuracy: float = 0.5
    device: str = "auto"
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    progress: bool = True

    def __post_init__(self) -> None:
        if self.check_examples is not None and self.check_examples < 1:
            raise ValueError(f"check_examples is {self.check_examples}; expected at least 1")


def run_evaluation(
    settings: EvaluationSettings, console: Console | None = None
) -> ComparisonResult:
    """Load, check, compare, print tables and write pictures.

    Args:
        settings: What to evaluate.
        console: Where to print; the standard output if None.

    Returns:
        What was measured.

    Raises:
        ValueError: If the data or the checkpoint is missing, damaged, or belongs to another
            network or other data; as `compare`.
        OSError: If the results cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
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
    batch_size = settings.comparison.eval_batch_size
    checked, held_out = (
        hits_of(model, _first(data, settings.check_examples), batch_size, settings.progress)
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
    result = compare(model, train, validation, test, settings.comparison, settings.progress)
    print_comparison(result, console)
    pictures = write_comparison(result, settings.output)
    for sentence in findings(result):
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return result


def device_from(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one.

    Raises:
        ValueError: If there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {name!r} ({reason}); expected 'cpu' or 'cuda'") from error
    return device


@torch.no_grad()
def hits_of(model: nn.Module, data: Images, batch_size: int, progress: bool = False) -> Tensor:
    """Whether the network's first choice is the label, float64 [N] of zeros and ones.

    Args:
        model: The network, in evaluation mode.
        data: The images.
        batch_size: Images a batch.
        progress: Whether to show a progress bar.
    """
    device = next(model.parameters()).device
    hits = []
    batches = torch.arange(len(data)).split(batch_size)
    for indices in tqdm(batches, desc="checking", unit="batch", leave=False, disable=not progress):
        images, labels = data.batch(indices)
        hits.append(model(images.to(device)).argmax(1).cpu() == labels)
    return torch.cat(hits).double()


def check_held_out(test: Tensor, validation: Tensor) -> None:
    """Refuse validation images that were trained on.

    Args:
        test: Hits of the network on test images, float64 [N] of zeros and ones.
        validation: Its hits on validation images, [M].

    Raises:
        ValueError: If the latter are more by five standard errors.
    """
    both = torch.cat([test, validation]).mean().item()
    error = math.sqrt(both * (1 - both) * (1 / len(test) + 1 / len(validation)))
    excess = validation.mean().item() - test.mean().item()
    if excess > 5 * error:
        raise ValueError(
            f"the network's accuracy on the validation images is {validation.mean():.3f}, on test "
            f"images {test.mean():.3f}: it seems to have been trained on the former. Give the "
            "data in the order (image folder or torchvision) that the checkpoint's split is for; "
            "to a checkpoint without one, the seed that the network was trained with"
        )


def _first(data: ImageDataset, number: int | None) -> ImageDataset:
    # Images come class by class, so that every k-th is taken.
    if number is None or number >= len(data):
        return data
    return data.subset(torch.arange(number) * len(data) // number)
