"""How much memory a device has left."""

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device | None = None) -> int | None:
    """Bytes that can still be allocated; None where the system does not tell.

    Of a GPU what is free on it, with what torch's allocator holds and does not use. Of the CPU what
    Linux says is available, and no more than the process's control group (a container's limit)
    leaves; elsewhere the machine's physical memory.

    Args:
        device: The device; the CPU if None.
    """
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    if device is not None and device.type != "cpu":
        return None
    found = [size for size in (_of_machine(), _of_group(_CGROUP)) if size is not None]
    return min(found) if found else None


def _of_machine() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _of_group(folder: Path) -> int | None:
    """The bytes that a control group (version 2) leaves; cached files are given back if needed."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = (folder / "memory.stat").read_text().splitlines()
        cached = next(int(s.split()[1]) for s in statistics if s.startswith("inactive_file "))
        used = int((folder / "memory.current").read_text()) - cached
        return max(0, int(limit) - used)
    except (OSError, ValueError, StopIteration):
        return None
