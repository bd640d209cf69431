"""What a computation costs here: seconds and peak memory, and on which machine."""

import ctypes
import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from laplace_debias.experiments.shared.store import Row

_MB = 2**20
_CPU = Path("/proc/cpuinfo")


def machine_of(device: torch.device) -> Row:
    """What times depend on: the device's model and torch's number of threads.

    Args:
        device: Where the fits run.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        # Linux knows the processor's model, other systems the family.
        lines = _CPU.read_text().splitlines() if _CPU.exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = next(iter(models), platform.processor() or platform.machine())
    return {"device": f"{device.type}: {name}", "threads": torch.get_num_threads()}


def cost(fit: Callable[[], object], device: torch.device) -> Row:
    """Time and memory of one fit.

    Args:
        fit: The fit.
        device: Where it runs.

    Returns:
        `seconds`, and `peak`: memory above that before, in MB; None where it cannot be measured.
    """
    gc.collect()
    peak = _PeakMemory(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    kept = fit()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak": peak.megabytes()}
    del kept
    return found


class _PeakMemory:
    """The greatest memory held from now on, above that held now: the GPU's, or the process's."""

    _FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device) / _MB
        elif device.type == "cpu" and self._FORGET.exists():
            _give_back_freed_memory()
            try:
                # 5: the peak so far is forgotten (Linux, proc(5)).
                self._FORGET.write_text("5")
            except OSError:
                return
            self._before = self._status("VmRSS")

    def megabytes(self) -> float | None:
        """That memory; None where it cannot be measured."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / _MB - self._before
        return self._status("VmHWM") - self._before

    def _status(self, key: str) -> float:
        lines = self._STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def _give_back_freed_memory() -> None:
    """Has glibc return what was freed: kept, it would be counted as held before, and hide a peak.

    Other C libraries have no such call, and keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
