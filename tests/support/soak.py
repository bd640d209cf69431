"""Fit and predict again and again in one process: is memory flat, and are the answers the same?

    python tests/support/soak.py --fits 1000 --predictions 10000

Answers are compared to the last bit with the first ones. Memory is what the process has resident,
read after a warm-up and then at every tenth of the way, each time behind a garbage collection and a
return of free pages to the system.
"""

import argparse
import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias import Laplace

WARM_UP = 0.1
"""The part of the way behind which memory is measured: allocators and caches settle first."""


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


def main() -> int:
    """Soak every subject; the exit status says whether answers stayed and memory was flat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--predictions", type=int, default=10_000)
    options = parser.parse_args()
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
