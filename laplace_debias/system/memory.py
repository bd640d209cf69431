"""Memory: the sizes of slices, available and used bytes, and allocation errors."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# For each device type, the factor by which the sizes of slices and the default bound are
# multiplied. On a CPU, slices should fit in the cache. On a GPU, they should be large, because each
# kernel launch takes microseconds.
ROOM = defaultdict(lambda: 16, cpu=1)

# Out-of-memory messages of torch's allocators and of NVIDIA's libraries. The type of the error is
# not enough, because the CPU allocator raises a plain RuntimeError.
_MESSAGES = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
# Linux reports available memory and memory limits here.
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated.

    The model is not to blame for such an error. Code that interprets exceptions as a sign that the
    model does not support an operation must re-raise this one.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


class suppress_unsupported(suppress):  # noqa: N801 (named like the class that it extends)
    """Suppress errors of the given types, unless memory ran out.

    Such an error is expected where a model may not support an operation.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or is_out_of_memory(error):
            return False
        return super().__exit__(kind, error, traceback)


def available_memory(device: torch.device | None = None) -> int | None:
    """Return how many bytes can still be allocated, or None if this is unknown.

    For a GPU, these are the free bytes plus the bytes that torch's allocator has reserved but does
    not use. For the CPU, these are the bytes that Linux reports as available, within the limit of
    the process's control group (version 2), as in a container. Cached files count as available.
    """
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    limits: list[int] = []
    if device is None or device.type == "cpu":
        with suppress(OSError, LookupError):
            kibibytes = _MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]
            limits.append(1024 * int(kibibytes))
        # If the control group has no limit, the file contains "max", which `int` rejects.
        with suppress(OSError, LookupError, ValueError):
            limit = int((_CGROUP / "memory.max").read_text())
            stat = (_CGROUP / "memory.stat").read_text()
            cached = int(stat.partition("inactive_file ")[2].split()[0])
            used = int((_CGROUP / "memory.current").read_text()) - cached
            limits.append(max(0, limit - used))
    return min(limits, default=None)


def check_memory(
    needed: int,
    available: int | None,
    subject: str,
    less_memory: str,
) -> None:
    """Raise an error if more memory is needed than is available.

    Args:
        needed: Bytes that are needed.
        available: Bytes that are available; None if this is unknown, in which case nothing is
            checked.
        subject: Subject and verb of the error message, such as `"The fit takes"`.
        less_memory: Options that need less memory, as a phrase for the error message.

    Raises:
        ValueError: If more bytes are needed than are available.
    """
    if available is not None and needed > available:
        raise ValueError(
            f"{subject} {shown_size(needed)} ({needed:,} bytes), but only {shown_size(available)} "
            f"are available. To need less memory, use {less_memory}. `plan` reports how many bytes "
            "each option needs."
        )


def shown_size(num_bytes: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{num_bytes / 2**20:,.3f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


class MemoryCounter(TorchDispatchMode):
    """A context that counts the bytes of the tensors that are created within it.

    Memory that an operation uses only while it runs is not counted.

    Attributes:
        live: Bytes of the tensors that currently exist.
        peak: The largest value of `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count the storages that it created."""
        for argument in tree_leaves((args, kwargs)):
            self._register(argument, is_new=False)
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            self._register(output, is_new=True)
        self.peak = max(self.peak, self.live)
        return result

    def _register(self, value: Any, is_new: bool) -> None:
        """Remember a tensor's storage until it is freed; count its bytes if the storage is new."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes() if is_new else 0

        def free(_: Any) -> None:
            self.live -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, free)
        self.live += size
