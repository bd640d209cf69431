"""N, the number of training examples: what a loader tells of it, and what a fit makes of that."""

import itertools
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_debias.curvature.network.shards import ShardedBatches
from laplace_debias.laplace.posterior_range import check_num_data
from laplace_debias.system.ranks import Ranks, current


@dataclass(frozen=True)
class Known:
    """A loader reads this many training examples, each of them once.

    Attributes:
        num_examples: How many.
        num_dropped: How many of them a pass leaves out, as `drop_last=True` does.
        batch_size: How many a batch holds at most; None if it is not known.
    """

    num_examples: int
    num_dropped: int = 0
    batch_size: int | None = None


@dataclass(frozen=True)
class Supposed:
    """A loader names a number of examples, but only a pass over all of them can confirm it."""

    num_examples: int


@dataclass(frozen=True)
class Untold:
    """A loader does not tell; a pass over all data counts the examples."""


@dataclass(frozen=True)
class Misleading:
    """A pass shows another number of examples than there are, or some of them twice.

    Attributes:
        why: The sampler's name, and what it does.
    """

    why: str


DataSize = Known | Supposed | Untold | Misleading


@dataclass(frozen=True)
class Expected:
    """The N of a fit, and how many examples the fit must see for it to be right.

    Attributes:
        num_data: N; None for the number seen.
        sees_all: Whether the fit must see `num_data` examples, no more and no fewer.
        most: How many it may see at most; None for any number.
    """

    num_data: int | None
    sees_all: bool = False
    most: int | None = None

    def over(self, ranks: Ranks) -> "Expected":
        """What the loaders of several processes tell together; an N that was given stands for all.

        Args:
            ranks: The processes.

        Raises:
            ValueError: If they were given different N.
        """
        of_ranks = [
            Expected(*of_rank)
            for of_rank in ranks.exchange([self.num_data, self.sees_all, self.most])
        ]
        if len(of_ranks) == 1:
            return self
        sizes = [of_rank.num_data for of_rank in of_ranks]
        if any(of_rank.is_given for of_rank in of_ranks):
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"num_data differs between the ranks, {sizes}: pass the number of training "
                    "examples of all of them together, on each."
                )
            return self
        if None in sizes:
            return Expected(None)
        most = [of_rank.most for of_rank in of_ranks]
        return Expected(
            sum(filter(None, sizes)),
            all(of_rank.sees_all for of_rank in of_ranks),
            None if None in most else sum(filter(None, most)),
        )

    @property
    def is_given(self) -> bool:
        """Whether N is what the user says, and not what a loader tells."""
        return self.num_data is not None and not self.sees_all and self.most is None

    def given(self, num_seen: int) -> int:
        """N, once the fit has seen its data.

        Args:
            num_seen: How many examples it saw.

        Raises:
            ValueError: If that contradicts what the loader told.
        """
        if self.num_data is None:
            return num_seen
        if self.sees_all and num_seen != self.num_data:
            raise ValueError(
                f"The loader tells of {self.num_data} training examples, but the fit saw "
                f"{num_seen}: pass num_data=, the number of training examples. Nothing was fitted."
            )
        if self.most is not None and num_seen > self.most:
            raise ValueError(
                f"The fit saw {num_seen} examples where the loader's batch size allows "
                f"{self.most}, so an entry of its data set is not one example, and the data set's "
                f"length, {self.num_data}, is not their number: pass num_data=, the number of "
                "training examples. Nothing was fitted."
            )
        return self.num_data


def expected_of_all(loader: Any, num_data: int | None) -> Expected:
    """The N of a fit that reads the whole loader.

    Args:
        loader: Any iterable of batches.
        num_data: N, if the user gave it: it holds, whatever the fit sees.

    Raises:
        ValueError: If the loader repeats, splits or leaves out examples and `num_data` is None.
    """
    if num_data is not None:
        return Expected(num_data)
    size = data_size(loader)
    refuse_misleading(size)
    if isinstance(size, Known) and size.num_dropped:
        raise ValueError(
            f'mode="full" sees all data, but every pass of this loader leaves out '
            f"{size.num_dropped} of its {size.num_examples} examples (drop_last=True): use "
            f"drop_last=False, or pass num_data={size.num_examples} to let those seen stand for "
            "all."
        )
    if isinstance(size, (Known, Supposed)):
        return Expected(size.num_examples, sees_all=True)
    return Expected(None)


def expected_of_some(loader: Any, num_data: int | None, mode: str, num_batches: int) -> Expected:
    """The N of a fit that reads the loader's first batches.

    Args:
        loader: Any iterable of batches.
        num_data: N, if the user gave it.
        mode: What the error calls the fit.
        num_batches: How many batches it reads.

    Raises:
        ValueError: If the loader does not tell N, or repeats or splits examples, and `num_data` is
            None.
    """
    if num_data is not None:
        return Expected(num_data)
    size = data_size(loader)
    refuse_misleading(size)
    if not isinstance(size, Known):
        raise ValueError(
            f'mode="{mode}" sees a part of the data, and the loader does not tell how many '
            "examples there are in all: pass num_data=, the number of training examples."
        )
    limits = [size.num_examples]
    if size.batch_size is not None:
        limits.append(num_batches * size.batch_size)
    return Expected(size.num_examples, most=min(limits))


def expected_of_given(data: Iterable[Any], num_data: SupportsIndex | None) -> Expected:
    """The N of a fit whose data are given, each for its purpose.

    Args:
        data: What it reads.
        num_data: N, if the user gave it; the number of examples that are seen if None.

    Raises:
        ValueError: If some data repeat or split examples and `num_data` is None; for an N that is
            out of range.
        TypeError: For an N that is not a whole number.
    """
    if num_data is not None:
        return Expected(check_num_data(num_data))
    for one in data:
        refuse_misleading(data_size(one))
    return Expected(None)


def refuse_misleading(size: DataSize) -> None:
    """Refuse a loader whose number of examples is not that of the training data.

    Raises:
        ValueError: For a `Misleading` size.
    """
    if isinstance(size, Misleading):
        raise ValueError(
            f"The loader does not tell the number of training examples: its {size.why}. Pass "
            "num_data=, the number of training examples; the curvature is the mean over the "
            "examples that the loader gives."
        )


def data_size(loader: Any) -> DataSize:
    """What a loader tells of the number of training examples, without reading it.

    A `DataLoader` tells by its sampler, which may take a part of the data set (a hold-out split);
    anything else only by a sampler of torch's that it has as `.sampler`: what lies in the
    `.dataset` of a loader of another kind may be shards.

    Args:
        loader: Any iterable of batches.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader):
        sampler = getattr(loader, "sampler", None)
        return _of_sampler(sampler, dataset) if isinstance(sampler, Sampler) else Untold()
    if isinstance(dataset, IterableDataset):
        # Each of several workers may go through all of it, so its length is no more than a claim,
        # and counting them no proof.
        size = Untold() if loader.batch_size is None else _supposed(dataset)
        if isinstance(size, Untold) and loader.num_workers > 1:
            return Misleading(
                f"data set, a stream ({type(dataset).__name__}), is read by {loader.num_workers} "
                "workers, and whether each reads a part of it or all is not known"
            )
        return size
    if loader.batch_sampler is None:
        # The data set's entries are batches already.
        size = _of_sampler(loader.sampler, dataset)
        return size if isinstance(size, Misleading) else Untold()
    return _of_batch_sampler(loader.batch_sampler, dataset)


def _of_batch_sampler(batches: Any, dataset: Any) -> DataSize:
    if type(batches) is ShardedBatches:
        if batches.num_ranks != current().size:
            return Misleading(
                f"ShardedBatches splits the data over {batches.num_ranks} processes, of which "
                f"{current().size} take part"
            )
        at_most = -(-batches.batch_size // batches.num_ranks)
        return Known(batches.num_examples, batch_size=at_most)
    if type(batches) is BatchSampler:
        size = _of_sampler(batches.sampler, dataset)
        if not isinstance(size, Known):
            return size
        dropped = size.num_examples % batches.batch_size if batches.drop_last else 0
        return Known(size.num_examples, dropped, batches.batch_size)
    if isinstance(batches, Sequence):
        return _of_indices(itertools.chain.from_iterable(batches), "list of batches")
    size = _of_sampler(getattr(batches, "sampler", None), dataset)
    return size if isinstance(size, Misleading) else _supposed(dataset)


def _of_sampler(sampler: Any, dataset: Any) -> DataSize:
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return Misleading(
            f"{name} splits the data over {sampler.num_replicas} processes, filled up with "
            f"repeated examples or cut to equal parts, and gives this one {len(sampler)} (use "
            "DataLoader(data, batch_sampler=ShardedBatches(data, batch_size)), which does neither)"
        )
    if isinstance(sampler, (RandomSampler, WeightedRandomSampler)) and _is_plain(sampler):
        drawn = sampler.num_samples
        of = _length(sampler.data_source if isinstance(sampler, RandomSampler) else sampler.weights)
        if sampler.replacement or drawn != of:
            how = "with replacement" if sampler.replacement else "anew in every pass"
            return Misleading(f"{name} draws {drawn} out of {of} examples {how}")
        return Known(drawn)
    if isinstance(sampler, SubsetRandomSampler) and _is_plain(sampler):
        return _of_indices(sampler.indices, name)
    if isinstance(sampler, (Sequence, Tensor, np.ndarray)):
        return _of_indices(sampler, f"sampler (a {name})")
    num_drawn, num_entries = _length(sampler), _length(dataset)
    if num_drawn is None:
        return _supposed(dataset)
    if isinstance(sampler, SequentialSampler) and _is_plain(sampler):
        return Known(num_drawn)
    if num_entries is None:
        return Supposed(num_drawn)
    if num_drawn == num_entries:
        return Known(num_drawn)
    return Misleading(
        f"{name} gives {num_drawn} examples, the data set has {num_entries}, and whether some "
        "repeat or another process has the rest is not known"
    )


def _of_indices(indices: Iterable[Any], name: str) -> DataSize:
    """Of entries that are listed one by one."""
    numbers = indices.tolist() if isinstance(indices, (Tensor, np.ndarray)) else list(indices)
    num_different = len(set(numbers))
    if num_different < len(numbers):
        return Misleading(
            f"{name} repeats examples: of {len(numbers)} indices {num_different} are different"
        )
    return Known(len(numbers))


def _supposed(dataset: Any) -> DataSize:
    num_entries = _length(dataset)
    return Untold() if num_entries is None else Supposed(num_entries)


def _is_plain(sampler: Sampler[Any]) -> bool:
    """Whether a sampler reads the data as torch's own class does."""
    of_torch = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(sampler).__iter__ in [kind.__iter__ for kind in of_torch]


def _length(source: Any) -> int | None:
    """The length, None if there is none."""
    if not isinstance(source, Sized):
        return None
    try:
        return len(source)
    except TypeError:  # What torch's samplers raise for a data set without a length.
        return None
