"""Split models made whole for a while: gathered once, given back when nobody needs them."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import nn

from laplace_debias.curvature.network import split_model
from laplace_debias.curvature.network.split_model import is_split
from laplace_debias.system.ranks import Ranks, all_within, current
from laplace_debias.system.threads import Lock

P = ParamSpec("P")
Result = TypeVar("Result")

_WHAT = "the gathering of a model that fully_shard split"


@dataclass(eq=False)
class _Held:
    """A gathered model.

    Attributes:
        model: The user's model.
        twin: Its twin with whole parameters.
        marks: Where the shards lay, and how often they had been changed.
        users: How many need it.
    """

    model: nn.Module
    twin: nn.Module
    marks: list[tuple[int, ...]]
    users: int = 0

    def check(self) -> None:
        """Require that the shards are those that were gathered.

        Raises:
            RuntimeError: Otherwise.
        """
        if split_model.marks(self.model) != self.marks:
            raise RuntimeError(
                "The model's parameters have changed since they were gathered: leave "
                "`gathered(model)` before you change them, and enter it again."
            )


_HELD: dict[int, _Held] = {}
_LOCK = Lock()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold the whole parameters of a model that `fully_shard` (FSDP2) has split over processes.

    `fit`, `predict` and every other method that computes with the model gathers it and lets it go
    at its end. All processes have to call it for that, `predict` too. Within this context the model
    is gathered once, `predict` sends nothing, and each process predicts what it wants.

    Each process then has the whole model in its memory, besides its shards. The model itself is not
    touched: its parameters stay split, and nothing is set or hooked on it. It must not be trained
    within. A model that is not split is taken as it is, and nothing is done.

    Args:
        model: The model that `Laplace` was given. All processes enter together.

    Raises:
        NotImplementedError: For mixed precision of parameters or outputs, offloading, a mesh of
            several dimensions or of another size than the process group, parameters that are not
            floating point.
        ValueError: If the ranks have different models.
        RuntimeError: If one of them is in another call, or gone; if the parameters have changed
            within.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, gathered
        >>> model = nn.Linear(2, 3)  # and then fully_shard(model)
        >>> x, y = torch.randn(8, 2), torch.randint(3, (8,))
        >>> la = Laplace(model).fit([(x, y)])
        >>> with gathered(model):
        ...     probs = [la.predict(part).probs for part in x.split(4)]
    """
    if not is_split(model):
        yield
        return
    held = None
    try:
        with _LOCK:
            found = _HELD.get(id(model)) or _Held(model, _gather(model), split_model.marks(model))
            found.check()
            _HELD[id(model)] = held = found
            held.users += 1
        yield
    finally:
        with _LOCK:
            if held is not None:
                held.users -= 1
                if held.users == 0:
                    del _HELD[id(model)]


def over_whole_model(
    of: Callable[..., nn.Module],
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A function within which a model is gathered.

    Args:
        of: The model, from the function's arguments.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Result:
            with gathered(of(*args, **kwargs)):
                return function(*args, **kwargs)

        return called

    return decorate


def without_split(model: nn.Module) -> nn.Module:
    """A model without `fully_shard`.

    Args:
        model: The user's model.

    Returns:
        The model itself if it is not split; its twin with whole parameters where it is gathered;
        otherwise one whose parameters have their shapes, dtypes and devices, and are NaN.
    """
    if not is_split(model):
        return model
    held = _HELD.get(id(model))
    if held is not None:
        return held.twin
    return split_model.twin(model, split_model.outline)


def with_own_values(model: nn.Module) -> nn.Module:
    """As `without_split`, but with this process's shards where the model is not gathered."""
    if not is_split(model) or id(model) in _HELD:
        return without_split(model)
    return split_model.twin(model, split_model.own_shard)


def with_own_parameters(model: nn.Module) -> nn.Module:
    """The model without `fully_shard`, with the parameters that it has, split or not."""
    if not is_split(model):
        return model
    return split_model.twin(model, lambda parameter: parameter)


@contextmanager
def with_all_ranks(model: nn.Module) -> Iterator[None]:
    """Processes that a model is split over are within, and hear of each other's errors.

    It is nothing for a model that is not split, or that is gathered.

    Args:
        model: The user's model.

    Raises:
        NotImplementedError: As `gathered`.
        ValueError: If the ranks have different models.
    """
    if not is_split(model) or id(model) in _HELD:
        yield
        return
    with all_within(_WHAT):
        ranks = current()
        split_model.check_gatherable(model, ranks.size)
        _check_alike(ranks, model)
        yield
        ranks.exchange(None)


def _gather(model: nn.Module) -> nn.Module:
    with with_all_ranks(model), current().explained():
        return split_model.twin(model, split_model.whole)


def _check_alike(ranks: Ranks, model: nn.Module) -> None:
    """Require the ranks to gather the same tensors.

    Raises:
        ValueError: Otherwise.
    """
    told = [
        [name, list(p.shape), str(p.dtype), str(getattr(p, "placements", None))]
        for name, p in model.named_parameters()
    ]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    for rank, other in enumerate(ranks.exchange(digest)):
        if other != digest:
            raise ValueError(
                f"The model that fully_shard split is not the same on ranks {ranks.rank} and "
                f"{rank}: names, shapes, dtypes or placements of its parameters differ. Build and "
                "split one model on all ranks."
            )
