"""Training of the test problems, one loop for all of them."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.network.weight_decay import decay_groups
from laplace_debias.problems.images import Images
from laplace_debias.problems.models.checkpoints import parameter_like
from laplace_debias.problems.recipe import Recipe
from laplace_debias.problems.resume import restore_state, store_state
from laplace_debias.problems.storage import write_tensors


def train(
    model: nn.Module,
    dataset: Images,
    recipe: Recipe,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    on_epoch: Callable[[int, nn.Module], None] | None = None,
    state: str | Path | None = None,
) -> list[dict[str, float]]:
    """Train a model in place on the mean cross-entropy; leave it in evaluation mode.

    Every epoch visits each example once, in random order; its last batch may be smaller. Frozen
    parameters (`requires_grad=False`) stay as they are.

    Args:
        model: A network from images [B, C, H, W] to logits [B, classes].
        dataset: Images to train on.
        recipe: How to train.
        generator: CPU generator of the order and of the flips; torch's global one by default. The
            initialisation is the model's own.
        device: Where to train; the model is moved there and stays. Where it is, by default.
        progress: Whether to show a progress bar.
        on_epoch: Called after each epoch with its number and the model, e.g. to save a checkpoint.
        state: A `.safetensors` file that holds all that is needed to continue. It is written after
            every epoch. Where the file exists, training continues after its epoch as if it had not
            been interrupted (except for dropout's random numbers).

    Returns:
        For each epoch its number (`epoch`, from 1), the mean training loss (`loss`, nats per
        example) and accuracy (`accuracy`, 0 … 1) as of the time of each batch, and the last
        `learning_rate`.

    Raises:
        ValueError: If the data set is empty, the model has nothing to train, or the state is
            damaged or belongs to another training.
        FloatingPointError: If the loss becomes infinite or not a number.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters; set requires_grad=True for some"
        )
    if len(dataset) == 0:
        raise ValueError("the data set is empty; expected at least one image")
    device = torch.device(device) if device is not None else parameters[0].device
    model.to(device)
    data: Images = dataset
    if recipe.flips or recipe.crops:
        data = dataset.augmented(recipe.flips, recipe.crops, generator)
    optimizer = _optimizer(parameters, recipe)
    steps_per_epoch = math.ceil(len(data) / recipe.batch_size)
    history: list[dict[str, float]] = []
    described = f"{recipe} of {len(data)} images"
    if state is not None and Path(state).exists():
        history = restore_state(state, model, optimizer, generator, described)
    done = len(history)
    rates = islice(recipe.rates(steps_per_epoch), done * steps_per_epoch, None)
    bar = tqdm(
        total=recipe.num_epochs, initial=done, desc="training", unit="epoch", disable=not progress
    )
    with bar:
        for epoch in range(done + 1, recipe.num_epochs + 1):
            model.train()
            totals = torch.zeros(2, device=device)
            for indices in torch.randperm(len(data), generator=generator).split(recipe.batch_size):
                images, labels = (t.to(device, non_blocking=True) for t in data.batch(indices))
                rate = next(rates)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                totals += _step(model, parameters, optimizer, recipe, images, labels)
            loss, accuracy = (totals / len(data)).tolist()
            if not math.isfinite(loss):
                model.eval()
                raise FloatingPointError(
                    f"the loss is {loss} in epoch {epoch}; lower the learning rate or clip_norm"
                )
            history.append(
                {"epoch": epoch, "loss": loss, "accuracy": accuracy, "learning_rate": rate}
            )
            if on_epoch is not None:
                on_epoch(epoch, model)
            if state is not None:
                store_state(state, model, optimizer, generator, described, history)
            bar.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}")
            bar.update()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return history


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    groups = decay_groups(parameters, recipe.weight_decay)
    if recipe.optimizer == "nadamw":
        return torch.optim.NAdam(
            groups, betas=(recipe.momentum, 0.999), decoupled_weight_decay=True
        )
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, betas=(recipe.momentum, 0.999))
    return torch.optim.SGD(groups, lr=1.0, momentum=recipe.momentum, nesterov=recipe.nesterov)


def _step(
    model: nn.Module,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """One step; returns the batch's summed loss and number of hits, on the device."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.bfloat16):
        logits = model(images)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
    optimizer.step()
    hits = (logits.detach().argmax(1) == labels).sum()
    return torch.stack([loss.detach() * len(labels), hits.to(loss.dtype)])


def save_checkpoint(
    model: nn.Module, path: str | Path, extra: dict[str, Tensor] | None = None
) -> None:
    """Write a model's parameters and buffers to a safetensors file, whole or not at all.

    Args:
        model: The model.
        path: The file, which `load_checkpoint` reads.
        extra: More tensors to keep with them, e.g. `split.train` and `split.val`.

    Raises:
        ValueError: If the name of an extra tensor could be a parameter's (see `load_checkpoint`),
            or the file cannot be written.
    """
    extra = extra or {}
    taken = parameter_like(model, extra)
    if taken:
        raise ValueError(
            f"extra tensors {taken} could be parameters of {type(model).__name__}; "
            "give them names with other endings"
        )
    write_tensors(path, {**model.state_dict(), **extra})
