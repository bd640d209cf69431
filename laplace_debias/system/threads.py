"""Shared by threads of a process: locks, and settings of torch that belong to the whole process.

Nothing here is needed where each call works on tensors and copies of its own. It is needed for what
torch keeps once for all threads: the level of forward-mode differentiation, the switches of fused
kernels, the filters of warnings.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any


class Lock:
    """A re-entrant lock that can be copied with its owner and that a fork leaves usable.

    In a forked child only the forking thread lives on: a lock that another thread held at the time
    would never be released there. Such a lock is free in the child; one that the forking thread
    holds stays its own. A copy, or what comes out of a pickle, is another lock.
    """

    def __init__(self) -> None:
        self._renew()
        _LOCKS.add(self)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def _after_fork(self) -> None:
        if self._owner != threading.get_ident():
            self._renew()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()

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
        self._holders: Counter[int] = Counter()
        self._manager: AbstractContextManager | None = None
        self._context: Context | None = None
        _SHARED.append(self)

    def __enter__(self) -> None:
        with _SETTINGS:
            if self._manager is None:
                manager = self._make()
                # Another thread may be the one to leave: context variables must not mind.
                self._context = copy_context()
                self._context.run(manager.__enter__)
                self._manager = manager
            self._holders[threading.get_ident()] += 1

    def __exit__(self, *error: object) -> None:
        with _SETTINGS:
            thread = threading.get_ident()
            self._holders[thread] -= 1
            if self._holders[thread] == 0:
                del self._holders[thread]
            self._restore_if_unused()

    def _restore_if_unused(self) -> None:
        if self._manager is None or self._holders:
            return
        manager, context = self._manager, self._context
        self._manager = self._context = None
        assert context is not None
        context.run(manager.__exit__, None, None, None)

    def _after_fork(self) -> None:
        thread = threading.get_ident()
        for other in [holder for holder in self._holders if holder != thread]:
            del self._holders[other]
        self._restore_if_unused()


_SHARED: list[SharedSetting] = []


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock._after_fork()
    for setting in _SHARED:
        setting._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
