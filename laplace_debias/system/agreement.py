"""Agreement of the ranks of a process group that all go on, and what stops them all otherwise.

Ranks agree through the group's store before every sum: each counts itself in, and waits for the
others. A rank that raises an error leaves it in the store. One that is gone (killed, or its machine
lost) is known by its pulse: a thread of every process counts up a number in the store, and looks at
those of the others. So no rank waits for another that will not come, and the message names it.
"""

import atexit
import builtins
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from laplace_debias.system.warn import warn

# Seconds: between two beats of the pulse, and without one until a rank is taken for gone.
PULSE = 1.0
SILENCE = 20.0
# Until a rank that has not come at all is told of, and until it is given up.
_LATE = 60.0
_ABSENT = 1800.0
_LONGEST_PAUSE = 0.02
# The one of the default group, with that group: another group may be made later.
_CURRENT: list[tuple[Any, "Agreement"]] = []


class RankError(RuntimeError):
    """Another rank has failed, with an error that has no counterpart here, or is gone."""


class Agreement:
    """How the ranks of the default process group agree.

    Args:
        store: Where they leave messages.
        rank: Which one this is.
        size: How many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._number = 0
        self._step = 0
        self._depth = 0
        self._what = ""
        self._pulse = Pulse(store, rank, size)

    @classmethod
    def of_default_group(cls) -> "Agreement":
        """The one of the present default group, made at the first call."""
        group = _group()
        if not _CURRENT or _CURRENT[0][0] is not group:
            for _, old in _CURRENT:
                old._pulse.stop()
            store = dist.PrefixStore("laplace_debias", dist.distributed_c10d._get_default_store())
            _CURRENT[:] = [(group, cls(store, dist.get_rank(), dist.get_world_size()))]
        return _CURRENT[0][1]

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """All ranks are within; an error of this one is told to the others. May be nested.

        Args:
            what: What messages call it.
        """
        if self._depth:
            yield
            return
        self._number += 1
        self._step = 0
        self._what = what
        self._depth = 1
        self._pulse.begin(self._key("failed"))
        self._set(self._key(f"in/{self.rank}"), what)
        try:
            yield
        except _Told as told:
            raise told.error from None
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._depth = 0

    def exchange(self, value: Any) -> list[Any]:
        """What every rank says; arguments and errors as `ranks.Ranks.exchange`."""
        with self.over("an exchange"):
            self._step += 1
            step = self._key(f"step{self._step}")
            try:
                self._store.set(f"{step}/{self.rank}", json.dumps(value))
                self._store.add(step, 1)
                self._wait(lambda: int(self._store.get(step)) >= self.size)
                said = [self._store.get(f"{step}/{rank}") for rank in range(self.size)]
            except dist.DistError as error:
                raise _Told(self._of_lost_store()) from error
            if self._step == 1:
                self._check_names()
            return [json.loads(one) for one in said]

    def leave(self, how: str) -> None:
        """Say that this rank ends its work, and how; see `left`.

        Args:
            how: A word.
        """
        with suppress(dist.DistError):
            self._store.set(f"left/{self.rank}", how)

    def left(self, wanted: Collection[int], longest: float) -> dict[int, str]:
        """How other ranks have ended their work.

        Args:
            wanted: Those that are waited for.
            longest: For how many seconds.

        Returns:
            What those said that have ended by then. None is waited for where the store is gone.
        """
        said: dict[int, str] = {}
        end = time.monotonic() + longest
        with suppress(dist.DistError):
            while True:
                for rank in wanted:
                    if rank not in said and self._store.check([f"left/{rank}"]):
                        said[rank] = self._store.get(f"left/{rank}").decode()
                if len(said) == len(wanted) or time.monotonic() >= end:
                    break
                time.sleep(_LONGEST_PAUSE)
        return said

    def place(self, where: str) -> None:
        """Say where this rank runs; see `places`."""
        self._store.set(f"place/{self.rank}", where)

    def places(self) -> dict[int, str]:
        """Where each rank runs that has said so and that can be asked for."""
        said = {}
        with suppress(dist.DistError):
            for rank in range(self.size):
                if self._store.check([f"place/{rank}"]):
                    said[rank] = self._store.get(f"place/{rank}").decode()
        return said

    def close(self) -> None:
        """End the pulse: this rank takes part no more."""
        self._pulse.stop()

    def check(self) -> None:
        """Raise what is known of other ranks' failures."""
        if self._depth and (found := self._pulse.found) is not None:
            raise _Told(found)

    def finish(self, work: Any) -> None:
        """Wait for a collective.

        Raises:
            RankError: If a rank is gone meanwhile.
        """
        with self.explained():
            self._wait(work.is_completed)
            work.wait()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """An error of a collective within becomes one that names the rank that is gone.

        Raises:
            RankError: In place of that error.
        """
        try:
            yield
        except RuntimeError as error:
            # A closed connection does not say whose it was: the pulse does, a little later.
            end = time.monotonic() + SILENCE + 5 * PULSE
            while self._pulse.found is None and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE)
            self.check()
            raise RankError(f"The sum over the ranks failed: {error}") from error

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait as long as all ranks are there and none has failed."""
        begun, pause, is_warned = time.monotonic(), 1e-4, False
        while not is_done():
            self._raise_if_told()
            self.check()
            waited = time.monotonic() - begun
            if waited > (_ABSENT if is_warned else _LATE) and (absent := self._absent()):
                told = f"ranks {absent} to call {self._what}"
                if is_warned:
                    raise _Told(
                        RankError(
                            f"Rank {self.rank} has waited {waited:.0f} seconds for {told}: call it "
                            "on every rank, or within `laplace_debias.alone()` on one."
                        )
                    )
                warn(f"Rank {self.rank} waits for {told}.")
                is_warned = True
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _absent(self) -> list[int]:
        """The ranks that have not come."""
        return [r for r in range(self.size) if not self._store.check([self._key(f"in/{r}")])]

    def _check_names(self) -> None:
        """Require all ranks to be in the same function.

        Raises:
            RankError: Otherwise.
        """
        names = [self._store.get(self._key(f"in/{r}")).decode() for r in range(self.size)]
        if len(set(names)) > 1:
            told = ", ".join(f"rank {rank} in {name}" for rank, name in enumerate(names))
            raise _Told(
                RankError(
                    f"The ranks are in different calls: {told}. All of them must make the same "
                    "calls in the same order; those of one alone belong into "
                    "`laplace_debias.alone()`."
                )
            )

    def _tell(self, error: BaseException) -> None:
        """Leave an error for the others; the first one counts."""
        told = {"rank": self.rank, "kind": type(error).__name__, "message": str(error)}
        self._set(self._key("failed"), json.dumps(told))

    def _raise_if_told(self) -> None:
        if self._store.check([self._key("failed")]):
            raise _Told(error_of(self._store.get(self._key("failed"))))

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except dist.DistError as error:
            raise self._of_lost_store() from error

    def _of_lost_store(self) -> RankError:
        return RankError(
            "The process group's store cannot be reached: the process that hosts it (rank 0, or "
            "the launcher) is gone. Start all ranks again."
        )

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


class _Told(Exception):  # noqa: N818 (it carries an error, and is none that a user sees)
    """Another rank's error, which need not be told again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def error_of(told: bytes) -> Exception:
    """The error that a rank left, of its kind where that is one of Python's."""
    found = json.loads(told)
    message = f"Rank {found['rank']} failed with {found['kind']}: {found['message']}"
    kind = getattr(builtins, found["kind"], None)
    if kind in (ValueError, TypeError, NotImplementedError, RuntimeError):
        return kind(message)
    return RankError(message)


def _group() -> Any:
    """The default group; None if there is none any more."""
    return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None


class Pulse:
    """A thread that shows that this rank is alive, and sees which others are not.

    Args:
        store: Where pulses are.
        rank: Which one this is.
        size: How many there are.

    Attributes:
        found: The error of another rank, or that it is gone; None as long as there is none.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._group = _group()
        self._failed = ""
        self.found: Exception | None = None
        self._is_over = threading.Event()
        # The value of each rank's last beat, and when it was first seen.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._run, name="laplace-debias-pulse", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def begin(self, failed: str) -> None:
        """Another piece of work begins.

        Args:
            failed: The key of an error in it.
        """
        self._failed, self.found = failed, None

    def stop(self) -> None:
        """End the thread: the process ends, or the group is another one."""
        self._is_over.set()
        self._thread.join(2 * PULSE)

    def _run(self) -> None:
        beat = 0
        # Of a group that was destroyed the store may be gone, too.
        while not self._is_over.wait(PULSE if beat else 0) and self._group is _group():
            beat += 1
            try:
                self._store.set(f"pulse/{self._rank}", str(beat))
                self._look(time.monotonic())
            except Exception:
                # The store is gone with its host: whoever needs it next says so.
                return

    def _look(self, now: float) -> None:
        key = self._failed
        if key and self._store.check([key]):
            found: Exception | None = error_of(self._store.get(key))
        else:
            found = self._of_silence(now)
        # Another piece of work may have begun meanwhile.
        if found is not None and key == self._failed:
            self.found = found

    def _of_silence(self, now: float) -> Exception | None:
        for rank in range(self._size):
            key = f"pulse/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            value = self._store.get(key)
            last, since = self._seen.get(rank, (b"", now))
            if value != last:
                self._seen[rank] = value, now
            elif now - since > SILENCE:
                return RankError(
                    f"Rank {rank} is gone: nothing was heard of its process for "
                    f"{now - since:.0f} seconds. It was killed, or its machine is lost; look at "
                    "its log (the kernel's for `Out of memory`). Start all ranks again."
                )
        return None
