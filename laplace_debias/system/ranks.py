"""Several processes that share one piece of work: sums over them, and errors that reach all.

`current()` is nothing without a process group of `torch.distributed`: `ALONE`, whose methods give
back what they are given. With one it is the ranks of that group.

All ranks make the same exchanges in the same order. A rank with an error makes one more exchange
with it, and the others find it in place of what they wait for: at the end of a pass at the latest.
One that is gone is found by the group's own timeout.
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

from laplace_debias.system.errors import RankError

Key = TypeVar("Key", bound=Hashable)
# Of each key some tensors; None stands for one that there is not.
Parts = Mapping[Key, Sequence[Tensor | None]]
Shared = dict[Key, tuple[Tensor | None, ...]]


# Errors of a rank that are raised as such on the others.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError, RuntimeError)
}
_IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=False)
# Of a verb of all ranks, set once the others have left it, and need not be told of an error.
_VERB: ContextVar[Event | None] = ContextVar("verb", default=None)


class Ranks:
    """The processes that share the work: here one alone."""

    rank = 0
    size = 1

    def exchange(self, value: Any) -> list[Any]:
        """Collects what every rank says, in their order; an agreement that none has failed.

        Otherwise it raises the error of the rank that has failed, with its number, or `RankError`.
        """
        return [value]

    def require_same(self, **marks: Any) -> None:
        """Require all ranks to have the same of something.

        A mark that is a function is called only where there are several ranks.
        """

    def from_rank(self, value: Any, rank: int) -> Any:
        """Gives what one rank says; raises as `exchange`."""
        return self.exchange(value if rank == self.rank else None)[rank]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place, to the same bits; raises as `exchange`."""

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """Sum tensors to one rank each; the keys are the same, in the same order, on all ranks."""
        return dict(sums)

    def share(self, parts: Parts, owners: Mapping[Key, int]) -> Shared:
        """Gives what each owner has, on all ranks, where keys are the same in the same order."""
        return {key: tuple(parts[key]) for key in owners}

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Rows of all ranks, joined in the order of ranks; None if no rank has any."""
        return None if tensors is None else list(tensors)


ALONE = Ranks()


class Group(Ranks):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def exchange(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """As `Ranks.exchange`; a rank with an error says that, and hears of no other's."""
        told = None if error is None else (type(error).__name__, str(error))
        said: list[Any] = [None] * self.size
        with _talking():
            dist.all_gather_object(said, (told, value))
        for rank, (of_rank, _) in enumerate(said):
            if of_rank is not None:
                _leave()
                if error is None:
                    kind, text = of_rank
                    raise _KINDS.get(kind, RankError)(f"Rank {rank} failed with {kind}: {text}")
        return [of_rank for _, of_rank in said]

    def require_same(self, **marks: Any) -> None:
        """As `Ranks.require_same`."""
        texts = {n: str(mark() if callable(mark) else mark) for n, mark in marks.items()}
        said = self.exchange({name: " ".join(text.split()) for name, text in texts.items()})
        for name, of_first in said[0].items():
            for rank, of_rank in enumerate(said):
                if of_rank[name] != of_first:
                    raise ValueError(
                        f"{name} differs between the ranks: {of_first} on rank 0, {of_rank[name]} "
                        f"on rank {rank}. All of them work on the same together: pass the same on "
                        "each, generators of one seed where something is drawn."
                    )

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """As `Ranks.sum`."""
        self.exchange(None)
        for tensor in tensors:
            total = tensor.contiguous()
            with _talking():
                dist.all_reduce(total)
            if total is not tensor:
                tensor.copy_(total)

    def sum_to_owners(self, sums: Mapping[Key, Tensor], owners: Mapping[Key, int]) -> dict:
        """As `Ranks.sum_to_owners`."""
        self.exchange(None)
        found: dict[Key, Tensor] = {}
        for key, of_rank in sums.items():
            total = of_rank.clone(memory_format=torch.contiguous_format)
            with _talking():
                dist.reduce(total, owners[key])
            if owners[key] == self.rank:
                found[key] = total
        return found

    def share(self, parts: Parts, owners: Mapping[Key, int]) -> Shared:
        """As `Ranks.share`."""
        mine = [
            [None if x is None else (x.shape, x.dtype, x.device.type) for x in parts[key]]
            for key in owners
            if owners[key] == self.rank
        ]
        specs = [iter(of_rank) for of_rank in self.exchange(mine)]
        shared: Shared = {}
        for key, owner in owners.items():
            of_key = next(specs[owner])
            if owner == self.rank:
                shared[key] = tuple(None if x is None else x.contiguous() for x in parts[key])
            else:
                shared[key] = tuple(map(_empty, of_key))
            for x in shared[key]:
                if x is not None:
                    with _talking():
                        dist.broadcast(x, owner)
        return shared

    def on_all(self, tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """As `Ranks.on_all`."""
        owners = {rank: rank for rank in range(self.size)}
        of_ranks = self.share({self.rank: tensors or ()}, owners)
        some = [of_rank for of_rank in of_ranks.values() if of_rank]
        return [torch.cat(parts) for parts in zip(*some, strict=True)] if some else None


def current() -> Ranks:
    """The ranks that share the work: those of torch's default process group, or `ALONE`."""
    if _IS_ALONE.get() or not dist.is_available() or not dist.is_initialized():
        return ALONE
    return ALONE if dist.get_world_size() == 1 else Group()


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


def check_joined() -> None:
    """Require a process group, or `alone()`, where a launcher has started several processes."""
    size = os.environ.get("WORLD_SIZE", "1")
    is_joined = _IS_ALONE.get() or (dist.is_available() and dist.is_initialized())
    if "RANK" in os.environ and size not in ("0", "1") and not is_joined:
        raise RuntimeError(
            f"WORLD_SIZE is {size} in the environment, but there is no process group, so each "
            "process would do the work of all: call torch.distributed.init_process_group() first; "
            "or work within laplace_debias.alone(), or unset RANK and WORLD_SIZE."
        )


@contextmanager
def together(what: str) -> Iterator[None]:
    """All ranks do this: an error of one is raised on all.

    Within another one it is part of that.
    """
    ranks = current()
    if not isinstance(ranks, Group) or _VERB.get() is not None:
        yield
        return
    verb = Event()
    token = _VERB.set(verb)
    try:
        names = ranks.exchange(what)
        if len(set(names)) > 1:
            told = ", ".join(f"rank {rank} in {name}" for rank, name in enumerate(names))
            raise RankError(
                f"The ranks are in different calls: {told}. All of them must make the same "
                "calls in the same order; those of one alone belong into "
                "`laplace_debias.alone()`."
            )
        yield
        ranks.exchange(None)
    except BaseException as error:
        if not verb.is_set():
            # On a rank that stops here, the error itself is what counts.
            with suppress(RankError):
                ranks.exchange(None, error)
        raise
    finally:
        _VERB.reset(token)


def refuse_ranks(what: str, instead: str) -> None:
    """Refuse what is not there for several processes."""
    if current().size > 1:
        raise NotImplementedError(
            f"{what} is not there for data that several processes share ({instead}): use it on one "
            "process's data, within `laplace_debias.alone()`."
        )


def _leave() -> None:
    """The ranks part: an error that follows on one of them reaches no other."""
    if (verb := _VERB.get()) is not None:
        verb.set()


@contextmanager
def _talking() -> Iterator[None]:
    """A collective is within."""
    try:
        yield
    except RuntimeError as error:
        _leave()
        raise RankError(
            f"The processes do not reach each other: {error}. One of them was killed, has failed "
            "or is elsewhere: look at the first error in their logs, and start all of them again."
        ) from error


def _empty(spec: tuple[torch.Size, torch.dtype, str] | None) -> Tensor | None:
    """Room for another rank's tensor, on a device of the same kind: collectives differ by kind."""
    if spec is None:
        return None
    shape, dtype, kind = spec
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    return torch.empty(shape, dtype=dtype, device=device)
