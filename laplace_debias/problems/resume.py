"""The state of a training that may be interrupted, in one safetensors file."""

from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.problems.models.checkpoints import load_state
from laplace_debias.problems.storage import read_tensors, write_tensors

_COLUMNS = ("epoch", "loss", "accuracy", "learning_rate")


def store_state(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | None,
    described: str,
    history: list[dict[str, float]],
) -> None:
    """Write all that the rest of a training depends on, whole or not at all.

    Args:
        path: The file.
        model: The model.
        optimizer: Its optimiser.
        generator: Source of the order; torch's global one where None.
        described: Description of the training, which `restore_state` compares.
        history: The result of `train` up to now.

    Raises:
        ValueError: If the file cannot be written.
    """
    rows = [[row[column] for column in _COLUMNS] for row in history]
    tensors = {
        "described": torch.tensor(list(described.encode()), dtype=torch.uint8),
        "history": torch.tensor(rows, dtype=torch.float64),
        "generator": (generator or torch.default_generator).get_state(),
        **{f"model.{name}": value for name, value in model.state_dict().items()},
    }
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
    write_tensors(path, tensors)


def restore_state(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | None,
    described: str,
) -> list[dict[str, float]]:
    """Put model, optimiser and generator into the state that was stored.

    Args:
        path: The file.
        model: The model, in place.
        optimizer: Its optimiser, in place.
        generator: Source of the order, in place; torch's global one where None.
        described: Description of the training.

    Returns:
        The history up to that point.

    Raises:
        ValueError: If the file is damaged or the state belongs to another training.
    """
    tensors = read_tensors(path)
    found = bytes(tensors.get("described", torch.empty(0, dtype=torch.uint8)).tolist()).decode()
    if found != described:
        raise ValueError(
            f"{path} is the state of another training ({found or 'not described'}); this one is "
            f"{described}: continue with the earlier settings, or remove the file"
        )
    weights = {
        name.removeprefix("model."): value
        for name, value in tensors.items()
        if name.startswith("model.")
    }
    load_state(model, weights, str(path))
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".", 2)
            slots.setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict(
        {"state": slots, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    (generator or torch.default_generator).set_state(tensors["generator"])
    return [dict(zip(_COLUMNS, row, strict=True)) for row in tensors["history"].tolist()]
