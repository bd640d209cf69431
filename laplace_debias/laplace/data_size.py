"""N, the number of training examples, and how processes agree about data before they share it."""

from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.shards import ShardedBatches, check_shared
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import Ranks, current

_TELL_BY_LENGTH = (SequentialSampler, RandomSampler, SubsetRandomSampler)


@dataclass(frozen=True)
class Expected:
    """The N of a fit; None for the number of examples that the fit sees.

    A pass over all data must confirm an N that a loader told.
    """

    num_data: int | None
    is_told: bool = False
    is_whole: bool = False
    is_shared: bool = False

    def over(self, ranks: Ranks) -> "Expected":
        """N of several processes: the sum of what their loaders tell, or what all were given."""
        sizes = ranks.exchange(self.num_data)
        if self.is_told:
            return replace(self, num_data=None if None in sizes else sum(sizes))
        if len(set(sizes)) > 1:
            raise ValueError(
                f"num_data differs between the ranks, {sizes}: pass the number of training "
                "examples of all of them together, on each."
            )
        return self

    def given(self, num_seen: float) -> int:
        """N, once the fit has seen its data, of which it is the sum of weights."""
        if self.num_data is None:
            if num_seen != int(num_seen):
                raise ValueError(
                    f"The weights of the examples sum to {num_seen:.10g}: pass num_data=, the "
                    "number of training examples that they stand for."
                )
            return int(num_seen)
        if self.is_told and self.is_whole and num_seen != self.num_data:
            raise ValueError(
                f"The loader tells of {self.num_data} training examples, but the fit saw "
                f"{num_seen:.10g}: pass num_data=, the number of training examples. Nothing was "
                "fitted."
            )
        return self.num_data


def expected_of_loader(loader: Any, num_data: SupportsIndex | None, mode: str) -> Expected:
    """The N of a fit that reads a loader: given, told, or counted if it reads all of it."""
    is_shared = check_shared(current(), loader)
    if num_data is not None:
        return Expected(whole(num_data, "num_data"), is_shared=is_shared)
    told = told_by(loader)
    if told is None and mode != "full":
        raise ValueError(
            f'mode="{mode}" sees a part of the data, and the loader does not tell how many '
            "examples there are in all: pass num_data=, the number of training examples."
        )
    size = int(getattr(loader, "batch_size", None) or 1)
    if mode == "full" and told and getattr(loader, "drop_last", False) and told % size:
        raise ValueError(
            f'mode="full" sees all data, but every pass of this loader leaves out {told % size} of '
            f"its {told} examples (drop_last=True): use drop_last=False, or pass "
            f"num_data={told} to let those seen stand for all."
        )
    return Expected(told, True, mode == "full", is_shared)


def told_by(loader: Any) -> int | None:
    """The number of training examples, as the sampler of a plain `DataLoader` tells it.

    None for anything else, such as a list, a stream or a sampler of the user's own: a pass over
    all data counts these.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    sampler, wrong = getattr(batches, "sampler", loader.sampler), ""
    if isinstance(batches, ShardedBatches):
        if batches.num_ranks == current().size:
            return batches.num_examples
        wrong = f"is for {batches.num_ranks} processes, of which {current().size} take part"
    elif isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        wrong = (
            f"splits the data over {sampler.num_replicas} processes, padded or cut to equal parts "
            "(batch_sampler=ShardedBatches(data, batch_size) does neither)"
        )
    elif isinstance(sampler, (RandomSampler, WeightedRandomSampler)):
        of_all: Any = sampler.data_source if isinstance(sampler, RandomSampler) else sampler.weights
        if sampler.replacement or sampler.num_samples != len(of_all):
            how = "with replacement" if sampler.replacement else "anew in every pass"
            wrong = f"draws {sampler.num_samples} out of {len(of_all)} examples {how}"
    if wrong:
        which = batches if isinstance(batches, ShardedBatches) else sampler
        raise ValueError(
            "The loader does not tell the number of training examples: its "
            f"{type(which).__name__} {wrong}. Pass num_data=, the number of training examples; the "
            "curvature is the mean over the examples that the loader gives."
        )
    is_plain = type(batches) is BatchSampler and type(sampler) in _TELL_BY_LENGTH
    return len(sampler) if is_plain else None  # type: ignore[arg-type]


def check_held_out(*data: Batches) -> None:
    """Require held-out data that the processes share, where there are several."""
    ranks = current()
    if ranks.size > 1:
        for loader in data:
            check_shared(ranks, loader)
            told_by(loader)
