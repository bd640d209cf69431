"""Processes that share their work: sums over the processes, and errors on all of them.

`process_group()` returns the ranks of torch's process group. Without a process group, it returns
`ALONE`, whose methods return their arguments.

All ranks make the same exchanges in the same order. A rank that fails makes one more exchange, in
which it sends its error. The other ranks receive this error instead of the value that they are
waiting for, at the latest at the end of a pass. If a rank has disappeared, the timeout of the
process group detects it.
"""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laplace_debias.system.errors import RankError, collective_errors
from laplace_debias.system.gathering import IS_ALONE, join_others

Key = TypeVar("Key", bound=Hashable)
# The tensors of each key; None marks a missing tensor.
TensorsByKey = Mapping[Key, Sequence[Tensor | None]]
Shared = dict[Key, tuple[Tensor | None, ...]]
# The shape, the dtype and the device type of a tensor.
Spec = tuple[torch.Size, torch.dtype, str]

# If a rank raises an error of one of these types, the other ranks raise an error of the same type.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError, RuntimeError)
}
# An event for the current collective call. It is set once the other ranks have left the call,
# because an error then need not be sent to them.
_HAS_LEFT: ContextVar[Event | None] = ContextVar("has_left", default=None)


class Ranks:
    """The processes that share the work. This base class represents a single process."""

    rank = 0
    size = 1

    def exchange(self, value: Any) -> list[Any]:
        """Collect a value from every rank, in the order of the ranks.

        If a rank has failed, an error of the same type is raised, or a `RankError` if the type is
        not a common one. The message names the rank.
        """
        return [value]

    def require_same(self, **marks: Any) -> None:
        """Raise an error unless the given values are the same on all ranks.

        A value can be a function that computes it, which is called only if there are several ranks.
        """

    def from_rank(self, value: Any, rank: int) -> Any:
        """Return the value that one rank passed; errors are the same as for `exchange`."""
        return self.exchange(value if rank == self.rank else None)[rank]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks in place; every rank gets the same bits."""

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """Sum each tensor to its owner; all ranks have the same keys in the same order."""
        return dict(sums)

    def share(self, owned: TensorsByKey, owners: Mapping[Key, int]) -> Shared:
        """Send each owner's tensors to all ranks, which have the same keys in the same order."""
        return {key: tuple(owned[key]) for key in owners}

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return the rows of all ranks, in the order of the ranks, or None if no rank has rows."""
        return None if tensors is None else list(tensors)


ALONE = Ranks()


class Group(Ranks):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def exchange(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Collect a value of every rank; a rank with an error sends the error instead.

        A rank that sends an error does not raise the errors of other ranks.
        """
        failure = None if error is None else (type(error).__name__, str(error))
        by_rank: list[Any] = [None] * self.size
        with _leave_on_errors():
            join_others()
            dist.all_gather_object(by_rank, (failure, value))
        for rank, (failure_of_rank, _) in enumerate(by_rank):
            if failure_of_rank is None:
                continue
            _leave()
            if error is None:
                kind, text = failure_of_rank
                raise _KINDS.get(kind, RankError)(f"Rank {rank} failed with {kind}: {text}")
        return [value_of_rank for _, value_of_rank in by_rank]

    def require_same(self, **marks: Any) -> None:
        """Require that marks have the same string form on all ranks."""
        texts = {}
        for name, mark in marks.items():
            value = mark() if callable(mark) else mark
            # Ignore line breaks and the widths of spaces.
            texts[name] = " ".join(str(value).split())
        by_rank = self.exchange(texts)
        for name, first_text in by_rank[0].items():
            for rank, texts_of_rank in enumerate(by_rank):
                if texts_of_rank[name] != first_text:
                    raise ValueError(
                        f"{name} differs between the ranks: it is {first_text} on rank 0, but "
                        f"{texts_of_rank[name]} on rank {rank}. Pass the same value on every "
                        "rank. For generators, use the same seed."
                    )

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks in place; every rank gets the same bits."""
        self.exchange(None)
        for tensor in tensors:
            total = tensor.contiguous()
            with _leave_on_errors():
                dist.all_reduce(total)
            if total is not tensor:
                tensor.copy_(total)

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """Sum each tensor to its owner; all ranks have the same keys in the same order."""
        self.exchange(None)
        totals: dict[Key, Tensor] = {}
        for key, summand in sums.items():
            total = summand.clone(memory_format=torch.contiguous_format)
            with _leave_on_errors():
                dist.reduce(total, owners[key])
            if owners[key] == self.rank:
                totals[key] = total
        return totals

    def share(self, owned: TensorsByKey, owners: Mapping[Key, int]) -> Shared:
        """Send each owner's tensors to all ranks, which have the same keys in the same order."""
        # First exchange the shapes, so that the other ranks can allocate memory for the tensors.
        own_keys = [key for key in owners if owners[key] == self.rank]
        own_specs = [[_spec(tensor) for tensor in owned[key]] for key in own_keys]
        # The specs of each owner are in the order of its keys.
        specs_by_rank = [iter(specs) for specs in self.exchange(own_specs)]
        shared: Shared = {}
        for key, owner in owners.items():
            specs = next(specs_by_rank[owner])
            if owner == self.rank:
                shared[key] = tuple(None if x is None else x.contiguous() for x in owned[key])
            else:
                shared[key] = tuple(map(_empty, specs))
            for tensor in shared[key]:
                if tensor is not None:
                    with _leave_on_errors():
                        dist.broadcast(tensor, owner)
        return shared

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return the rows of all ranks, in the order of the ranks, or None if no rank has rows."""
        owners = {rank: rank for rank in range(self.size)}
        shared = self.share({self.rank: tensors or ()}, owners)
        by_rank = [tensors_of_rank for tensors_of_rank in shared.values() if tensors_of_rank]
        if not by_rank:
            return None
        return [torch.cat(rows) for rows in zip(*by_rank, strict=True)]


def process_group() -> Ranks:
    """Return the ranks of torch's process group, which share the work, or `ALONE`."""
    if IS_ALONE.get() or not dist.is_available() or not dist.is_initialized():
        return ALONE
    if dist.get_world_size() == 1:
        return ALONE
    return Group()


@contextmanager
def alone() -> Iterator[None]:
    """Work only with the data of this process, even if there is a process group.

    Outside of this context, the methods that read data (`fit`, `tune`, `evaluate`, `save`,
    curvature operators) must be called on every rank, and work on the data of all ranks together. A
    thread that is started within the context is not part of it, and must enter `alone` itself.

    Example:
        >>> from laplace_debias import alone
        >>> with alone():
        ...     pass  # la.fit(loader) here is a fit of this process's loader
    """
    token = IS_ALONE.set(True)
    try:
        yield
    finally:
        IS_ALONE.reset(token)


def check_joined() -> None:
    """Raise an error if a launcher started several processes, but there is no process group.

    Within `alone()`, no process group is needed.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    is_joined = IS_ALONE.get() or (dist.is_available() and dist.is_initialized())
    if "RANK" in os.environ and size not in ("0", "1") and not is_joined:
        raise RuntimeError(
            f"The environment variable WORLD_SIZE is {size}, but there is no process group, so "
            "each process would do all of the work. Call torch.distributed.init_process_group() "
            "first, work within laplace_debias.alone(), or unset RANK and WORLD_SIZE."
        )


@contextmanager
def collective(verb: str) -> Iterator[None]:
    """Run a block on all ranks together; an error on one rank is raised on all of them.

    The block is named by `verb`. A collective block within another one is part of the outer block.
    """
    ranks = process_group()
    if not isinstance(ranks, Group) or _HAS_LEFT.get() is not None:
        yield
        return
    has_left = Event()
    token = _HAS_LEFT.set(has_left)
    try:
        verbs = ranks.exchange(verb)
        if len(set(verbs)) > 1:
            listed = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(verbs))
            raise RankError(
                f"The ranks made different calls: {listed}. Make the same calls in the same "
                "order on every rank. Put calls that only one rank makes inside "
                "`laplace_debias.alone()`."
            )
        yield
        ranks.exchange(None)
    except BaseException as error:
        if not has_left.is_set():
            # This rank raises its own error, so ignore errors of the exchange.
            with suppress(RankError):
                ranks.exchange(None, error)
        raise
    finally:
        _HAS_LEFT.reset(token)


def refuse_ranks(subject: str, advice: str) -> None:
    """Raise an error for a method that does not support data divided among processes."""
    if process_group().size > 1:
        raise NotImplementedError(
            f"{subject} is not supported for data that is divided among several "
            f"processes ({advice}). Call it inside `laplace_debias.alone()`, with the "
            "data of a single process."
        )


def _leave() -> None:
    """Record that the ranks separate here, so that a later error is not sent to the other ranks."""
    has_left = _HAS_LEFT.get()
    if has_left is not None:
        has_left.set()


@contextmanager
def _leave_on_errors() -> Iterator[None]:
    """Explain errors of a collective operation, after which the ranks are separate."""
    try:
        with collective_errors():
            yield
    except RankError:
        _leave()
        raise


def _spec(tensor: Tensor | None) -> Spec | None:
    """Return the shape, the dtype and the device type of a tensor."""
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device.type


def _empty(spec: Spec | None) -> Tensor | None:
    """Allocate memory to receive another rank's tensor, on this rank's device of the same type."""
    if spec is None:
        return None
    shape, dtype, kind = spec
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    return torch.empty(shape, dtype=dtype, device=device)
