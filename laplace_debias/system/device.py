"""The device of a run."""

import torch


def device_from(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one.

    Raises:
        ValueError: If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {name!r} ({reason}); expected 'cpu' or 'cuda'") from error
    return device
