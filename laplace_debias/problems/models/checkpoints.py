"""Weights of the test problems' networks, read strictly."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.problems.storage import read_tensors


def load_checkpoint(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """Load weights from a safetensors file into a model, strictly and in place.

    Every parameter and buffer of the model must be in the file with its shape; values are cast to
    the model's dtype and device. The model is unchanged where this raises.

    Args:
        model: The model that the weights belong to.
        path: A file as `save_checkpoint` writes it.

    Returns:
        The file's other entries on the CPU, e.g. `split.train` and `split.val`.

    Raises:
        ValueError: If the file is missing or damaged, or if its names or shapes are not the
            model's. An entry that the model lacks counts as a weight, not as an extra one, where
            the last part of its name (`weight`, `bias`, …) is that of one of the model's.
    """
    return load_state(model, read_tensors(path), str(path))


def load_state(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Load weights by name into a model, strictly and in place; see `load_checkpoint`.

    Args:
        model: The model that the weights belong to.
        tensors: The weights, and perhaps other entries.
        source: Where they come from, for messages.

    Returns:
        The other entries.

    Raises:
        ValueError: If the names or shapes are not the model's.
    """
    state = model.state_dict()
    missing = [name for name in state if name not in tensors]
    unknown = parameter_like(model, (name for name in tensors if name not in state))
    shapes = [
        f"{name}: {list(tensors[name].shape)} in the file, {list(value.shape)} in the model"
        for name, value in state.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if missing or unknown or shapes:
        found = "; ".join(
            f"{what}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
            for what, names in (
                ("missing from the file", missing),
                ("unknown to the model", unknown),
                ("of another shape", shapes),
            )
            if names
        )
        raise ValueError(
            f"{source} does not belong to this {type(model).__name__}: {found}; "
            "build the model that the checkpoint was saved from"
        )
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(tensors[name])
    return {name: tensor for name, tensor in tensors.items() if name not in state}


def parameter_like(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names that could be a parameter's or a buffer's of such a model.

    Args:
        model: The model.
        names: Names such as `16.weight` or `split.train`.

    Returns:
        The names whose last part is also the last part of one of the model's.
    """
    leaves = {name.rpartition(".")[2] for name in model.state_dict()}
    return [name for name in names if name.rpartition(".")[2] in leaves]
