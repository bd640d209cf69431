"""Data that is read repeatedly, with an error if its batches change between passes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.data.shards import (
    check_all_different,
    check_shared,
    first_indices_of_batches,
)
from laplace_debias.curvature.network.inputs import Inputs, move, tensors_of
from laplace_debias.system.ranks import ALONE, Ranks
from laplace_debias.system.shown import counted

_EMPTY = "The data is empty. Pass at least one batch."
_NO_PART = (
    "This process has no examples of the data. Curvature operators need at least one example per "
    "process in each batch. Use larger batches or fewer processes."
)


class RepeatableBatches:
    """Batches of inputs and targets that must be the same in every pass.

    A batch's index, the labels drawn for it and the network linearised at it are reused in every
    pass, so they must refer to the same batch. Therefore, a loader that shuffles or augments at
    random raises an error instead of adding noise.

    A batch may have a third entry, one weight per example, if the stream reads weights. An example
    of weight w counts as w examples in the loss and in `total_weight`, but as one example in
    `num_examples`.

    Batches that contain NaN are rejected. Inf in the inputs is accepted here: if it matters, the
    outputs are not finite either, which is checked elsewhere. `sizes` are the sizes of this
    process's batches, and `firsts` are the indices of their first examples within the data of all
    processes. `num_examples` and `total_weight` are sums over all processes.
    """

    def __init__(
        self,
        stream: Stream,
        device: torch.device,
        num_data: int | None,
        ranks: Ranks = ALONE,
    ) -> None:
        check_repeatable(stream.source)
        is_shared = check_shared(ranks, stream.source)
        self._stream = stream
        self._device = device
        self._marks: list[str] = []
        self.sizes: list[int] = []
        own_weight = self._read_once()
        if not self.sizes:
            raise ValueError(_EMPTY if ranks.size == 1 else _NO_PART)
        if not is_shared:
            check_all_different(ranks.exchange(self._marks[0]), "begins with the same batch")
        self.num_examples = sum(ranks.exchange(sum(self.sizes)))
        self.total_weight = sum(ranks.exchange(own_weight))
        if not self.total_weight:
            raise ValueError(
                "The weights of all examples are zero. Pass a positive weight for at least one "
                "example."
            )
        self.firsts = first_indices_of_batches(ranks, self.sizes)
        if num_data is not None and num_data != self.num_examples:
            raise ValueError(
                f"`num_data={num_data}`, but the data has {counted(self.num_examples, 'example')}. "
                "Remove `num_data=`, or check drop_last and the sampler."
            )
        self.first()

    def _read_once(self) -> float:
        """Record the size and the mark of each batch, and return the weight of all examples."""
        total_weight = 0.0
        for batch in self._stream:
            if any(x.isnan().any() for x in (*tensors_of(batch.inputs), batch.targets)):
                raise ValueError(f"Batch {batch.number} contains NaN. Remove these examples.")
            self.sizes.append(batch.num_examples)
            self._marks.append(batch.mark)
            total_weight += batch.total_weight
        return total_weight

    def __iter__(self) -> Iterator[Batch]:
        """Read the data once, on the model's device.

        Examples are numbered within the data of all processes.
        """
        index = -1
        for index, batch in enumerate(self._stream):
            if index >= len(self.sizes) or batch.mark != self._marks[index]:
                self._refuse(index)
            weights = batch.weights
            if weights is not None:
                weights = weights.to(self._device, non_blocking=True)
            yield replace(
                batch,
                inputs=move(batch.inputs, self._device, None),
                targets=batch.targets.to(self._device, non_blocking=True),
                weights=weights,
                first_index=self.firsts[index],
            )
        if index == -1:
            raise TypeError(
                f"{type(self._stream.source).__name__} yielded no batch in the second "
                "pass, but every matrix-vector product reads the data again. Create a "
                "new iterator in `__iter__`, or pass a list of batches or a DataLoader."
            )
        if index + 1 != len(self.sizes):
            self._refuse(index + 1)

    def first(self) -> Batch:
        """Read the first batch."""
        return next(iter(self))

    def _refuse(self, index: int) -> None:
        raise ValueError(
            f"Batch {index + 1} is not the same as in the first pass over the data, "
            "but every product with the operator needs the same batches. Use "
            "shuffle=False and no random augmentation, or pass `list(loader)`."
        )


def first_inputs(stream: Stream) -> Inputs:
    """Return the inputs of the first batch."""
    check_repeatable(stream.source)
    first = stream.first
    if first is None:
        raise ValueError(_EMPTY)
    return first.inputs


def check_repeatable(batches: Any) -> None:
    """Require data that can be read again."""
    if isinstance(batches, Iterator):
        raise TypeError(
            f"The data is an iterator ({type(batches).__name__}), which can be read only once, "
            "but every product needs a pass over the data. Pass a list of batches or a "
            "DataLoader."
        )
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"The data is a {type(batches).__name__}. Pass an iterable of batches (inputs, "
            "targets)."
        )
