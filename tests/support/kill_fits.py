"""Kill fits and savings at random moments (SIGKILL), go on, and compare with those left alone.

    python tests/support/kill_fits.py --kills 20 --seed 0

A fit that was killed, perhaps twice, and begun again with the same `resume` folder must end with
the posterior file of a fit that was left alone, byte for byte, and leave no folder. A saving that
was killed must leave the old file or the new one. The children are processes of their own.
"""

import argparse
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.fits import passes

CURVATURES = ("kfac", "ekfac", "diag", "full", "lowrank")
_BATCHES, _PAUSE = 12, 0.02
_LONGEST = 120


class SlowLoader(DataLoader):
    """A shuffling loader that takes its time over every batch."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(_PAUSE)
            yield batch


@dataclass
class Outcomes:
    """What the kills came to."""

    counts: Counter[str]
    failures: list[str]


def network() -> nn.Module:
    """An untrained network, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)]
        return nn.Sequential(*layers).eval()


def loader() -> DataLoader:
    """Random images, in an order that torch's global generator decides."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5 * _BATCHES, 2, 4, 4, generator=generator)
    y = torch.randint(3, (len(x),), generator=generator)
    return SlowLoader(TensorDataset(x, y), batch_size=5, shuffle=True)


def fit(begun: Path, curvature: str, folder: Path | None, output: Path) -> None:
    """Fit, saving after every batch, and write the posterior."""
    torch.set_num_threads(1)
    passes.EVERY = 0.0
    la = Laplace(network(), curvature=curvature, fisher="mc" if curvature == "ekfac" else "exact")
    begun.touch()
    la.fit(loader(), generator=torch.Generator().manual_seed(2), resume=folder)
    la.save(output)


def save(begun: Path, outputs: dict[float, Path], *, ever: bool) -> None:
    """Write one posterior with one prior precision after the other, once or for ever."""
    torch.set_num_threads(1)
    la = Laplace(network(), curvature="full").fit(list(loader())[:1], num_data=60)
    begun.touch()
    while True:
        for prior_precision, output in outputs.items():
            la.prior_precision = prior_precision
            la.save(output)
        if not ever:
            return


def kill_fits(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill fits and go on with them.

    Args:
        kills: How many fits.
        seed: Decides the moments.
        folder: For their files.
    """
    random_ = random.Random(seed)
    expected, seconds = {}, {}
    for curvature in CURVATURES[:kills]:
        output = folder / f"{curvature}.alone"
        seconds[curvature] = _run(folder, fit, curvature, None, output)
        expected[curvature] = output.read_bytes()
    counts: Counter[str] = Counter()
    failures = []
    for number in range(kills):
        curvature = CURVATURES[number % len(CURVATURES)]
        state, output = folder / f"state-{number}", folder / f"{number}.killed"
        # Half of them are killed twice.
        for _ in range(1 + number // len(CURVATURES) % 2):
            moment = random_.uniform(0, seconds[curvature])
            if not output.exists():
                _run(folder, fit, curvature, state, output, kill_after=moment)
        counts["ended before it was killed" if output.exists() else _found(state)] += 1
        if not output.exists():
            _run(folder, fit, curvature, state, output)
        if output.read_bytes() != expected[curvature] or state.exists():
            failures.append(f"fit {number}, {curvature}, seed {seed}")
    return Outcomes(counts, failures)


def kill_savings(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill savings of one file; arguments as `kill_fits`."""
    random_ = random.Random(seed)
    of_each = {value: folder / f"{value}.alone" for value in (1.0, 2.0)}
    _run(folder, partial(save, ever=False), of_each)
    expected = {path.read_bytes(): value for value, path in of_each.items()}
    path = folder / "posterior"
    path.write_bytes(of_each[1.0].read_bytes())
    counts: Counter[str] = Counter()
    failures = []
    for number in range(kills):
        again = partial(save, ever=True)
        _run(folder, again, dict.fromkeys(of_each, path), kill_after=random_.uniform(0, 0.1))
        left = len(list(folder.glob(".posterior.*.partial")))
        found = expected.get(path.read_bytes())
        counts[f"prior precision {found}, {left} temporary file(s)"] += 1
        if found is None or left > 1:
            failures.append(f"saving {number}, seed {seed}")
    return Outcomes(counts, failures)


def _found(state: Path) -> str:
    files = sorted(path.name for path in state.glob("pass-*")) if state.exists() else []
    return f"killed in pass {len(files)}" if files else "killed before the first state"


def _run(folder: Path, task, *arguments, kill_after: float | None = None) -> float:
    """Run a task in a process of its own.

    Args:
        folder: For the file that says that its work has begun.
        task: Called with that file and the arguments.
        arguments: Picklable ones.
        kill_after: Seconds of work after which the process is killed; None to let it end.

    Returns:
        The seconds that the work took.
    """
    # Its server imports torch once; a child of it has no thread of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "laplace_debias"])
    begun = folder / "begun"
    begun.unlink(missing_ok=True)
    process = context.Process(target=task, args=(begun, *arguments), daemon=True)
    process.start()
    limit = time.monotonic() + _LONGEST
    while not begun.exists() and process.is_alive() and time.monotonic() < limit:
        time.sleep(0.002)
    begin = time.monotonic()
    process.join(_LONGEST if kill_after is None else kill_after)
    seconds = time.monotonic() - begin
    process.kill()
    process.join()
    if process.exitcode != 0 and not (kill_after is not None and process.exitcode == -9):
        raise RuntimeError(f"{task}{arguments} ended with {process.exitcode}")
    return seconds


def main() -> None:
    """Kill fits and savings, and print what came of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kill in (kill_fits, kill_savings):
        with tempfile.TemporaryDirectory() as folder:
            found = kill(options.kills, options.seed, Path(folder))
        right = options.kills - len(found.failures)
        told = f"{kill.__name__}: {right} of {options.kills} right; {dict(found.counts)}"
        print("\n  ".join([told, *found.failures]))  # noqa: T201


if __name__ == "__main__":
    main()
