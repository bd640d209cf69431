"""Shared by threads of a process: locks, and settings of torch that belong to the whole process.

Nothing here is needed where each call works on tensors and copies of its own. It is needed for what
torch keeps once for all threads: the level of forward-mode differentiation, the switches of fused
kernels, the filters of warnings.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any


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


FORWARD_MODE = Lock()
"""Held while forward-mode derivatives are taken (`torch.func.jvp`), or such a function recorded.

torch has one level of forward-mode differentiation for the whole process: the first thread that
leaves it takes the tangents of all others with it, without an error.
"""

# Of all shared settings: it is held for the moment of a change alone.
_SETTINGS = Lock()


class SharedSetting:
    """A setting of the process that several threads want at the same time.

    A context manager that saves a value, sets another and restores the first is wrong here: when
    two threads overlap, the second one saves what the first one has set, and restores that for
    good. So the first thread to come sets, and the last one to leave restores.

    Args:
        make: Makes the context manager that sets and restores.
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
