"""Targets from arrays: what they mean, and as the likelihoods take them."""

import numpy as np
import torch
from torch import Tensor

from laplace_debias.sources.task import Task


def check_numbers(values: np.ndarray, source: str) -> None:
    """Require finite numbers."""
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{source} is of type {values.dtype}; expected numbers")
    bad = ~np.isfinite(values)
    if bad.any():
        raise ValueError(
            f"{source} has {int(bad.sum())} numbers that are NaN or infinite, the first at index "
            f"{np.argwhere(bad)[0][0]}: remove or repair these examples"
        )


def task_of(targets: np.ndarray) -> Task:
    """The meaning of targets, by their type and shape.

    Whole numbers `[N]` are classes, rows of zeros and ones `[N, K]` labels, other numbers a
    regression's targets.
    """
    if targets.dtype.kind == "f":
        return "regression"
    return "classification" if targets.ndim == 1 else "multilabel"


def as_targets(targets: np.ndarray, task: Task, source: str) -> Tensor:
    """Targets as the likelihood takes them: classes int64 `[N]`, others float32 `[N, K]`."""
    check_numbers(targets, source)
    if task in ("classification", "binary"):
        if targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        if targets.ndim != 1 or (targets != np.rint(targets)).any() or targets.min(initial=0) < 0:
            raise ValueError(
                f"{source} has shape {list(targets.shape)} and values {targets.min(initial=0):g} … "
                f"{targets.max(initial=0):g}; expected class numbers 0, 1, 2, …, one an example, "
                f"for task={task}"
            )
        if task == "binary" and targets.max(initial=0) > 1:
            raise ValueError(
                f"{source} goes up to {targets.max():g}; expected 0 or 1 (task=binary)"
            )
        return torch.from_numpy(targets.astype(np.int64))
    if task == "multilabel" and (targets.ndim != 2 or not np.isin(targets, (0, 1)).all()):
        raise ValueError(
            f"{source} has shape {list(targets.shape)}; expected zeros and ones [N, labels] for "
            "task=multilabel"
        )
    columns = targets[:, None] if targets.ndim == 1 else targets
    if columns.ndim != 2:
        raise ValueError(f"{source} has shape {list(targets.shape)}; expected [N] or [N, targets]")
    return torch.from_numpy(columns.astype(np.float32))
