"""Batches of data: checked, moved to the model's device, with a progress bar."""

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from laplace_debias.curvature.inputs import Inputs, move, num_examples

# Pairs (inputs, targets), as tuples or, from a DataLoader, lists; inputs as `curvature.inputs` has
# them.
Batches = Iterable[Sequence[Any]]


class OnDevice:
    """Batches `(x, y)` as tensors on the model's device, re-iterable if the source is.

    Args:
        batches: The source.
        device: Where the model is.
        dtypes: The dtypes of the model's parameters, one of which floating-point inputs must have.
    """

    def __init__(
        self, batches: Batches, device: torch.device, dtypes: Collection[torch.dtype]
    ) -> None:
        self._batches = batches
        self._device = device
        self._dtypes = dtypes

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for batch in self._batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise TypeError(
                    f"Batches must be pairs (inputs, targets), got {type(batch).__name__}"
                    f"{f' of length {len(batch)}' if isinstance(batch, Sized) else ''}: wrap the "
                    "loader so that it yields pairs."
                )
            x, y = batch
            if not isinstance(y, Tensor):
                raise TypeError(f"Targets must be a tensor, got {type(y).__name__}.")
            x = move(x, self._device, self._dtypes)
            size = num_examples(x)
            if y.ndim == 0 or size != len(y):
                raise ValueError(
                    f"A batch holds {size} inputs but targets of shape {tuple(y.shape)}."
                )
            yield x, y.to(self._device, non_blocking=True)


def with_progress(batches: Batches, progress: bool, what: str) -> Batches:
    """The same batches, with a progress bar on each pass if wanted."""
    return _Progress(batches, what) if progress else batches


class _Progress:
    def __init__(self, batches: Batches, what: str) -> None:
        self._batches = batches
        self._what = what

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(tqdm(self._batches, desc=self._what, unit="batch", leave=False))
