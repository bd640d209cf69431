"""Data as batches of inputs and targets, from anything that can be iterated over."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.batch_reader import BatchReader
from laplace_debias.curvature.network.inputs import Inputs, mark_of, move
from laplace_debias.system.checks import check_generator
from laplace_debias.system.ranks import process_group
from laplace_debias.system.threads import Randomness

# Batches as `BatchReader` reads them: pairs (inputs, targets), or mappings and dataclasses.
Batches = Iterable[Any]
# From a batch's number in this process, and how many examples the process has read before, to the
# index of the batch's first example among those of all processes.
FirstIndex = Callable[[int, int], int]


_END = object()


@runtime_checkable
class FitData(Protocol):
    """The batches that a fit reads, with the indices of their examples."""

    def __iter__(self) -> Iterator[Batch]: ...

    def first_index(self, batch: int, num_read: int) -> int:
        """Return the index of a batch's first example among those of all processes.

        Batches are counted from 0; `num_read` is the number of examples in those before.
        """

    def batch_number(self, batch: int) -> int | None:
        """Return the number of a batch in the user's data, from 1, or None."""


@dataclass(frozen=True)
class Fold:
    """Batches that were made from those of the user.

    Attributes:
        batches: The batches of this process.
        first_indices: For each batch the index of its first example in all data of the fit, fold
            after fold.
        size: The number of examples of all processes, or the sum of their weights.
    """

    batches: list[Batch]
    first_indices: list[int]
    size: float

    @classmethod
    def consecutive(cls, batches: Sequence[Batch]) -> "Fold":
        """Make a fold of all examples of this process."""
        sizes = [batch.num_examples for batch in batches]
        first_indices = list(accumulate(sizes[:-1], initial=0)) if sizes else []
        return cls(list(batches), first_indices, sum(batch.total_weight for batch in batches))

    @classmethod
    def joined(cls, folds: "Sequence[Fold]") -> "Fold":
        """Join folds to one, with their batches fold after fold."""
        batches = [batch for fold in folds for batch in fold.batches]
        first_indices = [index for fold in folds for index in fold.first_indices]
        return cls(batches, first_indices, sum(fold.size for fold in folds))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def first_index(self, batch: int, _: int) -> int:
        """Return the index of a batch's first example."""
        return self.first_indices[batch]

    def batch_number(self, _: int) -> None:
        """Return None: these are not the batches of the user's data."""


def check_batches(source: Any) -> None:
    """Require batches, rather than a tensor of examples or a data set.

    Raises:
        TypeError: For a tensor, an array, a table, or a map-style `Dataset`.
    """
    if hasattr(source, "shape"):
        raise TypeError(
            f"Data must be batches (inputs, targets), got a {type(source).__name__} of shape "
            f"{tuple(source.shape)}. Pass a DataLoader, such as `DataLoader(TensorDataset(x, y), "
            "batch_size=128)`, or a list of batches, `[(x, y)]`."
        )
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"Data must be batches (inputs, targets), but a {type(source).__name__} yields "
            "single examples. Pass a DataLoader, such as `DataLoader(dataset, batch_size=128)`."
        )


def total_size(batches: Sequence[Any]) -> int | None:
    """Return the number of examples of some batches; None if a batch shows no tensor.

    It is the length of each batch's first tensor, whether of its inputs or of its targets.
    """
    total = 0
    for batch in batches:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].ndim == 0:
            return None
        total += len(tensors[0])
    return total


class Stream:
    """The user's batches, read and checked.

    The first batch can be looked at without being lost: the next pass goes on with the iterator
    that gave it, so that a loader which shuffles is not begun twice. With a generator a pass's
    order and augmentation are a function of it; passes differ from each other, as those of a
    shuffling loader do, and torch's global generator is left as it was.

    Args:
        source: The user's batches.
        read: Reads a batch as inputs and targets.
        generator: Determines the order and the augmentation of passes.
        device: The device that inputs are moved to; None to leave them.
        target_device: The device that targets are moved to; None to leave them.
        progress: The title of a progress bar; None for no bar.
        counts_any: Whether any of a batch's targets contributes to the loss. If it is passed, some
            targets of each pass must.
        description: The data's name in errors.
    """

    def __init__(
        self,
        source: Batches,
        read: BatchReader,
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        target_device: torch.device | None = None,
        progress: str | None = None,
        counts_any: Callable[[Tensor], bool] | None = None,
        description: str = "data",
    ) -> None:
        check_batches(source)
        check_generator(generator)
        # Set if several processes share the data, and it matters which example is which.
        self.first_index_among_all: FirstIndex | None = None
        self.source = source
        self.read = read
        self.dtypes = {p.dtype for p in read.model.parameters()}
        self.device = device
        self.target_device = target_device
        self.progress = progress
        self.counts_any = counts_any
        self.description = description
        self._first: list[Batch] = []
        self._started_pass: Iterator[Batch] | None = None
        self.randomness: AbstractContextManager[object] = nullcontext()
        if generator is not None and not isinstance(source, (list, tuple)):
            self.randomness = Randomness(generator)

    def first_index(self, batch: int, num_read: int) -> int:
        """Return the index of a batch's first example among those of all processes."""
        if self.first_index_among_all is None:
            return num_read
        return self.first_index_among_all(batch, num_read)

    def batch_number(self, batch: int) -> int:
        """Return the number of a batch, from 1."""
        return batch + 1

    @property
    def first(self) -> list[Batch]:
        """Return a list with the first batch, or an empty list if there is none."""
        if self._started_pass is None and not self._first:
            started_pass = self.unchecked_pass()
            self._first = list(islice(started_pass, 1))
            self._started_pass = started_pass
        return self._first

    def __iter__(self) -> Iterator[Batch]:
        """Read the data once; at least one target must contribute to the loss."""
        num_batches = 0
        any_counts = False
        for batch in self.unchecked_pass():
            num_batches += 1
            if self.counts_any is not None and not any_counts:
                any_counts = self.counts_any(batch.targets)
            yield batch
        if self.counts_any is None:
            return
        by_rank = process_group().exchange((num_batches, any_counts))
        if any(number for number, _ in by_rank) and not any(counts for _, counts in by_rank):
            raise ValueError(
                f"All targets of the {self.description} are ignored, so there is no "
                "curvature to compute. Pass batches in which at least one target "
                "contributes to the loss."
            )

    def unchecked_pass(self) -> Iterator[Batch]:
        """Read the data without a check at its end, where all processes take the same steps.

        It is an error if several workers each read all of a stream.
        """
        started_pass = self._started_pass
        self._started_pass = None
        if started_pass is not None:
            yield from chain(self._first, started_pass)
            return
        source = self.source
        if self.progress is not None:
            source = tqdm(source, desc=self.progress, unit="batch", leave=False)
        yield from self._read_batches(source)

    @property
    def is_reiterable(self) -> bool:
        """Whether the data can certainly be read more than once."""
        if isinstance(self.source, DataLoader):
            return not isinstance(self.source.dataset, IterableDataset)
        return isinstance(self.source, Sized) and not isinstance(self.source, Iterator)

    def extra_pass(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches, in a pass besides those of the fit."""
        for batch in self._read_batches(self.source):
            yield batch.inputs

    def _read_batches(self, source: Batches) -> Iterator[Batch]:
        num_workers = 0
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, IterableDataset):
            num_workers = self.source.num_workers
        with self.randomness:
            steps = iter(source)
        marks = set[str]()
        for number in count(1):
            with self.randomness:
                users_batch = next(steps, _END)
            if users_batch is _END:
                return
            batch = self.read(users_batch, f"Batch {number}")
            if number <= 2 and num_workers > 1:
                # The first batches of two workers, which come in turn.
                marks.add(mark_of(batch.inputs, batch.targets))
                if len(marks) < number:
                    raise ValueError(
                        f"The {num_workers} workers that read the stream start with the same "
                        "examples, so every example would count several times. Use "
                        "torch.utils.data.get_worker_info() to let each worker yield a different "
                        "part of the examples, or set `num_workers=1`."
                    )
            targets = batch.targets
            if self.target_device is not None:
                targets = targets.to(self.target_device, non_blocking=True)
            inputs = move(batch.inputs, self.device, self.dtypes)
            yield replace(batch, inputs=inputs, targets=targets)
