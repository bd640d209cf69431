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
        how = f" ({found[3].split('.')[0]})" if found[3] else ""
        raise LostWorkerError(
            f"A worker process of the DataLoader (pid {found[1].strip()}) is gone{how}: memory, or "
            "the shared memory /dev/shm of a container (docker run --shm-size=8g), ran out, or it "
            "crashed. Take fewer workers (num_workers, --workers) or smaller batches, or none "
            "(num_workers=0, --workers=0) to see where it crashes."
        ) from error
