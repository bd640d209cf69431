"""Training All-CNN-C on CIFAR-10 to a checkpoint that `evaluation` reads."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from laplace_debias import metrics
from laplace_debias.experiments.evaluation import NUM_VALIDATION, device_from, random_split
from laplace_debias.problems import (
    ALLCNNC_CIFAR10_RECIPE,
    ImageDataset,
    Recipe,
    all_cnn_c,
    cifar10,
    save_checkpoint,
    train,
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a checkpoint is made.

    Attributes:
        data: CIFAR-10: an image folder, an archive of one, or a torchvision root.
        output: The checkpoint, a `.safetensors` file.
        download: Whether CIFAR-10 may be downloaded to `data` where nothing is there.
        cache: Folder for decoded images; see `problems.cifar10`.
        validation_examples: How many of the training images are held out.
        recipe: How to train.
        seed: Seed of the split, the initialisation, the order and the flips.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        overwrite: Whether an existing checkpoint is replaced.
        progress: Whether to show progress bars.
    """

    data: Path
    output: Path
    download: bool = False
    cache: Path | None = None
    validation_examples: int = NUM_VALIDATION
    recipe: Recipe = field(default_factory=lambda: ALLCNNC_CIFAR10_RECIPE)
    seed: int = 0
    device: str = "auto"
    overwrite: bool = False
    progress: bool = True


def run_training(settings: TrainingSettings, console: Console | None = None) -> dict[str, float]:
    """Train, measure on test images and save the checkpoint with its split.

    Args:
        settings: How.
        console: Where to print; the standard output if None.

    Returns:
        Accuracy, NLL (nats), ECE and Brier score on the test images.

    Raises:
        ValueError: If the data is missing or damaged, or too small for the split.
        FileExistsError: If there is a checkpoint already.
        ConnectionError: If the download fails.
        FloatingPointError: If training diverges.
        OSError: If the checkpoint cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    if settings.output.exists() and not settings.overwrite:
        raise FileExistsError(f"{settings.output} exists; choose another output, or --overwrite")
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    device = device_from(settings.device)
    training, test = (
        cifar10(settings.data, part, settings.cache, settings.download, settings.progress)
        for part in (True, False)
    )
    kept, held_out = random_split(len(training), settings.validation_examples, settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = all_cnn_c(len(training.classes))
    train(
        model,
        training.subset(kept),
        settings.recipe,
        generator=torch.Generator().manual_seed(settings.seed),
        device=device,
        progress=settings.progress,
    )
    save_checkpoint(model, settings.output, {"split.train": kept, "split.val": held_out})
    found = _evaluate(model, test)
    console.print(
        f"Test images: accuracy {found['accuracy']:.4f}, NLL {found['nll']:.4f}, "
        f"ECE {found['ece']:.4f}, Brier {found['brier']:.4f}"
    )
    console.print(f"Checkpoint: {settings.output}", soft_wrap=True)
    return found


@torch.no_grad()
def _evaluate(model: torch.nn.Module, data: ImageDataset) -> dict[str, float]:
    device = next(model.parameters()).device
    batches = (data.batch(indices) for indices in torch.arange(len(data)).split(500))
    probs = torch.cat([model(images.to(device)).softmax(1).cpu() for images, _ in batches])
    return metrics.evaluate(probs, data.labels)
