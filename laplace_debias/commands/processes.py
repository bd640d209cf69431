"""One command over several processes: their group, who prints, and how they end together."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from laplace_debias.commands.launched import Launched
from laplace_debias.system.agreement import Agreement, RankError

# Seconds: until all processes must have come, until one that failed waits no more for the others to
# hear of it, and how long the first one waits to see whether all have failed alike.
_COME = 300.0
_HEARD = 45.0
_ALIKE = 1.0
_GONE = 2.0
_LAST_LOOK = 0.1
_TERMINATED = 128 + signal.SIGTERM
_ERROR = "laplace-debias: error: "
_KILLED = (
    "was killed or has crashed. If its exit code is -9 in the launcher's report, it was killed, "
    "most often by the kernel because memory ran out: start fewer processes, or lower "
    "--batch_size. Then give the same command again"
)


@runtime_checkable
class Stream(Protocol):
    """Where lines are printed."""

    def write(self, text: str, /) -> object:
        """Write a text."""

    def flush(self) -> None:
        """Have it appear."""


@dataclass(frozen=True)
class Ended:
    """How a command has ended.

    Attributes:
        status: The exit status.
        line: What is to be told of it; empty if nothing is.
    """

    status: int
    line: str = ""


class Terminated(BaseException):
    """SIGTERM came: by `torchrun`, when another process has ended badly, or from outside."""


class _Stop:
    """What SIGTERM does: it ends the work, and nothing once that is over."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_over:
            raise Terminated


def run_together(
    launched: Launched,
    work: Callable[[], int],
    told: Callable[[BaseException], Ended],
    stderr: Stream,
) -> int:
    """Do the work of one command in the group of all its processes.

    The first process prints; the others print what went wrong if it is gone. An error of one of
    them ends all.

    Args:
        launched: Which process this is.
        work: The command, with its exit status.
        told: What an error means.
        stderr: Where errors are printed.

    Returns:
        The exit status.

    Raises:
        ConnectionError: If the processes do not find each other.
    """
    with _stoppable() as stop:
        try:
            agreement = _opened(launched, stderr)
        except Terminated:
            return _TERMINATED
        try:
            ended, is_own = _worked(agreement, work, told, launched.rank > 0)
            stop.is_over = True
            _end(agreement, ended, is_own, stderr)
        finally:
            agreement.close()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return ended.status


def _opened(launched: Launched, stderr: Stream) -> Agreement:
    """The default process group of all processes."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        local = launched.rank % count if launched.local_rank is None else launched.local_rank
        if local < count:
            torch.cuda.set_device(local)
    if launched.rank == 0 and not launched.is_torchrun:
        others = launched.size - 1
        print(
            f"laplace-debias: waiting for {others} other process{'es' if others > 1 else ''} "
            f"(WORLD_SIZE is {launched.size})",
            file=stderr,
        )
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=_COME)))
        # The collectives that take long wait for the slowest process, which may have to load first.
        store.set_timeout(timedelta(minutes=30))
        backend = "cpu:gloo,cuda:nccl" if _has_nccl() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        agreement = Agreement.of_default_group()
        agreement.place(f"{socket.gethostname()} {os.getpid()}")
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"process {launched.rank} of {launched.size} (WORLD_SIZE) has not met all the others "
            f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0]}): start all of them, or unset WORLD_SIZE to run one "
            "process alone"
        ) from error
    return agreement


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _worked(
    agreement: Agreement,
    work: Callable[[], int],
    told: Callable[[BaseException], Ended],
    is_silent: bool,
) -> tuple[Ended, bool]:
    """How the work ended, and whether that is this process's own doing."""
    with contextlib.ExitStack() as stack:
        if is_silent:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            with agreement.over("laplace-debias"):
                status = work()
                # What the last one writes is written when all have come here.
                agreement.exchange(None)
                return Ended(status), True
        except SystemExit as error:  # After --help; by the user's own modules with a text, too.
            if error.code is None or isinstance(error.code, int):
                return Ended(error.code or 0), True
            return Ended(1, f"{_ERROR}{error.code}"), True
        except Terminated:
            return _of_sigterm(agreement), False
        except BaseException as error:
            # Of a signal that all get, another process may have told first.
            of_another = re.match(r"Rank \d+ failed with (\w+): ?(.*)", str(error), re.DOTALL)
            if of_another and of_another[1] == Terminated.__name__:
                return _of_sigterm(agreement), False
            if of_another and of_another[1] == KeyboardInterrupt.__name__:
                return told(KeyboardInterrupt(of_another[2])), False
            return told(error), of_another is None and not isinstance(error, RankError)


def _end(agreement: Agreement, ended: Ended, is_own: bool, stderr: Stream) -> None:
    """Tell what went wrong once, and go when the others know of it."""
    others = [rank for rank in range(agreement.size) if rank != agreement.rank]
    agreement.leave("well" if ended.status == 0 else "own" if is_own else "told")
    longest = _GONE if ended.status == _TERMINATED else _HEARD
    if agreement.rank == 0:
        if ended.line:
            said = agreement.left(others, _ALIKE if is_own else 0.0)
            are_alike = len(said) == len(others) and set(said.values()) == {"own"}
            _print(ended.line, 0 if is_own and not are_alike else None, stderr)
        # Where it hosts the store, the others would lose it.
        agreement.left(others, longest)
        time.sleep(_LAST_LOOK)
    elif not agreement.left([0], longest) and ended.line:
        _print(ended.line, agreement.rank if is_own else None, stderr)


def _print(line: str, rank: int | None, stderr: Stream) -> None:
    """Print a line, and whose it is."""
    if rank is not None:
        line = line.replace(_ERROR, f"{_ERROR}rank {rank}: ", 1)
    print(line, file=stderr, flush=True)


def _of_sigterm(agreement: Agreement) -> Ended:
    """Why SIGTERM came."""
    gone = []
    for rank, where in agreement.places().items():
        host, _, pid = where.rpartition(" ")
        if host == socket.gethostname() and not _is_alive(int(pid)):
            gone.append(rank)
    if not gone:
        why = "stopped from outside (SIGTERM); give the same command again"
    elif len(gone) == 1:
        why = f"rank {gone[0]} is gone: its process {_KILLED}"
    else:
        why = f"ranks {', '.join(map(str, gone))} are gone: the first of their processes {_KILLED}"
    return Ended(_TERMINATED, f"{_ERROR}{why}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # Somebody else's.
        return True
    return True


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """SIGTERM raises within, as long as the work is not over."""
    stop = _Stop()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
