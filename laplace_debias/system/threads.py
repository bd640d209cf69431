"""Locks and settings for state that is shared by the threads of a process.

Calls that work only on their own tensors and copies need no locks. However, torch shares two pieces
of state between all threads: the level of forward-mode differentiation, and the global generator on
the CPU. A `DataLoader` draws from this generator in every pass: a seed for its workers (even if it
has none), a seed for `shuffle=True`, and any random numbers with which its data set augments
examples.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from typing import Any

import torch


class Lock:
    """A re-entrant lock whose copies are new locks, so that an object with a lock can be copied."""

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
"""Lock that is held while torch's global generator is temporarily in a different state.

This is the case while a batch is read, or while a scikit-learn estimator is trained.
"""


class Randomness:
    """A context in which torch's global generator follows a separate, seeded sequence.

    The sequence is seeded by a number from `generator`, and continues when the context is entered
    again. On exit, the global generator gets back its previous state. Other threads that draw from
    the global generator in the meantime draw from this sequence. `random` and NumPy's generators
    are not changed.
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
    """A process-wide setting that several threads may need at the same time.

    An ordinary context manager, which saves the old value and restores it at the end, would be
    wrong. If two threads overlap, the second thread would save the value that the first one has
    set, and would restore that value permanently. Therefore, the first thread to enter sets the
    value, and the last thread to leave restores it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make = make
        # The number of contexts that each thread has entered but not left.
        self._holders = Counter[int]()
        # The manager that applies the setting, and the context in which it was entered; None if no
        # thread has applied the setting.
        self._entered: tuple[AbstractContextManager, Context] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Apply the setting for the duration of a context."""
        # Remember the thread, because an abandoned context may be left in a different thread, which
        # frees it.
        thread = threading.get_ident()
        self._enter(thread)
        try:
            yield
        finally:
            self._leave(thread)

    def is_made_by_this_thread(self) -> bool:
        """Whether the calling thread, and not only another thread, has applied the setting."""
        return threading.get_ident() in self._holders

    def _enter(self, thread: int) -> None:
        """Apply the setting if no thread has applied it yet, and count this thread."""
        with _SETTINGS:
            if self._entered is None:
                # Enter the manager in a copied context, in which any thread can later exit it.
                manager = self._make()
                context = copy_context()
                context.run(manager.__enter__)
                self._entered = manager, context
            self._holders[thread] += 1

    def _leave(self, thread: int) -> None:
        """Stop counting this thread, and restore the old value if no other thread remains."""
        with _SETTINGS:
            self._holders[thread] -= 1
            if not self._holders[thread]:
                del self._holders[thread]
            if not self._holders and self._entered is not None:
                manager, context = self._entered
                self._entered = None
                context.run(manager.__exit__, None, None, None)
