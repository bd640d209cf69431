"""Divide batches among processes: either each batch into parts, or whole batches in turn."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.shards import ShardedBatches, with_batches
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.sources.changed import Changed
from laplace_debias.system.ranks import process_group


def share(batches: Batches, model: nn.Module) -> Batches:
    """Return this process's part of every batch.

    Together, the k-th batches of all processes are the k-th batch of a single process. If `batches`
    is a plain `DataLoader` that reads its data in order, each process reads only its part.
    Otherwise, each process reads all examples and keeps its part.
    """
    ranks = process_group()
    if ranks.size == 1:
        return batches
    if _is_plain(batches):
        loader: Any = batches
        sampler = ShardedBatches(
            loader.dataset, loader.batch_size, rank=ranks.rank, num_ranks=ranks.size
        )
        return with_batches(loader, loader.dataset, sampler)
    mine = _Cut(batches, BatchReader(model), ranks.rank, ranks.size)
    # Return a list for a list, so that the positions of the examples are still known.
    return list(mine) if isinstance(batches, list | tuple) else mine


def dealt(batches: Batches, read: BatchReader) -> Iterator[Batch]:
    """Read every n-th batch, where n is the number of processes; indices count all examples."""
    ranks = process_group()
    if isinstance(batches, Changed):
        for batch in dealt(batches.source, read):
            inputs, targets = batches.changed((batch.inputs, batch.targets), batch.first_index)
            yield replace(batch, inputs=inputs, targets=targets)
    elif ranks.size > 1 and _is_plain(batches):
        # Only this process's batches are loaded.
        loader = cast(Any, batches)
        indices_of_batches = list(loader.batch_sampler)
        own_numbers = range(ranks.rank, len(indices_of_batches), ranks.size)
        own_indices = [indices_of_batches[number] for number in own_numbers]
        own_loader = with_batches(loader, loader.dataset, own_indices)
        for number, batch in zip(own_numbers, own_loader, strict=True):
            yield replace(read(batch), first_index=number * loader.batch_size)
    else:
        num_before = 0
        for number, batch in enumerate(map(read, batches)):
            if number % ranks.size == ranks.rank:
                yield replace(batch, first_index=num_before)
            num_before += batch.num_examples


def _is_plain(batches: Any) -> bool:
    """Whether the batches are those of a `DataLoader` that reads its data set in order."""
    return (
        isinstance(batches, DataLoader)
        # A subclass with its own `__iter__` may yield different batches.
        and type(batches).__iter__ is DataLoader.__iter__
        and type(batches.batch_sampler) is BatchSampler
        and type(batches.sampler) is SequentialSampler
        and not batches.drop_last
    )


class _Cut:
    """Every batch cut into `size` parts, of which this process gets part number `rank`."""

    def __init__(self, batches: Batches, read: BatchReader, rank: int, size: int) -> None:
        self._batches = batches
        self._read = read
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        was_too_small = False
        for batch in self._batches:
            read_batch = self._read(batch)
            if was_too_small:
                # If this went on, parts of later batches would be mistaken for parts of this batch.
                raise ValueError(
                    "A batch before the last one has fewer examples than there are processes "
                    f"({self._size}). Use larger batches, or start fewer processes."
                )
            count = read_batch.num_examples
            was_too_small = count < self._size
            per_rank, num_larger = divmod(count, self._size)
            start = self._rank * per_rank + min(self._rank, num_larger)
            end = start + per_rank + (self._rank < num_larger)
            if start < end:
                own_part = read_batch.take(slice(start, end))
                yield own_part.inputs, own_part.targets
