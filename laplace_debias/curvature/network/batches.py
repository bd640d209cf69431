"""Batches of data: checked, moved to the model's device, with a progress bar."""

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.curvature.losses.likelihood import Likelihood
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples

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


class Counted:
    """The same batches, of which at least one target must count.

    Which ones do is seen as the batches pass, so that a pass over many is not held up; what is
    missing is told at its end, before anything is made of it.

    Args:
        batches: The source.
        likelihood: Says which targets count.
        what: What the error calls the batches.
    """

    def __init__(self, batches: OnDevice, likelihood: Likelihood, what: str) -> None:
        self._batches = batches
        self._likelihood = likelihood
        self._what = what

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        num_batches, counts = 0, False
        for x, y in self._batches:
            num_batches += 1
            counts = counts or self._likelihood.counts_any(y)
            yield x, y
        if num_batches and not counts:
            ignored = getattr(self._likelihood, "ignore_index", None)
            kind = "" if ignored is None else f" (ignore_index={ignored})"
            raise ValueError(
                f"Every target of the {self._what} is ignored{kind}, so that they tell nothing: "
                "pass batches in which at least one target counts."
            )


def with_progress(batches: Batches, progress: bool, what: str) -> Batches:
    """The same batches, with a progress bar on each pass if wanted."""
    return _Progress(batches, what) if progress else batches


class _Progress:
    def __init__(self, batches: Batches, what: str) -> None:
        self._batches = batches
        self._what = what

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(tqdm(self._batches, desc=self._what, unit="batch", leave=False))
