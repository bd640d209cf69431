"""Data as batches of inputs and targets, read from any iterable."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.network.inputs import Inputs, digest_of_examples, move
from laplace_debias.system.checks import check_generator
from laplace_debias.system.threads import Randomness

# Batches as `BatchReader` reads them: pairs (inputs, targets), or mappings and dataclasses.
Batches = Iterable[Any]

_END = object()


def consecutive(batches: Iterable[Batch]) -> list[Batch]:
    """Number the examples of all batches consecutively, starting at 0."""
    indexed = []
    num_before = 0
    for batch in batches:
        indexed.append(replace(batch, first_index=num_before))
        num_before += batch.num_examples
    return indexed


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
    """Return the number of examples of the given batches, or None if a batch contains no tensor.

    The number is the sum of the lengths of the batches' first tensors, which are inputs or targets.
    """
    total = 0
    for batch in batches:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].ndim == 0:
            return None
        total += len(tensors[0])
    return total


def randomness(
    source: Batches, generator: torch.Generator | None
) -> AbstractContextManager[object]:
    """Return a context in which a loader draws its random numbers from a generator.

    The generator determines the order and the augmentation of the loader's passes, which still
    differ from each other, as with any shuffling loader. The state of torch's global generator does
    not change. Without a generator, or for a list of batches, the context does nothing.
    """
    check_generator(generator)
    if generator is None or isinstance(source, (list, tuple)):
        return nullcontext()
    return Randomness(generator)


class Stream:
    """The user's batches, read, checked and numbered.

    Examples are numbered within this process.

    The first batch can be inspected without being lost: the next pass continues with the same
    iterator, so a shuffling loader is not started twice.

    Args:
        source: The user's batches.
        read: The reader that splits a batch into inputs and targets.
        generator: The generator that determines the order and the augmentation of passes; see
            `randomness`.
        device: The device to which inputs are moved. None leaves them on their device.
        target_device: The device to which targets are moved. None leaves them on their device.
        progress: The title of a progress bar. None shows no progress bar.
    """

    def __init__(
        self,
        source: Batches,
        read: BatchReader,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | None = None,
        target_device: torch.device | None = None,
        progress: str | None = None,
    ) -> None:
        check_batches(source)
        self.source = source
        self.read = read
        self._randomness = randomness(source, generator)
        self._dtypes = {p.dtype for p in read.model.parameters()}
        self._device = device
        self._target_device = target_device
        self._progress = progress
        self._first: Batch | None = None
        self._started_pass: Iterator[Batch] | None = None

    @property
    def first(self) -> Batch | None:
        """The first batch, or None if there are no batches."""
        if self._first is None and self._started_pass is None:
            started_pass = iter(self)
            self._first = next(started_pass, None)
            self._started_pass = started_pass
        return self._first

    def __iter__(self) -> Iterator[Batch]:
        """Read the data once.

        Raises:
            ValueError: If several workers each read the whole of an iterable-style data set.
        """
        started_pass = self._started_pass
        self._started_pass = None
        if started_pass is None:
            source = self.source
            if self._progress is not None:
                source = tqdm(source, desc=self._progress, unit="batch", leave=False)
            yield from self._pass(source)
            return
        if self._first is not None:
            yield self._first
        yield from started_pass

    @property
    def is_reiterable(self) -> bool:
        """Whether the data can certainly be read more than once."""
        if isinstance(self.source, DataLoader):
            return not isinstance(self.source.dataset, IterableDataset)
        return isinstance(self.source, Sized) and not isinstance(self.source, Iterator)

    def extra_pass(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches, in a pass in addition to the fit's own."""
        for batch in self._pass(self.source):
            yield batch.inputs

    def _pass(self, source: Batches) -> Iterator[Batch]:
        """Read the batches of the source, which may be wrapped in a progress bar."""
        batches = self._read_batches(source)
        loader = self.source
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            batches = _check_different_workers(batches, loader.num_workers)
        num_read = 0
        for batch in batches:
            targets = batch.targets
            if self._target_device is not None:
                targets = targets.to(self._target_device, non_blocking=True)
            inputs = move(batch.inputs, self._device, self._dtypes)
            yield replace(batch, inputs=inputs, targets=targets, first_index=num_read)
            num_read += batch.num_examples

    def _read_batches(self, source: Batches) -> Iterator[Batch]:
        """Read and number the batches of one pass; the loader draws from its own random state."""
        with self._randomness:
            steps = iter(source)
        for number in count(1):
            with self._randomness:
                users_batch = next(steps, _END)
            if users_batch is _END:
                return
            yield replace(self.read(users_batch, f"Batch {number}"), number=number)


def _check_different_workers(batches: Iterator[Batch], num_workers: int) -> Iterator[Batch]:
    """Require that the workers that read a stream start with different examples."""
    marks = set[str]()
    for number, batch in enumerate(batches, start=1):
        if number <= 2 and num_workers > 1:
            # The first batches of the stream come from different workers, because the workers take
            # turns.
            marks.add(digest_of_examples(batch.inputs, batch.targets))
            if len(marks) < number:
                raise ValueError(
                    f"The {num_workers} workers that read the stream start with the same "
                    "examples, so every example would count several times. Use "
                    "torch.utils.data.get_worker_info() to let each worker yield a different "
                    "part of the examples, or set `num_workers=1`."
                )
        yield batch
