"""Locks, settings of torch and its global generator, which threads of a process share.

Nothing here is needed where each call works on tensors and copies of its own. It is needed for what
torch keeps once for all threads: the level of forward-mode differentiation, the switches of fused
kernels, the filters of warnings, the generator on the CPU. A `DataLoader` draws from that: a seed
for its workers in every pass, even without any; a seed for `shuffle=True`; and what its data set
draws to augment.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any

import torch


class Lock:
    """A re-entrant lock that can be copied with its owner: a copy is another lock, free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


FORWARD_MODE = threading.RLock()
"""Held while forward-mode derivatives are taken (`torch.func.jvp`), or such a function recorded.

torch has one level of forward-mode differentiation for the whole process: the first thread that
leaves it takes the tangents of all others with it, without an error.
"""

# Of all shared settings: it is held for the moment of a change alone.
_SETTINGS = threading.RLock()


class SharedSetting:
    """A setting of the process that several threads want at the same time.

    A context manager that saves a value, sets another and restores the first is wrong here: when
    two threads overlap, the second one saves what the first one has set, and restores that for
    good. So the first thread to come sets, and the last one to leave restores.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make = make
        self._num_holders = 0
        self._entered: tuple[AbstractContextManager, Context] | None = None

    def __enter__(self) -> None:
        with _SETTINGS:
            if self._entered is None:
                # Another thread may be the one to leave: context variables must not mind.
                manager, context = self._make(), copy_context()
                context.run(manager.__enter__)
                self._entered = manager, context
            self._num_holders += 1

    def __exit__(self, *error: object) -> None:
        with _SETTINGS:
            self._num_holders -= 1
            if self._num_holders == 0 and self._entered is not None:
                (manager, context), self._entered = self._entered, None
                context.run(manager.__exit__, None, None, None)


# Held while the global generator is exchanged: for the time of one batch's reading.
_GLOBAL = threading.RLock()


class Randomness:
    """Random numbers that stand in for torch's global generator on the CPU while it is entered.

    The global generator is afterwards as if nothing had been drawn. What another thread draws from
    it meanwhile is not its own sequence. Untouched are `random` and NumPy's generators.
    """

    def __init__(self, generator: torch.Generator) -> None:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        self._state = torch.Generator().manual_seed(int(seed)).get_state()

    def __enter__(self) -> None:
        _GLOBAL.acquire()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        _GLOBAL.release()
