"""Measurement of seconds and peak memory of contenders, in interleaved rounds."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    participants = [_Participant(contender, contender.size or size) for contender in contenders]
    for participant in participants:
        num_examples = participant.size
        if participant is not participants[0]:
            num_examples = min(warm_up, num_examples)
        participant.attempt(partial(participant.prepare, num_examples))
    for turn in range(settings.repetitions):
        order = participants if turn % 2 == 0 else participants[::-1]
        for participant in order:
            if participant.takes_part_in(turn):
                participant.attempt(partial(participant.take_turn, settings.device, per_example))
    return [participant.row() for participant in participants]


@dataclass
class _Participant:
    """A contender with its measurements up to now.

    Attributes:
        contender: The contender.
        size: The number of examples of its calls.
        run: The function to time, once it is built.
        seconds: One number per round.
        megabytes: One number per round.
        note: The reason why the contender did not run.
    """

    contender: Contender
    size: int
    run: Run | None = None
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    note: str = ""

    def attempt(self, work: Callable[[], object]) -> None:
        """Call a function; if the contender is a peer, an error becomes its note."""
        try:
            work()
        except ModuleNotFoundError as error:
            if not self.contender.is_peer:
                raise
            self.note = f"not installed ({error.name})"
        except Exception as error:
            if not self.contender.is_peer:
                raise
            first_line = next(iter(str(error).splitlines()), "")
            self.note = f"failed: {type(error).__name__}: {first_line}"

    def prepare(self, num_examples: int) -> None:
        """Build the function to time, and call it once, untimed."""
        self.run = self.contender.build()
        self.run(num_examples)

    def takes_part_in(self, turn: int) -> bool:
        """Whether the contender takes part in a round; rounds are counted from zero."""
        most_rounds = self.contender.most_rounds
        return not self.note and (most_rounds is None or turn < most_rounds)

    def take_turn(self, device: str, per_example: bool) -> None:
        """Measure one call."""
        assert self.run is not None
        seconds, megabytes = _measure_call(self.run, self.size, device)
        if per_example:
            seconds /= self.size
        self.seconds.append(seconds)
        if megabytes is not None:
            self.megabytes.append(megabytes)

    def row(self) -> Row:
        """Return the measurements; a peer that failed in any round has none."""
        row = Row(self.contender.name, self.contender.is_peer, note=self.note)
        if self.note:
            return row
        return replace(row, seconds=tuple(self.seconds), megabytes=tuple(self.megabytes))


def _measure_call(run: Run, size: int, device: str) -> tuple[float, float | None]:
    """Measure the seconds and the added peak memory in MiB of one call."""
    gc.collect()
    bytes_in_use = _reset_peak(device)
    start = time.perf_counter()
    result = run(size)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    megabytes = None
    if bytes_in_use is not None:
        megabytes = (_peak(device) - bytes_in_use) / 2**20
    # The result is in memory until here, so that the peak includes it.
    del result
    return elapsed, megabytes


def _reset_peak(device: str) -> int | None:
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
    """Return the peak memory in bytes since the last `_reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(key: str) -> int:
    """Return an amount of memory of this process in bytes, by its name in Linux."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
