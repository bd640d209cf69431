"""Locks and settings for state that the threads of a process share.

Nothing in this module is needed if each call works on its own tensors and copies. It is needed for
the state that all threads share in torch: the level of forward-mode differentiation, and the global
generator on the CPU. A `DataLoader` draws from this generator: a seed for its workers in every
pass, even if it has no workers; a seed for `shuffle=True`; and the random numbers with which its
data set augments examples.
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
"""Lock that is held while torch's global generator has a different state.

It is held while a batch is read, or while a scikit-learn estimator is trained.
"""


class Randomness:
    """A context in which random numbers come from a given generator, not torch's global generator.

    Afterwards, the global generator has the same state as before. A thread that draws from the
    global generator in the meantime does not get the usual sequence. `random` and NumPy's
    generators are not changed.
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


# A single lock for all shared settings, which is held only during a change.
_SETTINGS = threading.RLock()


class SharedSetting:
    """A setting of the process that several threads may change at once.

    A context manager that saves the old value, sets a new value and restores the old one would be
    wrong. If two threads overlap, the second thread would save the value that the first thread has
    set, and would restore that value permanently. So the first thread to enter sets the value, and
    the last thread to leave restores it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make = make
        # The number of contexts that each thread has entered but not left.
        self._holders = Counter[int]()
        self._entered: tuple[AbstractContextManager, Context] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Make the setting for the duration of a context."""
        # An abandoned context may be left by the thread that frees it, which may be another thread.
        thread = threading.get_ident()
        self._enter(thread)
        try:
            yield
        finally:
            self._leave(thread)

    def is_made_by_this_thread(self) -> bool:
        """Whether the calling thread itself, not only another thread, is within the setting."""
        return threading.get_ident() in self._holders

    def _enter(self, thread: int) -> None:
        """Enter the setting if no thread is within it, and count this thread."""
        with _SETTINGS:
            if self._entered is None:
                # Another thread may leave the setting. The setting is therefore entered in a copied
                # context, in which any thread can leave it.
                manager = self._make()
                context = copy_context()
                context.run(manager.__enter__)
                self._entered = manager, context
            self._holders[thread] += 1

    def _leave(self, thread: int) -> None:
        """Discount this thread, and leave the setting if no thread remains."""
        with _SETTINGS:
            self._holders[thread] -= 1
            if not self._holders[thread]:
                del self._holders[thread]
            if not self._holders and self._entered is not None:
                (manager, context), self._entered = self._entered, None
                context.run(manager.__exit__, None, None, None)
