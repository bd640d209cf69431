"""The number of training examples, inferred from a loader's sampler if possible."""

from collections.abc import Sized
from dataclasses import dataclass
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

from laplace_debias.curvature.data.shards import ShardedBatches, check_shared, has_uneven_shards
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import process_group

# The length of these samplers is the number of examples.
_COUNTED_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler)
# The allowed relative difference between a sum of weights and a whole number. Weights that were
# scaled in single precision do not sum exactly to a whole number.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class TrainingSize:
    """N, the number of training examples of a fit.

    Attributes:
        num_data: N, or None if N is the number of examples that the fit reads.
        is_inferred: Whether N was inferred from a loader's sampler.
        must_match_read: Whether the fit reads the whole loader, so that it must read exactly N
            examples.
        is_shared: Whether several processes share the data through `ShardedBatches`.
    """

    num_data: int | None
    is_inferred: bool = False
    must_match_read: bool = False
    is_shared: bool = False

    def after_reading(self, weight: float) -> int:
        """Determine N, given the total weight of the examples that the fit has read.

        Raises:
            ValueError: If the total weight is not a whole number, up to rounding, or is not the
                required number.
        """
        number = round(weight)
        is_whole = number > 0 and abs(weight - number) <= _ROUNDING * weight
        if self.num_data is None:
            if not is_whole:
                raise ValueError(
                    f"The weights of the examples sum to {weight:.10g}, but the number of training "
                    "examples must be a positive whole number. Pass `num_data=`, the number of "
                    "training examples that the weights represent."
                )
            return number
        if self.must_match_read and not (is_whole and self.num_data == number):
            raise ValueError(
                "According to the loader's sampler, the number of training examples is "
                f"{self.num_data}, but the loader yielded {weight:.10g}. Pass `num_data=`, the "
                "number of training examples."
            )
        return self.num_data


def training_size(
    loader: Any, num_data: SupportsIndex | None, mode: str, reads_whole_loader: bool
) -> TrainingSize:
    """Determine N, which is passed, inferred from the loader, or counted during the fit.

    Raises:
        ValueError: If the fit reads only a part of the data and the size of the whole data cannot
            be inferred, or if the loader leaves out examples in every pass.
    """
    is_shared = check_shared(process_group(), loader)
    if num_data is not None:
        return TrainingSize(whole(num_data, "num_data"), is_shared=is_shared)
    inferred = dataset_size(loader)
    if inferred is None and not reads_whole_loader:
        raise ValueError(
            f'`mode="{mode}"` uses only part of the data, and the number of training examples '
            "cannot be inferred from this loader. Pass `num_data=`, the number of training "
            "examples."
        )
    # The loader's own `drop_last` is not used, because it is False if a batch sampler was passed.
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler and batches.drop_last and isinstance(sampler, Sized):
        num_examples = len(sampler)
        num_dropped = num_examples % batches.batch_size
        if reads_whole_loader and num_dropped:
            raise ValueError(
                f'`mode="{mode}"` uses all data, but every pass of this loader leaves out '
                f"{num_dropped} of its {num_examples} examples (`drop_last=True`). Use "
                "`drop_last=False`. To scale the curvature to all examples instead, pass "
                f"`num_data={num_examples}`."
            )
    return TrainingSize(
        inferred, is_inferred=True, must_match_read=reads_whole_loader, is_shared=is_shared
    )


def dataset_size(loader: Any) -> int | None:
    """Infer the number of training examples from a plain `DataLoader`'s sampler.

    Returns:
        The number, or None if it cannot be inferred, as for a list, a stream or a user-defined
        sampler. The examples are then counted in a pass over all data.

    Raises:
        ValueError: In the same cases as `check_sampler`.
    """
    check_sampler(loader)
    if not _has_sampler(loader):
        return None
    batches = loader.batch_sampler
    if isinstance(batches, ShardedBatches):
        return batches.num_examples
    sampler = sampler_of(loader)
    if type(batches) is BatchSampler and type(sampler) in _COUNTED_SAMPLERS:
        return len(sampler)
    return None


def check_sampler(loader: Any) -> None:
    """Require that the sampler of a `DataLoader` yields every example once per pass.

    Raises:
        ValueError: If the sampler draws with replacement, draws only a part of the data, or divides
            the data among processes so that examples are repeated or left out.
    """
    fault = _fault_of_split(loader) or fault_of_draws(sampler_of(loader))
    if fault is not None:
        raise ValueError(
            "The number of training examples cannot be inferred, because the "
            f"loader's {fault}. Pass `num_data=`, the size "
            "of the full training set. The fit multiplies the mean curvature of the "
            "loader's examples by this number."
        )


def check_held_out_sampler(loader: Any) -> None:
    """Require that the sampler of a `DataLoader` yields no held-out example twice per pass.

    In a single process, the sampler may yield only a part of the data, unless it draws with
    weights.

    Raises:
        ValueError: If the sampler draws with replacement or with weights, or divides the data among
            several processes so that examples are repeated or left out.
    """
    is_alone = process_group().size == 1
    fault = None if is_alone else _fault_of_split(loader)
    fault = fault or fault_of_draws(sampler_of(loader), allows_parts=is_alone)
    if fault is not None:
        raise repeated_held_out(fault)


def repeated_held_out(fault: str) -> ValueError:
    """Return the error for a sampler that repeats or prefers some of the held-out examples.

    Args:
        fault: The name of the sampler and what it does, from `fault_of_draws`.
    """
    return ValueError(
        f"The loader's {fault}, but held-out data must contain each example once. Otherwise, "
        "metrics describe different data, and their intervals are too narrow. Pass a loader "
        "without this sampler, such as DataLoader(data, batch_size=100)."
    )


def sampler_of(loader: Any) -> Any:
    """Return the sampler that draws the indices of a `DataLoader`, or None for other data."""
    if not _has_sampler(loader):
        return None
    return inner_sampler(loader)


def inner_sampler(loader: Any) -> Any:
    """Return the loader's sampler, unwrapped from the batch samplers of accelerate."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", loader.sampler)


def fault_of_draws(sampler: Any, *, allows_parts: bool = False) -> str | None:
    """Describe a sampler that does not draw every example once per pass.

    Args:
        sampler: The sampler.
        allows_parts: Whether the sampler may draw a part of the data without weights.

    Returns:
        The name of the sampler and what it does, or None if it draws every example once.
    """
    if isinstance(sampler, RandomSampler):
        num_examples = len(sampler.data_source)
        is_allowed_part = allows_parts and sampler.num_samples < num_examples
    elif isinstance(sampler, WeightedRandomSampler):
        num_examples = len(sampler.weights)
        is_allowed_part = False
    else:
        return None
    draws = f"{type(sampler).__name__} draws {sampler.num_samples} of {num_examples} examples"
    if sampler.replacement:
        return f"{draws} with replacement"
    if sampler.num_samples == num_examples or is_allowed_part:
        return None
    return f"{draws} in each pass"


def _fault_of_split(loader: Any) -> str | None:
    """Describe a sampler that repeats or leaves out examples as it splits them over processes."""
    if not _has_sampler(loader):
        return None
    batches = loader.batch_sampler
    if isinstance(batches, ShardedBatches) and batches.num_ranks != process_group().size:
        return (
            f"{type(batches).__name__} is for {batches.num_ranks} processes, but "
            f"{process_group().size} take part"
        )
    sampler = sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return (
            f"{type(sampler).__name__} splits the data over {sampler.num_replicas} processes, and "
            "repeats or drops examples to make the parts equal "
            "(`batch_sampler=ShardedBatches(data, batch_size)` does not)"
        )
    if has_uneven_shards(batches) and batches.drop_last:
        return (
            f"{type(batches).__name__} leaves out examples so that all {batches.num_processes} "
            "processes get the same number of examples (`drop_last=True`)"
        )
    return None


def _has_sampler(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
