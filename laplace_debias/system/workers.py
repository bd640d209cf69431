"""Errors of a `DataLoader` whose process is gone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_GONE = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (exited|is killed by signal: (.*))"
)


class LostWorkerError(RuntimeError):
    """A worker process of a `DataLoader` was killed or has crashed."""


@contextmanager
def telling_of_lost_workers() -> Iterator[None]:
    """Say what to do where torch says that a worker of a `DataLoader` is gone.

    Raises:
        LostWorkerError: In that case.
    """
    try:
        yield
    except RuntimeError as error:
        found = _GONE.search(str(error))
        if found is None or isinstance(error, LostWorkerError):
            raise
        raise LostWorkerError(_message(found[1].strip(), found[3] or "", str(error))) from error


def _message(pids: str, by: str, text: str) -> str:
    told = f"A worker process of the DataLoader (pid {pids}) is gone"
    if "shared memory" in text or "Bus error" in by:
        return (
            f"{told}: the shared memory of the machine, /dev/shm, is full. Take fewer workers "
            "(num_workers, --workers) or smaller batches, or give a container more of it "
            "(docker run --shm-size=8g)."
        )
    why = by.split(".")[0] or "exited"
    return (
        f"{told} ({why}): it was killed, most often by the kernel because memory ran out (`dmesg` "
        "tells), or it crashed. Take fewer workers (num_workers, --workers) or smaller batches, or "
        "no workers (num_workers=0, --workers=0) to see where it crashes."
    )
