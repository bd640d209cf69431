"""Several processes that share one piece of work: sums over them, and errors that reach all.

`current()` is nothing without a process group of `torch.distributed`: `ALONE`, whose methods give
back what they are given. With one it is the ranks of that group. Numbers travel through the group's
collectives, agreement and errors through its store (see `agreement`).

Sums are over all ranks, in the tensors' dtype, and the same bits on each of them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laplace_debias.system.agreement import Agreement
from laplace_debias.system.buckets import buckets, lower_filled, packed, upper, upper_sizes
from laplace_debias.system.workers import telling_of_lost_workers

Key = TypeVar("Key", bound=Hashable)
# Of each key some tensors; None stands for one that there is not.
Parts = Mapping[Key, Sequence[Tensor | None]]
Shared = dict[Key, tuple[Tensor | None, ...]]

_IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=False)


class Ranks:
    """The processes that share the work: here one alone.

    Attributes:
        rank: Which one this is.
        size: How many there are.
    """

    rank = 0
    size = 1

    def exchange(self, value: Any) -> list[Any]:
        """What every rank says, in their order; an agreement that none has failed.

        Args:
            value: Anything that JSON can hold, a few kilobytes at most.

        Raises:
            Exception: The error of the rank that has failed, with its number; see `agreement`.
        """
        return [value]

    def unlike_first(self, value: Any) -> list[int]:
        """The ranks that say something else than rank 0; arguments and errors as `exchange`."""
        said = self.exchange(value)
        return [rank for rank, of_rank in enumerate(said) if of_rank != said[0]]

    def check(self) -> None:
        """Raise if it is known that another rank has failed; costs no message."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place; raises as `exchange`."""

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """Sum symmetric matrices (or vectors) to one rank each.

        Args:
            sums: `[..., d, d]`, of which the upper triangle travels, or `[d]`; the same keys in the
                same order on all ranks.
            owners: The rank that each is summed to.

        Returns:
            Those that this rank owns.

        Raises:
            Exception: As `exchange`.
        """
        return dict(sums)

    def share(self, parts: Parts, owners: Mapping[Key, int]) -> Shared:
        """What each owner has, on all ranks.

        Args:
            parts: What this rank owns.
            owners: Which rank owns what; the same keys in the same order on all ranks.

        Raises:
            Exception: As `exchange`.
        """
        return {key: tuple(parts[key]) for key in owners}

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Tensors of all ranks, each joined along the first dimension in the order of ranks.

        Args:
            tensors: This rank's rows; None if it has none.

        Returns:
            The joined rows; None if no rank has any.

        Raises:
            Exception: As `exchange`.
        """
        return None if tensors is None else list(tensors)

    def on_first(self, rows: Tensor) -> Tensor | None:
        """Rows of all ranks, joined in their order, on rank 0; None on the others.

        Raises:
            Exception: As `exchange`.
        """
        return rows

    def from_rank(self, value: Any, rank: int) -> Any:
        """What one rank has, pickled; raises as `exchange`."""
        return value

    def explained(self) -> AbstractContextManager[None]:
        """Collectives of other libraries are within: an error in them says which rank is gone."""
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, pickled, in their order; raises as `exchange`."""
        return [value]


ALONE = Ranks()


class Group(Ranks):
    """The ranks of a process group.

    Args:
        agreement: How they agree.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.rank = agreement.rank
        self.size = agreement.size
        self.agreement = agreement

    def exchange(self, value: Any) -> list[Any]:
        """As `Ranks.exchange`."""
        return self.agreement.exchange(value)

    def check(self) -> None:
        """As `Ranks.check`."""
        self.agreement.check()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """As `Ranks.sum`."""
        self.exchange(None)
        for bucket in buckets(tensors):
            flat = packed(bucket)
            self._finish(dist.all_reduce(flat, async_op=True))
            _unpack(flat, bucket)

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """As `Ranks.sum_to_owners`."""
        self.exchange(None)
        found: dict[Key, Tensor] = {}
        for owner in range(self.size):
            keys = [key for key in sums if owners[key] == owner]
            for bucket in buckets([sums[key] for key in keys], upper_sizes):
                flat = torch.cat([upper(x) for x in bucket])
                self._finish(dist.reduce(flat, owner, async_op=True))
                some, keys = keys[: len(bucket)], keys[len(bucket) :]
                if owner == self.rank:
                    of_each = flat.split([upper_sizes(x) for x in bucket])
                    found |= {
                        key: lower_filled(part, like)
                        for key, part, like in zip(some, of_each, bucket, strict=True)
                    }
        return {key: found[key] for key in sums if key in found}

    def share(self, parts: Parts, owners: Mapping[Key, int]) -> Shared:
        """As `Ranks.share`."""
        mine = [[_spec(x) for x in parts[key]] for key in owners if owners[key] == self.rank]
        specs = [iter(of_rank) for of_rank in self.exchange(mine)]
        here = {x.device.type: x.device for of in parts.values() for x in of if x is not None}
        shared: dict[Key, tuple[Tensor | None, ...]] = {}
        for key, owner in owners.items():
            of_key = next(specs[owner])
            if owner == self.rank:
                own = [None if x is None else x.contiguous() for x in parts[key]]
                shared[key] = tuple(own)
            else:
                shared[key] = tuple(_empty(spec, here) for spec in of_key)
        for owner in range(self.size):
            of_owner = [x for key in owners if owners[key] == owner for x in shared[key]]
            for bucket in buckets([x for x in of_owner if x is not None]):
                flat = packed(bucket)
                self._finish(dist.broadcast(flat, owner, async_op=True))
                if owner != self.rank:
                    _unpack(flat, bucket)
        return shared

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """As `Ranks.on_all`."""
        owners = {rank: rank for rank in range(self.size)}
        of_ranks = self.share({self.rank: tensors or ()}, owners)
        some = [of_rank for of_rank in of_ranks.values() if of_rank]
        return [torch.cat(parts) for parts in zip(*some, strict=True)] if some else None

    def on_first(self, rows: Tensor) -> Tensor | None:
        """As `Ranks.on_first`."""
        counts = self.exchange(len(rows))
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        is_first = self.rank == 0
        found = [torch.empty_like(padded) for _ in counts] if is_first else None
        self._finish(dist.gather(padded, found, 0, async_op=True))
        if found is None:
            return None
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def from_rank(self, value: Any, rank: int) -> Any:
        """As `Ranks.from_rank`."""
        self.exchange(None)
        box = [value]
        dist.broadcast_object_list(box, rank)
        return box[0]

    def explained(self) -> AbstractContextManager[None]:
        """As `Ranks.explained`."""
        return self.agreement.explained()

    def gather(self, value: Any) -> list[Any]:
        """As `Ranks.gather`."""
        self.exchange(None)
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def _finish(self, work: Any) -> None:
        """Wait for a collective, as long as all ranks are there."""
        self.agreement.finish(work)


def current() -> Ranks:
    """The ranks that share the work: those of torch's default process group, or `ALONE`."""
    if _IS_ALONE.get() or not dist.is_available() or not dist.is_initialized():
        return ALONE
    return ALONE if dist.get_world_size() == 1 else Group(Agreement.of_default_group())


@contextmanager
def alone() -> Iterator[None]:
    """Work on this process's data alone, although there is a process group.

    Without it the methods that read data (`fit`, `tune`, `evaluate`, `save`, curvature operators)
    must be called on every rank, and are of all ranks' data together.

    Example:
        >>> from laplace_debias import alone
        >>> with alone():
        ...     pass  # la.fit(loader) here is a fit of this process's loader
    """
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


def all_within(what: str) -> AbstractContextManager[None]:
    """All ranks are within: an error on one of them is raised on all.

    Args:
        what: What messages call it.
    """
    ranks = current()
    return ranks.agreement.over(what) if isinstance(ranks, Group) else nullcontext()


@contextmanager
def together(what: str) -> Iterator[None]:
    """What all ranks do, a block or a decorated function: an error on one is raised on all.

    Args:
        what: What messages call it.
    """
    with all_within(what), telling_of_lost_workers():
        yield


def refuse_ranks(what: str, instead: str) -> None:
    """Refuse what is not there for several processes.

    Args:
        what: What it is.
        instead: What to do.

    Raises:
        NotImplementedError: If several processes share the work.
    """
    if current().size > 1:
        raise NotImplementedError(
            f"{what} is not there for data that several processes share ({instead}): use it on one "
            "process's data, within `laplace_debias.alone()`."
        )


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _spec(tensor: Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    return [list(tensor.shape), str(tensor.dtype).partition(".")[2], tensor.device.type]


def _empty(spec: list[Any] | None, here: Mapping[str, torch.device]) -> Tensor | None:
    """Room for another rank's tensor, on a device of the same kind.

    A group may have collectives of their own for each kind (`cpu:gloo,cuda:nccl`): ranks that take
    different ones wait for each other for ever.

    Args:
        spec: As the owner gave it.
        here: The devices that this rank uses, by their kinds.
    """
    if spec is None:
        return None
    shape, dtype, kind = spec
    device = here.get(kind)
    if device is None:
        device = torch.device(f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
