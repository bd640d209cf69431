"""Data that is divided among processes so that each example is read once."""

import itertools
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.sampler import RandomSampler

from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.network.fingerprints import digest_of
from laplace_debias.system.ranks import Ranks, check_joined
from laplace_debias.system.shown import counted
from laplace_debias.system.threads import Randomness

# The number of examples that are read to compare two data sets.
_NUM_COMPARED = 4
# If the sizes of the data are unknown, the indices of successive processes start this far apart.
FAR = 2**40


class ShardedBatches(Sampler[list[int]]):
    """A `batch_sampler` that divides each batch of indices among all processes.

    Every batch of `batch_size` examples is split into one part per process, of nearly equal size,
    and each process reads its part. No example is read twice or left out, nothing is padded, and
    the k-th batches of all processes together are the k-th batch of a single process. Therefore,
    the result of a fit does not depend on the number of processes. If a batch has fewer examples
    than there are processes, some processes get no share of it and read fewer batches.

    Args:
        data: The data set, or anything with the same length.
        batch_size: The number of examples per batch, summed over all processes.
        shuffle: Whether the order of the examples is random. It is the same in every pass.
        seed: The seed of the order, which must be the same on all processes.
        rank: The index of this process. Default: its rank in torch's process group, which must
            already exist; 0 without a group.
        num_ranks: The number of processes. Default: the size of torch's process group; 1 without a
            group.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If the data has no length.

    Example:
        >>> from laplace_debias import ShardedBatches
        >>> [list(ShardedBatches(range(5), 3, rank=rank, num_ranks=2)) for rank in range(2)]
        [[[0, 1], [3]], [[2], [4]]]
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        if not isinstance(data, Sized):
            raise TypeError(
                f"{type(data).__name__} has no length, so it cannot be divided among the "
                "processes by index. Pass a different part of the stream to each process."
            )
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}. Pass at least 1.")
        is_half_given = (rank is None) != (num_ranks is None)
        if is_half_given or not 0 <= (rank or 0) < (num_ranks or 1):
            raise ValueError(
                f"`rank={rank}` and `num_ranks={num_ranks}` do not fit together. Pass both, with "
                "a rank from 0 to num_ranks - 1, or neither."
            )
        self.data = data
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        if rank is None and dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            num_ranks = dist.get_world_size()
        self.rank = rank or 0
        self.num_ranks = num_ranks or 1

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.data)} examples, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, seed={self.seed}, rank={self.rank}, "
            f"num_ranks={self.num_ranks})"
        )

    @property
    def shares(self) -> list[range]:
        """The positions of the examples that this process reads, one range per batch."""
        shares = []
        for start in range(0, len(self.data), self.batch_size):
            size = min(self.batch_size, len(self.data) - start)
            share, remainder = divmod(size, self.num_ranks)
            first = start + self.rank * share + min(self.rank, remainder)
            # If the parts differ in size, the first ranks have one example more.
            shares.append(range(first, first + share + (self.rank < remainder)))
        return list(filter(None, shares))

    @property
    def num_examples(self) -> int:
        """The number of examples that this process reads per pass over the data."""
        return sum(map(len, self.shares))

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(len(self.data))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(len(self.data), generator=generator).tolist()
        for share in self.shares:
            yield [order[position] for position in share]


def with_batches(loader: Any, dataset: Any, batch_sampler: Any) -> DataLoader[Any]:
    """Return a loader with other batches that reads and collates examples like a given loader."""
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        generator=loader.generator,
        **reading_options(loader),
    )


def reading_options(loader: Any) -> dict[str, Any]:
    """Return the arguments with which a loader reads, collates and transfers its examples.

    `in_order` is not among them, because the positions of examples are only known if batches come
    in order.
    """
    return {
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def first_indices_of_stream(ranks: Ranks, stream: Stream) -> list[int] | None:
    """Return the index of this process's first example in each batch of shared data.

    Examples are ordered by batch and, among the k-th batches of all processes, by rank. The result
    is None if the sizes of the batches are not known before the data are read.
    """
    data = stream.source
    sampler = getattr(data, "batch_sampler", None)
    if isinstance(sampler, ShardedBatches):
        return [share.start for share in sampler.shares]
    if isinstance(data, (list, tuple)):
        sizes = [stream.read(batch).num_examples for batch in data]
        return first_indices_of_batches(ranks, sizes)
    return None


def first_indices_of_batches(ranks: Ranks, sizes: Sequence[int]) -> list[int]:
    """Compute the index of the first example of each batch; see `first_indices_of_stream`."""
    sizes_by_rank = ranks.exchange(list(sizes))
    sizes_by_batch = list(itertools.zip_longest(*sizes_by_rank, fillvalue=0))
    starts = itertools.accumulate((sum(sizes) for sizes in sizes_by_batch), initial=0)
    # Other processes may have more batches, so the loop ends with the sizes of this process.
    return [
        start + sum(batch_sizes[: ranks.rank])
        for start, batch_sizes, _ in zip(starts, sizes_by_batch, sizes, strict=False)
    ]


def check_shared(ranks: Ranks, data: Any) -> bool:
    """Require, before data are read, that the processes read different examples.

    Returns:
        Whether the processes share the data through `ShardedBatches`.
    """
    check_joined()
    _check_repeats_none(data)
    check_dispatched(data)
    if ranks.size == 1:
        return False
    batches: Any = getattr(data, "batch_sampler", None)
    sharding = ""
    if isinstance(batches, ShardedBatches) and batches.num_ranks > 1:
        sharding = f"{(len(batches.data), batches.batch_size, batches.shuffle, batches.seed)}"
    by_rank = ranks.exchange([sharding, _data_set_summary(data)])
    shardings = [sharding for sharding, _ in by_rank]
    if not any(shardings):
        summaries = [summary for _, summary in by_rank]
        check_all_different(summaries, "reads the same data set from end to end")
    elif len(set(shardings)) > 1:
        listed = ", ".join(f"rank {rank} {text or 'none'}" for rank, text in enumerate(shardings))
        raise ValueError(
            "ShardedBatches differs between the ranks. The values of (length of the "
            f"data, batch_size, shuffle, seed) are: {listed}. Use the same values on "
            "all ranks."
        )
    return any(shardings)


def _check_repeats_none(data: Any) -> None:
    """Require that a loader's sampler repeats no examples to give all processes equally many."""
    batches: Any = getattr(data, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(data, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        num_repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if num_repeated > 0:
            raise ValueError(
                f"The loader's DistributedSampler repeats {counted(num_repeated, 'example')} so "
                f"that all {sampler.num_replicas} processes get the same number of examples. "
                "The repeated examples would count twice. Use DataLoader(data, "
                "batch_sampler=ShardedBatches(data, batch_size)), which repeats no "
                "examples."
            )
    if has_uneven_shards(batches) and batches.even_batches and not batches.drop_last:
        raise ValueError(
            f"The {type(batches).__name__} of accelerate repeats examples so that all "
            f"{batches.num_processes} processes get the same number of examples. The repeated "
            "examples would count twice. Use DataLoader(data, "
            "batch_sampler=ShardedBatches(data, batch_size)) without `prepare`, or pass "
            "`even_batches=False` to accelerate, which both repeat no examples."
        )


def has_uneven_shards(batches: Any) -> bool:
    """Whether accelerate splits batches over processes and the last ones are incomplete.

    accelerate then repeats examples, or leaves examples out if `drop_last=True`. The class is
    recognised by its name, because importing accelerate takes seconds.
    """
    if type(batches).__name__ != "BatchSamplerShard" or batches.num_processes == 1:
        return False
    inner = batches.batch_sampler
    sampler = getattr(inner, "sampler", None)
    if batches.batch_size is None or not isinstance(sampler, Sized):
        return len(inner) % batches.num_processes > 0
    examples_per_step = batches.batch_size
    if not batches.split_batches:
        # Every process gets a batch of its own, instead of a part of each batch.
        examples_per_step *= batches.num_processes
    return len(sampler) % examples_per_step > 0


def check_dispatched(data: Any) -> None:
    """Require that accelerate repeats no example if it divides examples after reading them.

    accelerate divides streams in this way, and with `dispatch_batches=True` any data. To give all
    processes equally many examples, it then repeats examples, or leaves some out if `drop_last` is
    set. Whether the examples of a stream have to be repeated is not known before it has been read.

    Raises:
        ValueError: If accelerate divides a data set after reading it, or may repeat examples of a
            stream.
    """
    dataset: Any = getattr(data, "dataset", None)
    if type(data).__name__ == "DataLoaderDispatcher":
        num_processes = data.state.num_processes
        drops_last = data._drop_last
    elif type(dataset).__name__ == "IterableDatasetShard":
        num_processes = dataset.num_processes
        drops_last = dataset.drop_last
    else:
        return
    if num_processes == 1:
        return
    if not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"The {type(data).__name__} of accelerate (`dispatch_batches=True`) reads all examples "
            "on one process, and may repeat some of them. Use DataLoader(data, "
            "batch_sampler=ShardedBatches(data, batch_size)) without `prepare`."
        )
    if not drops_last:
        raise ValueError(
            "accelerate repeats examples of a stream to complete the last batches of its "
            f"{num_processes} processes. The repeated examples would count twice. Pass a "
            "different part of the stream to each process without `prepare`. Or pass "
            "`drop_last=True` to the DataLoader (for Hugging Face's Trainer, "
            "`dataloader_drop_last=True`), which leaves out the last examples instead."
        )


def check_all_different(marks: Sequence[str | None], coincidence: str) -> None:
    """Raise an error if two ranks read the same data."""
    for rank, mark in enumerate(marks):
        first_rank = marks.index(mark)
        if mark is not None and first_rank < rank:
            raise ValueError(
                f"Rank {rank} {coincidence} as rank {first_rank}, so every example would count "
                "several times. Use DataLoader(data, batch_sampler=ShardedBatches(data, "
                "batch_size)) to share the data between the processes, or work on one process "
                "only, within `laplace_debias.alone()`."
            )


def _data_set_summary(data: Any) -> str | None:
    """If a loader reads all of its data set, summarise it for comparisons between processes."""
    samplers = RandomSampler, SequentialSampler
    if not isinstance(data, DataLoader) or type(data.batch_sampler) is not BatchSampler:
        return None
    if type(data.sampler) not in samplers or len(data.sampler) != len(data.dataset):  # type: ignore[arg-type]
        return None
    size = len(data.sampler)  # type: ignore[arg-type]
    if not size:
        return None
    # Seed torch, so that augmentation draws the same numbers on all processes. The state of the
    # generator is restored afterwards.
    with Randomness(torch.Generator().manual_seed(0)):
        indices = range(0, size, max(1, size // _NUM_COMPARED))
        examples = [data.dataset[index] for index in indices]
    entries = [x for x in tree_leaves(examples) if isinstance(x, (Tensor, np.ndarray, int))]
    return f"{size} {digest_of(map(torch.as_tensor, entries))}"
