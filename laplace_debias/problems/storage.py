"""Named tensors in safetensors files: read with clear errors, written atomically."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from laplace_debias.system.atomic import written_atomically


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file; nothing is ever unpickled.

    Args:
        path: The file.

    Returns:
        Tensors on the CPU, by name.

    Raises:
        ValueError: If the file is missing or is not an intact safetensors file.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file at {path}; expected a .safetensors file: check the path")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or not a safetensors file ({error}); "
            "fetch or write it again (pickled checkpoints are not read)"
        ) from error


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file, whole or not at all.

    The file is written beside its place and moved there, so a reader never sees half of it; see
    `atomic`.

    Args:
        path: The file; missing folders are made, an existing file is replaced.
        tensors: Tensors by name, of any shape, dtype and device.

    Raises:
        ValueError: If the folder cannot be made or written to.
    """
    try:
        # Copies, because safetensors refuses tensors that share memory.
        data = save(
            {
                k: v.detach().cpu().clone(memory_format=torch.contiguous_format)
                for k, v in tensors.items()
            }
        )
        with written_atomically(path) as temporary:
            temporary.write_bytes(data)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot write {path} ({error}); name a writable place") from error
