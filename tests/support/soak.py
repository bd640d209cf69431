"""Fit and predict again and again in one process: is memory flat, and are the answers the same?

    python tests/support/soak.py --fits 1000 --predictions 10000
    python tests/support/soak.py --threads 4 --seconds 600

Answers are compared to the last bit with the first ones. Memory is what the process has resident,
read after a warm-up and then at every tenth of the way, each time behind a garbage collection and a
return of free pages to the system.

With `--threads` so many threads fit one model, and then predict with one posterior, for so many
seconds each, in a child process. If none of them gets on for `PATIENCE` seconds, the child says
where they stand and ends.
"""

import argparse
import ctypes
import faulthandler
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias import Laplace

WARM_UP = 0.1
"""The part of the way behind which memory is measured: allocators and caches settle first."""

PATIENCE = 60
"""Seconds without an answer from any thread after which they are taken for frozen."""


@dataclass(frozen=True)
class Soaked:
    """What many repetitions came to.

    Attributes:
        num_different: How many answers differed from the first one.
        resident: Bytes that were resident, from the warm-up to the end.
    """

    num_different: int
    resident: list[int]

    @property
    def growth(self) -> float:
        """The greatest resident memory over that behind the warm-up, minus one."""
        return max(self.resident) / self.resident[0] - 1


def soak(answer: Callable[[], Tensor], repetitions: int) -> Soaked:
    """Ask the same thing many times."""
    first = answer()
    every = max(repetitions // 10, 1)
    num_different, resident = 0, []
    for done in range(1, repetitions + 1):
        num_different += not torch.equal(answer(), first)
        if done >= WARM_UP * repetitions and done % every == 0:
            resident.append(resident_bytes())
    return Soaked(num_different, resident)


def resident_bytes() -> int:
    """Bytes of this process that are in memory, without pages that it only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def subjects() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """By name a fit, which gives the posterior's magnitudes, and a prediction of a fitted one."""
    torch.manual_seed(0)
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(3, (32,))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)
    ).eval()
    batches = [(images[:16], labels[:16]), (images[16:], labels[16:])]

    def fitted(curvature: str) -> Laplace:
        return Laplace(model, curvature=curvature).fit_batches(batches, num_data=1000)

    def pair(curvature: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        la = fitted(curvature)
        probe = torch.linspace(-1, 1, len(la.mean))
        return (
            lambda: fitted(curvature).posterior.curvature @ probe,
            lambda: la.predict(images[:4]).probs,
        )

    return {curvature: pair(curvature) for curvature in ("kfac", "ekfac", "diag", "lowrank")}


def soak_threads(what: str, num_threads: int, seconds: float) -> int | None:
    """How often threads did something in a child process; None if they froze.

    Args:
        what: `"fit"`: one model; `"predict"`: with one posterior, by its closed form and by sampled
            weights in turn.
        num_threads: How many threads.
        seconds: For how long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_threads, args=(theirs, what, num_threads, seconds))
    child.start()
    theirs.close()
    child.join()
    return ours.recv() if child.exitcode == 0 else None


def _in_threads(pipe: object, what: str, num_threads: int, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    x, y = torch.randn(16, 1, 6, 6), torch.randint(3, (16,))
    la = Laplace(model).fit_batches([(x, y)])
    answers = {
        "fit": [lambda: Laplace(model).fit_batches([(x, y)])],
        "predict": [lambda: la.predict(x), lambda: la.predict(x, "nn", 3)],
    }[what]
    counts, end = [0] * num_threads, time.monotonic() + seconds

    def work(thread: int) -> None:
        while time.monotonic() < end:
            # Of C and without the GIL, which frozen threads may hold.
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            answers[(thread + counts[thread]) % len(answers)]()
            counts[thread] += 1

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    pipe.send(sum(counts))


def main() -> int:
    """Soak every subject; the exit status says whether answers stayed and memory was flat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--predictions", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    if options.threads:
        done = {w: soak_threads(w, options.threads, options.seconds) for w in ("fit", "predict")}
        for what, number in done.items():
            found = "frozen" if number is None else f"{number:,} calls"
            print(f"{what}: {options.threads} threads, {options.seconds:g} s: {found}")
        return int(None in done.values())
    is_bad = False
    for name, (fit, predict) in subjects().items():
        for what, answer, number in (
            ("fits", fit, options.fits),
            ("predictions", predict, options.predictions),
        ):
            found = soak(answer, number)
            is_bad |= found.num_different > 0 or found.growth > 0.01
            print(
                f"{name}: {number:,} {what}, {found.num_different} different, resident memory "
                f"{found.resident[0] / 2**20:.1f} MB behind the warm-up, at most "
                f"{max(found.resident) / 2**20:.1f} MB ({found.growth:+.2%})"
            )
    return int(is_bad)


if __name__ == "__main__":
    raise SystemExit(main())
