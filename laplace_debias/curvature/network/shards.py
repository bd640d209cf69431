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
from laplace_debias.curvature.network.fingerprints import sum_of_bits
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
        rank: Which process this is; by default its rank in torch's process group, which is there
            before; 0 without one.
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
        is_of_group = rank is None and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_of_group else rank or 0
        self.num_ranks = dist.get_world_size() if is_of_group else num_ranks or 1

    @property
    def parts(self) -> list[range]:
        """The places of this process's part of every batch that it has one of."""
        parts = []
        for start in range(0, len(self.data), self.batch_size):
            each, left = divmod(min(self.batch_size, len(self.data) - start), self.num_ranks)
            first = start + self.rank * each + min(self.rank, left)
            parts.append(range(first, first + each + (self.rank < left)))
        # The first ranks have the larger parts: one whose part is empty has none later on.
        return list(filter(None, parts))

    @property
    def num_examples(self) -> int:
        """How many examples this process reads in a pass."""
        return sum(map(len, self.parts))

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(len(self.data))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(len(self.data), generator=generator).tolist()
        for part in self.parts:
            yield [order[place] for place in part]


def place_of(ranks: Ranks, stream: Stream) -> Place:
    """The places of examples in data that several processes share.

    The order of all examples is that of the batches, and within the union of the processes' k-th
    batches that of their ranks. Where data tells no sizes, it is that of the ranks.
    """
    data = stream.source
    sampler = getattr(data, "batch_sampler", None)
    if isinstance(sampler, ShardedBatches):
        parts = sampler.parts
        return lambda batch, _: parts[batch].start
    if isinstance(data, (list, tuple)):
        pairs = (stream.read(batch, weighs=stream.weighs) for batch in data)
        firsts = first_places(ranks, [len(y) for _, y, *_ in pairs])
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
    batches, shared = getattr(data, "batch_sampler", None), ""
    sampler = getattr(batches, "sampler", None) or getattr(data, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if repeated > 0:
            raise ValueError(
                f"The loader's DistributedSampler repeats {repeated} examples, so that all of "
                f"{sampler.num_replicas} processes have as many, and they would count twice: use "
                "DataLoader(data, batch_sampler=ShardedBatches(data, batch_size)), which repeats "
                "none."
            )
    if ranks.size == 1:
        return False
    if isinstance(batches, ShardedBatches) and batches.num_ranks > 1:
        shared = f"{(len(batches.data), batches.batch_size, batches.shuffle, batches.seed)}"
    said = ranks.exchange([shared, _whole_data_set(data)])
    of_shared = [one for one, _ in said]
    if not any(of_shared):
        refuse_same([one for _, one in said], "reads the same data set from end to end")
    elif len(set(of_shared)) > 1:
        told = ", ".join(f"rank {rank} {one or 'none'}" for rank, one in enumerate(of_shared))
        raise ValueError(
            "ShardedBatches must be the same on all ranks (length of the data, batch_size, "
            f"shuffle, seed): {told}."
        )
    return any(of_shared)


def refuse_same(marks: Sequence[str | None], how: str) -> None:
    """Refuse data of which two ranks have the same mark; None stands for unknown."""
    for rank, mark in enumerate(marks):
        other = marks.index(mark)
        if mark is not None and other < rank:
            raise ValueError(
                f"Rank {rank} {how} as rank {other}, so that every example would count several "
                "times: let the processes share the data, DataLoader(data, "
                "batch_sampler=ShardedBatches(data, batch_size)), or work on one process alone, "
                "within `laplace_debias.alone()`."
            )


def _whole_data_set(data: Any) -> str | None:
    """A text that tells a data set from another, if a loader reads all of it."""
    samplers = RandomSampler, SequentialSampler
    if not isinstance(data, DataLoader) or type(data.batch_sampler) is not BatchSampler:
        return None
    if type(data.sampler) not in samplers or len(data.sampler) != len(data.dataset):  # type: ignore[arg-type]
        return None
    size = len(data.sampler)  # type: ignore[arg-type]
    # Augmentation by torch draws the same numbers on all, and leaves the generator as it was.
    with Randomness(torch.Generator().manual_seed(0)):
        some = [data.dataset[index] for index in range(0, size, max(1, size // _FEW))]
    entries = [x for x in tree_leaves(some) if isinstance(x, (Tensor, np.ndarray, int))]
    return f"{size} {[sum_of_bits(torch.as_tensor(x)) for x in entries]}" if size else None
