"""`laplace-debias train`: train a test problem's network to checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from laplace_debias import metrics
from laplace_debias.commands.network import check_output
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.settings import TrainingSettings
from laplace_debias.problems import (
    ImageBatches,
    Images,
    get_problem,
    log_epochs,
    save_checkpoint,
    train,
)
from laplace_debias.report.tables import write_csv
from laplace_debias.system.console import Lines, Printer
from laplace_debias.system.device import device_from


@dataclass(frozen=True, kw_only=True)
class Settings(TrainingSettings):
    """How checkpoints are made.

    Attributes:
        output: The checkpoint, a `.safetensors` file. Beside it come `<name>.history.csv`, the
            folder `<name>.checkpoints` and, while it runs, `<name>.state.safetensors`.
        validation_examples: How many images are held out; the problem's own number if None.
        checkpoints: How many checkpoints are kept, at log-equidistant epochs; the problem's own
            number if None.
        overwrite: Whether an existing checkpoint, or the state of an interrupted training, is
            replaced.
    """

    output: Path
    validation_examples: int | None = None
    checkpoints: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "checkpoints")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite are both given; expected one of them")


def run(settings: Settings, console: Printer | None = None) -> dict[str, float]:
    """Train, measure on test images and save the checkpoints with their split.

    Returns:
        Accuracy, NLL (nats), ECE and Brier score on the test images.

    Raises:
        ValueError: If the data is missing, damaged or too small for the split, or the state belongs
            to another training.
        FileExistsError: If there is a checkpoint, or the state of an interrupted training, already.
        ConnectionError: If the download fails.
        FloatingPointError: If training diverges.
        OSError: If a file cannot be written.
    """
    console = console or Lines()
    output = settings.output
    check_output(output, settings.overwrite)
    state = output.with_name(f"{output.stem}.state.safetensors")
    if state.exists() and not settings.resume:
        if not settings.overwrite:
            raise FileExistsError(
                f"{state} is the state of an interrupted training; give --resume, or --overwrite"
            )
        state.unlink()
    output.parent.mkdir(parents=True, exist_ok=True)
    device = device_from(settings.device)
    problem = get_problem(settings.problem)
    recipe = settings.recipe.applied_to(problem.recipe)
    data = problem.data(
        settings.source, num_validation=settings.validation_examples, seed=settings.seed
    )
    split = {"split.train": data.train_indices, "split.val": data.val_indices}
    number = problem.num_checkpoints if settings.checkpoints is None else settings.checkpoints
    kept = log_epochs(recipe.num_epochs, number)

    def keep(epoch: int, model: nn.Module) -> None:
        if epoch in kept:
            folder = output.with_name(f"{output.stem}.checkpoints")
            save_checkpoint(model, folder / f"epoch-{epoch:04d}.safetensors", split)

    model = problem.initial_model(settings.seed)
    history = train(
        model,
        data.train,
        recipe,
        generator=torch.Generator().manual_seed(settings.seed),
        device=device,
        progress=settings.progress,
        on_epoch=keep,
        state=state,
    )
    save_checkpoint(model, output, split)
    write_csv(history, output.with_name(f"{output.stem}.history.csv"))
    state.unlink(missing_ok=True)
    found = _evaluate(model, data.test)
    console.print(
        f"Test images: accuracy {found['accuracy']:.4f}, NLL {found['nll']:.4f}, "
        f"ECE {found['ece']:.4f}, Brier {found['brier']:.4f}"
    )
    console.print(f"Checkpoint: {output}", soft_wrap=True)
    return found


@torch.no_grad()
def _evaluate(model: nn.Module, data: Images) -> dict[str, float]:
    device = next(model.parameters()).device
    batches = ImageBatches(data, torch.arange(len(data)), 500)
    probs = torch.cat([model(images.to(device)).softmax(1).cpu() for images, _ in batches])
    return dict(metrics.evaluate(probs, data.labels, intervals=False))
