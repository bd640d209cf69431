"""The device of a run."""

import socket
from typing import Any

import torch

from laplace_debias.system.ranks import current


def device_from(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one, for each of several processes.

    Raises:
        ValueError: If there is no such device; if several processes would use one GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {name!r} ({reason}); expected 'cpu' or 'cuda'") from error
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        _refuse_shared(current().exchange([socket.gethostname(), index]))
    return device


def _refuse_shared(places: list[list[Any]]) -> None:
    """Refuse two processes on one GPU, which its collectives do not allow.

    Args:
        places: The machine and the GPU's number of each process.
    """
    for rank, place in enumerate(places):
        if (other := places.index(place)) < rank:
            raise ValueError(
                f"ranks {other} and {rank} would both use GPU {place[1]} of {place[0]}: start no "
                "more processes on a machine than it has GPUs and give --device=cuda, or give "
                "--device=cpu"
            )
