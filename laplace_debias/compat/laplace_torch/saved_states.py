"""Saved states, which contain the options of an object and its posterior file as a tensor."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.laplace.laplace import Laplace as Posterior
from laplace_debias.system.ranks import alone

FILE = "laplace_debias"
"""The key of the posterior file in a state."""
PRECISIONS = "prior_precision"
"""The key of the prior precisions in a state, if there is one per parameter."""


def file_of_posterior(posterior: Posterior) -> UInt8[Tensor, " bytes"]:
    """Save a posterior, and return the bytes of the file.

    If several processes have fitted the posterior, any of them can call this function.
    """
    with tempfile.TemporaryDirectory() as folder, alone():
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        content = bytearray(path.read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8)


def posterior_of_file(
    content: UInt8[Tensor, " bytes"], model: nn.Module, batch: BatchHook | None
) -> Posterior:
    """Load a posterior for the fitted model from the bytes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        path.write_bytes(content.cpu().numpy().tobytes())
        return Posterior.load(path, model, batch=batch)


def check_state(state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Require that a state has the same options as the object that loads it.

    Raises:
        ValueError: If the state has no posterior file, or different options.
    """
    if FILE not in state:
        raise ValueError(
            f"The state has the entries {sorted(state)}. Pass the result of `state_dict` "
            "of this class. A state of laplace-torch cannot be loaded."
        )
    for name, value in options.items():
        # States of earlier versions do not contain the name of the last layer.
        is_known = name in state or name != "last_layer_name"
        if is_known and state.get(name) != value:
            raise ValueError(
                f"The state has `{name}={state.get(name)!r}`, but this object has "
                f"{value!r}. Pass the same value to the constructor."
            )
