"""Load trained weights from files in several formats."""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from laplace_debias.system.shown import counted, first_names

_PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".tar")
_NESTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """Copy a network, and load the weights of another checkpoint into the copy."""
    copied = copy.deepcopy(model)
    load_weights(copied, path)
    return copied


def load_weights(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Load a checkpoint into a model, strictly and in place.

    The state dict may be nested in the file as an entry such as `state_dict` or `model`. Prefixes
    that wrappers add (`module.`, `_orig_mod.`, `model.`) are removed if all names of the state dict
    have them and the names of the model do not.

    Returns:
        The entries of the checkpoint whose names begin with `split.`, which are not weights. They
        record how the data was split for training.
    """
    if path.is_dir():
        raise ValueError(
            f"The checkpoint {path} is a folder. Pass the file with the weights, such as "
            f"{path / 'model.safetensors'}."
        )
    if not path.is_file():
        raise ValueError(f"The checkpoint {path} does not exist. Check the path.")
    if path.suffix == ".safetensors":
        try:
            tensors: Mapping[str, Tensor] = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is damaged, or is not a safetensors file ({error}). Download or write "
                "it again."
            ) from error
    elif path.suffix in _PICKLED:
        tensors = _find_state_dict(_load_pickle(path), path)
    else:
        raise ValueError(
            f"The checkpoint {path} ends with {path.suffix or 'nothing'}. Use a file that ends "
            f"with .safetensors, {', '.join(_PICKLED)}."
        )
    names = list(model.state_dict())
    tensors = _without_prefixes(tensors, names)
    if names and not any(name in tensors for name in names):
        raise ValueError(
            f"{path} belongs to a different network. None of its {_beginning(list(tensors))} is "
            f"among the {_beginning(names)} in {type(model).__name__}. Use the network that it was "
            "saved from, and pass the network's arguments as --model_args.KEY=VALUE."
        )
    split = {name: tensor for name, tensor in tensors.items() if name.startswith("split.")}
    try:
        model.load_state_dict({k: v for k, v in tensors.items() if k not in split})
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not match this {type(model).__name__} "
            f"({' '.join(str(error).split())[:600]}). Use the model that it was saved from."
        ) from error
    return split


def _beginning(names: Sequence[str]) -> str:
    """Format the number of names and the first three, as in `4 names (a, b, c, …)`."""
    return f"{counted(len(names), 'name')} ({first_names(names)})"


def _load_pickle(path: Path) -> Any:
    """Load a file that `torch.save` wrote, without running any code in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # Catch every exception, because torch's reader may raise errors of any type if the file is not
    # a pickle.
    except Exception as error:
        # Torch's message names the object that it refuses to unpickle. Any other error means that
        # the file cannot be read.
        if re.search("Unsupported (global|class)|GLOBAL", str(error)):
            raise ValueError(
                f"{path} contains pickled Python objects, which could run code, so it is not "
                "loaded. Save only the weights: torch.save(model.state_dict(), PATH)."
            ) from error
        raise ValueError(
            f"{path} is damaged, or was not written by torch.save. Download or write it again."
        ) from error


def _find_state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Find the state dict in the content of a file."""
    while isinstance(content, Mapping):
        tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)}
        nested = [k for k in _NESTS if isinstance(content.get(k), Mapping)]
        if nested:
            content = content[nested[0]]
        elif tensors:
            return tensors
        else:
            break
    keys = type(content).__name__
    if isinstance(content, Mapping):
        keys = ", ".join(map(str, content))
    raise ValueError(
        f"{path} contains {keys[:200]} instead of a state dict. Save one with "
        "torch.save(model.state_dict(), PATH)."
    )


def _without_prefixes(tensors: Mapping[str, Tensor], names: list[str]) -> Mapping[str, Tensor]:
    """Remove a wrapper's prefix if all names have it and the network's own names do not."""
    common = next(
        (
            prefix
            for prefix in _PREFIXES
            if tensors
            and all(name.startswith(prefix) for name in tensors if not name.startswith("split."))
            and not any(name.startswith(prefix) for name in names)
        ),
        None,
    )
    if common is None:
        return tensors
    return _without_prefixes({k.removeprefix(common): v for k, v in tensors.items()}, names)
