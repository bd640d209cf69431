"""From Python's indices to rows and columns."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_everything(index: Any) -> bool:
    """Whether the index is `:`."""
    return isinstance(index, slice) and index == slice(None)


def as_integer(index: Any, size: int) -> int | None:
    """The index as a number from 0 on, None if it is not a single integer.

    Raises:
        IndexError: If it is out of range.
    """
    if isinstance(index, Tensor | np.ndarray) and index.ndim == 0:
        index = index.item()
    if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
        return None
    if not -size <= index < size:
        raise IndexError(f"Index {index} is out of range for size {size}.")
    return int(index) % size


def as_indices(index: Any, size: int, device: torch.device) -> Tensor:
    """A slice, range, list, tensor or array as numbers from 0 on.

    Raises:
        IndexError: If a number is out of range, or booleans are too many or too few.
        TypeError: If it is something else.
    """
    if isinstance(index, slice):
        index = range(size)[index]
    if isinstance(index, range):
        # Its ends are its extremes.
        if len(index) and not (-size <= index[0] < size and -size <= index[-1] < size):
            raise IndexError(f"{index} goes out of range for size {size}.")
        if len(index) == 0:
            return torch.zeros(0, dtype=torch.long, device=device)
        return torch.arange(index.start, index.stop, index.step, device=device) % size
    if not isinstance(index, list | Tensor | np.ndarray):
        raise TypeError(
            f"Rows and columns are chosen by an integer, a slice, a list, tensor or array of "
            f"integers or booleans, or a parameter's name, got {type(index).__name__}."
        )
    indices = torch.as_tensor(index, device=device)
    if indices.ndim != 1:
        raise IndexError(f"Indices must be one list, got shape {tuple(indices.shape)}.")
    if indices.dtype == torch.bool:
        if len(indices) != size:
            raise IndexError(f"{len(indices)} booleans do not fit size {size}.")
        return indices.nonzero()[:, 0]
    if len(indices) == 0:
        return indices.long()
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"Indices must be integers or booleans, got {indices.dtype}.")
    if bool((indices < -size).any() | (indices >= size).any()):
        raise IndexError(f"An index of {indices.tolist()} is out of range for size {size}.")
    return indices.long() % size
