"""How much working memory a computation may take, and how much there is."""

from contextlib import suppress
from pathlib import Path

import torch

MEMORY_BOUND = 2**27
"""Bytes, unless a user says otherwise."""
MOST_GRANTED = 2**32
"""Bytes up to which what one example needs is granted without being asked for."""
# What torch's allocators (that of the CPU raises no error of its own kind) and NVIDIA's libraries
# say.
_SAID = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")


def granted(bound: int | None, needed: int, what: str, remedy: str = "") -> int:
    """The bytes that may be used, at least those `needed`.

    A bound of None is 128 MiB, and more where one example needs it, up to 4 GiB.
    """
    if needed <= (MEMORY_BOUND if bound is None else bound):
        return MEMORY_BOUND if bound is None else bound
    if bound is None and needed <= MOST_GRANTED:
        return needed
    found = (
        f"more than the {MOST_GRANTED} that are used without being asked for"
        if bound is None
        else f"and memory_bound={bound} is too small"
    )
    subject = what[:1].upper() + what[1:]
    raise ValueError(
        f"{subject} takes {needed} bytes, {found}. Pass memory_bound={needed}{remedy}."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Such an error tells nothing of the model: a handler that takes any exception for "the model
    cannot do this" must let it through.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device | None = None) -> int | None:
    """Bytes that can still be allocated; None where the system does not tell.

    Of a GPU what is free on it, with what torch's allocator holds and does not use. Of the CPU what
    Linux says is available, and no more than the process's control group (version 2, a container's
    limit) leaves, where cached files are given back if needed.
    """
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    found: list[int] = []
    if device is None or device.type == "cpu":
        with suppress(OSError, LookupError):
            found.append(1024 * int(_MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]))
        # Without a limit it is "max".
        with suppress(OSError, LookupError, ValueError):
            limit = int((_CGROUP / "memory.max").read_text())
            stat = (_CGROUP / "memory.stat").read_text()
            cached = int(stat.partition("inactive_file ")[2].split()[0])
            used = int((_CGROUP / "memory.current").read_text()) - cached
            found.append(max(0, limit - used))
    return min(found, default=None)
