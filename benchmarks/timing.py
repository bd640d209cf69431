"""Contenders in interleaved rounds: seconds and peak memory of each."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.settings import Settings

# Does the work on so many examples.
Run = Callable[[int], object]
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Contender:
    """One way to do a comparison's work.

    Attributes:
        name: What the table calls it.
        build: Imports what it needs and prepares all that is not timed; gives what is.
        is_peer: Whether it is another library, whose failure is reported and not raised.
        size: How many examples it works on, if not as many as the others: fewer where it is slow.
        most_rounds: In how many rounds it takes part, at most.
    """

    name: str
    build: Callable[[], Run]
    is_peer: bool = False
    size: int | None = None
    most_rounds: int | None = None


@dataclass(frozen=True)
class Row:
    """What was measured of one contender.

    Attributes:
        contender: Its name.
        is_peer: Whether it is another library.
        seconds: One number a round; none if it did not run.
        megabytes: Peak of memory above what was held before the call, the result included, one
            number a round (2²⁰ bytes); empty where the system does not tell.
        note: Why it did not run, or what to know of it.
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
    """Time contenders in turn, round after round, in changing order.

    All are built first, so that none meets a machine in another state than the others do.

    Args:
        contenders: Who takes part; a peer that is not installed, or fails, becomes a note.
        settings: Rounds and device.
        size: Examples that the work is done on.
        warm_up: Examples of a first call that is not timed. The first contender's has all of them,
            so that nobody's turn pays for the start of the process.
        per_example: Divide seconds by the examples.
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
    """Seconds and added peak memory in MiB of one call."""
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
    """Forget the peak so far; gives the bytes held now, or None where nobody knows."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        # Freed memory that the C library still holds would hide what the call takes of it.
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
