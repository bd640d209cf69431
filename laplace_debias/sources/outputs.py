"""Whether a network and data belong together: one batch, before any work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.sources.imports import described
from laplace_debias.sources.loaded import Task
from laplace_debias.sources.parts import Parts


@torch.no_grad()
def task_of_outputs(model: nn.Module, batch: Any, parts: Parts, given: Task | None) -> Task:
    """What the outputs mean, after a check that they fit the data.

    Args:
        model: The network, in evaluation mode.
        batch: The first batch of training examples, on the CPU.
        parts: What the data says.
        given: What the user says; None to find it.

    Raises:
        ValueError: If the network cannot take the inputs, its outputs do not fit the targets, or
            neither data nor user says what they mean.
    """
    task = given or parts.task
    if not isinstance(batch, Sequence) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        # Dicts of a collator: `Laplace` reads and checks them.
        if task is None:
            raise ValueError("what the outputs mean is not known: give --task")
        return task
    x, y = batch
    outputs = _outputs(model, x[:2])
    if task is None:
        task = _task_of_labels(y, outputs)
    if outputs is None or outputs.ndim < 2:
        return task
    found = outputs.shape[-1] if outputs.ndim == 2 else outputs.shape[1]
    expected = parts.num_outputs
    if task == "classification" and expected == 2 and found == 1 and given is None:
        return "binary"
    if task == "binary":
        expected = 1
    if expected is not None and outputs.ndim == 2 and found != expected:
        what = {"classification": "classes", "multilabel": "labels"}.get(task, "targets")
        raise ValueError(
            f"the network gives {found} outputs, the data has {expected} {what}: give the network "
            "that was trained on this data, or make it with as many (--model_args.KEY=VALUE)"
        )
    return task


def _outputs(model: nn.Module, x: Tensor) -> Tensor | None:
    first = next(iter(model.parameters()), None)
    device = torch.device("cpu") if first is None else first.device
    try:
        found = model(x.to(device))
    except Exception as error:
        raise ValueError(
            f"the network cannot take inputs of shape {list(x.shape)} and dtype {x.dtype}: "
            f"{described(error)}; for images, give the --image_size that it was trained with, and "
            "as many numbers in --mean as it has channels"
        ) from error
    return found if isinstance(found, Tensor) else getattr(found, "logits", None)


def _task_of_labels(y: Tensor, outputs: Tensor | None) -> Task:
    if y.is_floating_point():
        return "regression"
    if y.ndim == 1:
        return "binary" if outputs is not None and outputs.shape[-1] == 1 else "classification"
    if y.ndim == 2 and outputs is not None and y.shape == outputs.shape:
        return "multilabel"
    raise ValueError(
        f"what the outputs mean is not known from targets of shape {list(y.shape)} and dtype "
        f"{y.dtype}: give --task"
    )


def check_labels(parts: Parts, task: Task) -> None:
    """Refuse labels of data in memory that are not classes of the data; others a fit refuses.

    Raises:
        ValueError: If a label is out of range.
    """
    if task != "binary":
        return
    for name in ("train", "validation", "test"):
        targets = getattr(getattr(parts, name), "targets", None)
        if isinstance(targets, Tensor) and len(targets) and int(targets.max()) > 1:
            raise ValueError(
                f"the {name} labels go up to {int(targets.max())}, but the network has one output: "
                "expected 0 or 1"
            )
