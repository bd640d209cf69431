"""Locks, shared settings, and torch's global generator, which threads of a process share.

Nothing here is needed where each call works on tensors and copies of its own. It is needed for what
torch keeps once for all threads: the level of forward-mode differentiation, and the generator on
the CPU. A `DataLoader` draws from that: a seed
for its workers in every pass, even without any; a seed for `shuffle=True`; and what its data set
draws to augment.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from typing import Any

import torch


class Lock:
    """A re-entrant lock that can be copied with its owner; a copy is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


FORWARD_MODE = threading.RLock()
"""Lock for computing or recording forward-mode derivatives (`torch.func.jvp`).

torch has one level of forward-mode differentiation for the whole process. The first thread that
leaves this level discards the tangents of all other threads, without an error.
"""

GLOBAL_GENERATOR = threading.RLock()
"""Lock that is held while torch's global generator has another state.

This is the time in which a batch is read, or in which an estimator of scikit-learn trains.
"""


class Randomness:
    """A context in which random numbers replace torch's global generator.

    The global generator is afterwards as if nothing had been drawn. Another thread that draws from
    it meanwhile does not get its own sequence. `random` and NumPy's generators are not changed.
    """

    def __init__(self, generator: torch.Generator) -> None:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        self._state = torch.Generator().manual_seed(int(seed)).get_state()

    def __enter__(self) -> None:
        GLOBAL_GENERATOR.acquire()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        GLOBAL_GENERATOR.release()


# For all shared settings: it is locked only for the moment of a change.
_SETTINGS = threading.RLock()


class SharedSetting:
    """A setting of the process that several threads may change at once.

    A context manager that saves a value, sets another and restores the first is wrong here: when
    two threads overlap, the second one saves what the first one has set, and restores that for
    good. So the first thread to come sets, and the last one to leave restores.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make = make
        # By the thread, how many contexts it has entered that have not been left.
        self._holders = Counter[int]()
        self._entered: tuple[AbstractContextManager, Context] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Make the setting for the duration of a context."""
        # A context that was abandoned is left by whichever thread frees it.
        thread = threading.get_ident()
        self._enter(thread)
        try:
            yield
        finally:
            self._leave(thread)

    def is_made_by_this_thread(self) -> bool:
        """Whether the thread that calls it is within the setting, and not only another one."""
        return threading.get_ident() in self._holders

    def _enter(self, thread: int) -> None:
        with _SETTINGS:
            if self._entered is None:
                # Another thread may be the one to leave: context variables must not mind.
                manager = self._make()
                context = copy_context()
                context.run(manager.__enter__)
                self._entered = manager, context
            self._holders[thread] += 1

    def _leave(self, thread: int) -> None:
        with _SETTINGS:
            self._holders[thread] -= 1
            if not self._holders[thread]:
                del self._holders[thread]
            if not self._holders and self._entered is not None:
                (manager, context), self._entered = self._entered, None
                context.run(manager.__exit__, None, None, None)
