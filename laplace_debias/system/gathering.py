"""Temporarily gather parameters that are sharded over processes.

A sharded parameter is gathered by a collective operation, which all processes must join. However,
the processes read different data, so they need parameters in different orders and different numbers
of times. Therefore, a process announces the number of the parameter that it needs. In each round,
all processes gather the parameter that the lowest-ranked of them announced. Processes that need no
parameter wait, and join the gatherings of the others.
"""

import weakref
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laplace_debias.system.errors import collective_errors

IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=False)
"""Whether this process currently works on its own, although there is a process group."""

# Announced by a process that needs no parameter.
_WAITS = -1


class _Gatherings:
    """The sharded parameters of a process group, numbered in the same order on all processes."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.parameters: list[weakref.ref[Tensor]] = []
        self.numbers: dict[int, int] = {}
        self.device = torch.device("cpu")

    def number(self, parameter: Tensor) -> int | None:
        """Return the number that was assigned to a parameter, or None if it has no number."""
        number = self.numbers.get(id(parameter))
        if number is not None and self.parameters[number]() is parameter:
            return number
        return None

    def add(self, parameter: Tensor) -> None:
        if self.number(parameter) is None:
            self.numbers[id(parameter)] = len(self.parameters)
            self.parameters.append(weakref.ref(parameter))
            self.device = parameter.device

    def join(self, number: int) -> tuple[int, Tensor | None]:
        """Announce a number, and gather the parameter that the lowest rank announced.

        Returns the number and the value of that parameter, or `_WAITS` and None if all processes
        wait.

        Raises:
            RankError: If another process cannot be reached.
        """
        mine = torch.tensor([number], device=self.device)
        announced = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with collective_errors():
            dist.all_gather(announced, mine)
            first = next((int(a) for a in announced if int(a) != _WAITS), _WAITS)
            if first == _WAITS:
                return first, None
            parameter: Any = self.parameters[first]()
            return first, parameter.full_tensor()


_CURRENT: list[_Gatherings] = []


def _gatherings() -> _Gatherings:
    group = dist.group.WORLD
    if not _CURRENT or _CURRENT[0].group is not group:
        _CURRENT[:] = [_Gatherings(group)]
    return _CURRENT[0]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`, that is, each process holds only a part of it."""
    return hasattr(tensor, "full_tensor")


def number_parameter(parameter: Tensor) -> None:
    """Number a sharded parameter; all processes must number their parameters in the same order."""
    _gatherings().add(parameter)


def full_value(parameter: Tensor) -> Tensor:
    """Gather a sharded parameter. The other processes must also be gathering or exchanging values.

    Raises:
        RuntimeError: If the parameter has no number, or if the call is within `alone`.
    """
    sharded: Any = parameter
    with torch.no_grad():
        if dist.get_world_size() == 1:
            return sharded.full_tensor()
        if IS_ALONE.get():
            raise RuntimeError(
                "The model's parameters are sharded, so no single process can run the model within "
                "alone(). Call the method on all processes, outside of alone()."
            )
        gatherings = _gatherings()
        number = gatherings.number(parameter)
        if number is None:
            raise RuntimeError(
                "A parameter was sharded or moved after Laplace was built. Call fully_shard "
                "first, and then build Laplace."
            )
        while True:
            gathered, value = gatherings.join(number)
            if gathered == number and value is not None:
                return value


def join_others() -> None:
    """Take part in the other processes' gatherings until all processes have reached this call."""
    if not _CURRENT or _CURRENT[0].group is not dist.group.WORLD:
        return
    with torch.no_grad():
        while True:
            gathered, _ = _CURRENT[0].join(_WAITS)
            if gathered == _WAITS:
                return
