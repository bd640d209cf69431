"""Convert arrays to targets in the form that the likelihoods expect."""

import numpy as np
import torch
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.sources.likelihoods import task_name
from laplace_debias.system.shown import counted


def check_numbers(values: np.ndarray, source: str) -> None:
    """Raise an error unless all values are finite numbers."""
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{source} is of type {values.dtype}. Convert it to numbers.")
    bad = ~np.isfinite(values)
    if bad.any():
        raise ValueError(
            f"{source} has {counted(int(bad.sum()), 'NaN or infinite number')}, the first at "
            f"index {np.argwhere(bad)[0][0]}. Remove or correct these examples."
        )


def as_targets(array: np.ndarray, likelihood: Likelihood, source: str) -> Tensor:
    """Convert targets to classes, int64 `[N]`, or to numbers, float32 `[N, K]`."""
    check_numbers(array, source)
    if likelihood.targets == "class":
        targets = _classes(array, task_name(likelihood), source)
    elif likelihood.targets == "labels":
        targets = _labels(array, task_name(likelihood), source)
    else:
        targets = _columns(array, source)
    try:
        likelihood.check_targets(targets)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
    return targets


def _classes(array: np.ndarray, task: str, source: str) -> Tensor:
    """Convert class numbers `[N]` or `[N, 1]` to int64 `[N]`."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or (array != np.rint(array)).any() or array.min(initial=0) < 0:
        raise ValueError(
            f"{source} has shape {list(array.shape)} and values from {array.min(initial=0):g} to "
            f"{array.max(initial=0):g}. For task={task}, pass class numbers 0, 1, 2, …, one per "
            "example."
        )
    return torch.from_numpy(array.astype(np.int64))


def _labels(array: np.ndarray, task: str, source: str) -> Tensor:
    if array.ndim != 2 or not np.isin(array, (0, 1)).all():
        raise ValueError(
            f"{source} has shape {list(array.shape)}. For task={task}, pass zeros and ones of "
            "shape [N, labels]."
        )
    return _columns(array, source)


def _columns(array: np.ndarray, source: str) -> Tensor:
    columns = array[:, None] if array.ndim == 1 else array
    if columns.ndim != 2:
        raise ValueError(
            f"{source} has shape {list(array.shape)}. Use the shape [N] or [N, targets]."
        )
    return torch.from_numpy(columns.astype(np.float32))
