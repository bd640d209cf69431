"""Measurement of seconds and peak memory of contenders, in interleaved rounds."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.settings import Settings

# A function that does the work on a number of examples.
Run = Callable[[int], object]
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a comparison.

    Attributes:
        name: The name in the table.
        build: A function that does all imports and untimed preparations, and returns the function
            to time.
        is_peer: Whether the contender is another library, whose errors are reported and not raised.
        size: The number of examples, if it differs from the other contenders, such as fewer for a
            slow contender.
        most_rounds: The largest number of rounds in which the contender takes part.
    """

    name: str
    build: Callable[[], Run]
    is_peer: bool = False
    size: int | None = None
    most_rounds: int | None = None


@dataclass(frozen=True)
class Row:
    """The measurements of one contender.

    Attributes:
        contender: The name of the contender.
        is_peer: Whether the contender is another library.
        seconds: One number per round; empty if the contender did not run.
        megabytes: The peak memory minus the memory in use before the call, including the result, in
            units of 2²⁰ bytes; one number per round. Empty if the system does not report it.
        note: The reason why the contender did not run, or a remark on the measurement.
    """

    contender: str
    is_peer: bool = False
    seconds: tuple[float, ...] = ()
    megabytes: tuple[float, ...] = ()
    note: str = ""


def measure(
    contenders: Sequence[Contender],
    settings: Settings,
    size: int,
    warm_up: int,
    per_example: bool = False,
) -> list[Row]:
    """Time contenders in turn, round after round, in alternating order.

    All contenders are built first, so that they find the machine in the same state.

    Args:
        contenders: The contenders. If a peer is not installed or fails, its row only has a note.
        settings: The rounds and the device.
        size: The number of examples.
        warm_up: The number of examples of a first, untimed call. The first contender uses all
            examples for this call, so that the start of the process is not timed.
        per_example: Whether to divide seconds by the number of examples.
    """
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    megabytes: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def attempt(contender: Contender, work: Callable[[], object]) -> None:
        try:
            work()
        except ModuleNotFoundError as error:
            if not contender.is_peer:
                raise
            notes[contender.name] = f"not installed ({error.name})"
        except Exception as error:
            if not contender.is_peer:
                raise
            reason = next(iter(str(error).splitlines()), "")
            notes[contender.name] = f"failed: {type(error).__name__}: {reason}"

    def prepare(contender: Contender) -> None:
        run = contender.build()
        count = contender.size or size
        run(count if contender is contenders[0] else min(warm_up, count))
        runs[contender.name] = run

    def take_turn(contender: Contender) -> None:
        count = contender.size or size
        elapsed, peak = _once(runs[contender.name], count, settings.device)
        seconds[contender.name].append(elapsed / (count if per_example else 1))
        megabytes[contender.name].extend([] if peak is None else [peak])

    for contender in contenders:
        attempt(contender, partial(prepare, contender))
    for turn in range(settings.repetitions):
        for contender in contenders[:: 1 if turn % 2 == 0 else -1]:
            is_over = contender.most_rounds is not None and turn >= contender.most_rounds
            if contender.name not in notes and not is_over:
                attempt(contender, partial(take_turn, contender))
    return [
        Row(
            contender.name,
            contender.is_peer,
            () if contender.name in notes else tuple(seconds[contender.name]),
            () if contender.name in notes else tuple(megabytes[contender.name]),
            notes.get(contender.name, ""),
        )
        for contender in contenders
    ]


def _once(run: Run, size: int, device: str) -> tuple[float, float | None]:
    """Measure the seconds and the added peak memory in MiB of one call."""
    gc.collect()
    before = _start_of_peak(device)
    start = time.perf_counter()
    result = run(size)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    peak = None if before is None else (_peak(device) - before) / 2**20
    del result
    return elapsed, peak


def _start_of_peak(device: str) -> int | None:
    """Reset the peak memory; return the bytes in use now, or None if they are not known."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        # Freed memory that the C library still holds would hide allocations of the call.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (OSError, AttributeError):
        return None
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
