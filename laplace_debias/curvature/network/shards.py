"""Data that several processes share: each reads its part, none is read twice."""

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
    Sampler,
    SequentialSampler,
)
from torch.utils.data.sampler import RandomSampler

from laplace_debias.curvature.network.batches import Place, Stream
from laplace_debias.curvature.network.fingerprint import sum_of_bits
from laplace_debias.system.ranks import Ranks, check_joined
from laplace_debias.system.threads import Randomness

# Examples of a data set that are read to tell it from another.
_FEW = 4
# Where the data tells no sizes, the places of one process's examples are so far from another's.
FAR = 2**40


class ShardedBatches(Sampler[list[int]]):
    """Batches of indices, each of which is shared by all processes: a `batch_sampler`.

    Every batch of `batch_size` examples is cut into as many parts of nearly the same size as there
    are processes, and each process reads its part: no example is read twice or left out, nothing is
    padded, and the union of the processes' k-th batches is the k-th batch of one process. So every
    fit is that of one process, whatever their number. Parts of fewer examples than processes are
    empty on some, which then read fewer batches.

    Args:
        data: The data set, or anything with its length.
        batch_size: Examples of all processes together in a batch.
        shuffle: Whether the order of the examples is a random one, the same in every pass.
        seed: Fixes that order. It must be the same on all processes.
        rank: Which process this is; by default its rank in torch's process group, 0 without one.
        num_ranks: How many there are; by default the size of that group, 1 without one.

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
                f"{type(data).__name__} has no length, so it cannot be shared by index: give each "
                "process its own part of the stream."
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if (rank is None) != (num_ranks is None) or not 0 <= (rank or 0) < (num_ranks or 1):
            raise ValueError(
                f"rank={rank} of num_ranks={num_ranks}: give both, with rank from 0 to "
                "num_ranks - 1, or neither."
            )
        self.data, self.batch_size = data, batch_size
        self.shuffle, self.seed = shuffle, seed
        self._rank, self._num_ranks = rank, num_ranks

    @property
    def rank(self) -> int:
        """The number of this process."""
        return (dist.get_rank() if _has_group() else 0) if self._rank is None else self._rank

    @property
    def num_ranks(self) -> int:
        """How many processes share the data."""
        if self._num_ranks is None:
            return dist.get_world_size() if _has_group() else 1
        return self._num_ranks

    @property
    def num_examples(self) -> int:
        """How many examples this process reads in a pass."""
        return sum(map(len, self._parts()))

    def __len__(self) -> int:
        return sum(1 for _ in self._parts())

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(len(self.data))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(len(self.data), generator=generator).tolist()
        for part in self._parts():
            yield [order[place] for place in part]

    def place(self, batch: int) -> int:
        """The place of the first example of a batch of this process among all, in their order."""
        return self._part(batch).start

    def _parts(self) -> Iterator[range]:
        """The places of this process's part of every batch that it has one of."""
        for batch in range(-(-len(self.data) // self.batch_size)):
            # The first ranks have the larger parts: one whose part is empty has none later on.
            if part := self._part(batch):
                yield part

    def _part(self, batch: int) -> range:
        start = batch * self.batch_size
        size = min(self.batch_size, len(self.data) - start)
        each, left = divmod(size, self.num_ranks)
        first = start + self.rank * each + min(self.rank, left)
        return range(first, first + each + (self.rank < left))


def place_of(ranks: Ranks, stream: Stream) -> Place:
    """The places of examples in data that several processes share.

    The order of all examples is that of the batches, and within the union of the processes' k-th
    batches that of their ranks. Where data tells no sizes, it is that of the ranks.
    """
    data = stream.source
    sampler = getattr(data, "batch_sampler", None)
    if isinstance(sampler, ShardedBatches):
        return lambda batch, _: sampler.place(batch)
    if isinstance(data, (list, tuple)):
        firsts = first_places(ranks, [len(stream.pair(batch)[1]) for batch in data])
        return lambda batch, _: firsts[batch]
    return lambda _, seen: FAR * ranks.rank + seen


def first_places(ranks: Ranks, sizes: Sequence[int]) -> list[int]:
    """The place of the first example of each batch of this process; see `place_of`."""
    of_ranks = ranks.exchange(list(sizes))
    of_batches = list(itertools.zip_longest(*of_ranks, fillvalue=0))
    starts = itertools.accumulate((sum(of_batch) for of_batch in of_batches), initial=0)
    return [
        start + sum(of_batch[: ranks.rank])
        for start, of_batch, _ in zip(starts, of_batches, sizes, strict=False)
    ]


def check_shared(ranks: Ranks, data: Any) -> bool:
    """Require that several processes share data, before it is read: none reads what another does.

    Returns whether `ShardedBatches` say that it is shared.
    """
    check_joined()
    _refuse_padding(data)
    if ranks.size == 1:
        return False
    sampler = getattr(data, "batch_sampler", None)
    shared = None
    if isinstance(sampler, ShardedBatches):
        shared = [len(sampler.data), sampler.batch_size, sampler.shuffle, sampler.seed]
    said = ranks.exchange([shared, _whole_data_set(data)])
    of_shared = [one for one, _ in said]
    if any(one is not None for one in of_shared):
        if any(one != of_shared[0] for one in of_shared):
            told = ", ".join(
                f"rank {rank} none" if one is None else f"rank {rank} {tuple(one)}"
                for rank, one in enumerate(of_shared)
            )
            raise ValueError(
                "ShardedBatches must be the same on all ranks (length of the data, batch_size, "
                f"shuffle, seed): {told}."
            )
        return True
    refuse_same([one for _, one in said], "reads the same data set from end to end")
    return False


def _refuse_padding(data: Any) -> None:
    """Refuse a `DistributedSampler` that fills up the processes' parts with repeated examples."""
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    sampler = sampler or getattr(data, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if repeated > 0:
        raise ValueError(
            f"The loader's DistributedSampler repeats {repeated} examples, so that all of "
            f"{sampler.num_replicas} processes have as many, and they would count twice: use "
            "DataLoader(data, batch_sampler=ShardedBatches(data, batch_size)), which repeats none."
        )


def refuse_same(marks: Sequence[Any], how: str) -> None:
    """Refuse data of which two ranks have the same mark; None stands for unknown."""
    known: dict[Any, int] = {}
    for rank, mark in enumerate(marks):
        if mark is None:
            continue
        key = tuple(mark) if isinstance(mark, list) else mark
        if key in known:
            raise ValueError(
                f"Rank {rank} {how} as rank {known[key]}, so that every example would count "
                "several times: let the processes share the data, DataLoader(data, "
                "batch_sampler=ShardedBatches(data, batch_size)), or work on one process alone, "
                "within `laplace_debias.alone()`."
            )
        known[key] = rank


def _whole_data_set(data: Any) -> list[Any] | None:
    """The identity that tells a data set from another, if a loader reads all of it."""
    if not isinstance(data, DataLoader) or type(data.batch_sampler) is not BatchSampler:
        return None
    dataset = data.dataset
    if type(data.sampler) not in (RandomSampler, SequentialSampler) or not isinstance(
        dataset, Sized
    ):
        return None
    size = len(dataset)
    if size == 0 or len(data.sampler) != size:  # type: ignore[arg-type]
        return None
    # Augmentation by torch draws the same numbers on all, and leaves the generator as it was.
    with Randomness(torch.Generator().manual_seed(0)):
        some = [dataset[index] for index in sorted({size * k // _FEW for k in range(_FEW)})]
    entries = [x for x in tree_leaves(some) if isinstance(x, (Tensor, np.ndarray, int))]
    return [size, *(sum_of_bits(torch.as_tensor(x)) for x in entries)]


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
