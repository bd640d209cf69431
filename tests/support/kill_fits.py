"""Kill work at random moments (SIGKILL), go on, and compare with work that was left alone.

    python tests/support/kill_fits.py --what fit save tune report ranks --kills 20 --seed 0

A fit that was killed, perhaps twice, and begun again with the same `resume` folder must end with
the posterior file of a fit that was left alone, byte for byte, and leave no folder; so must a
search for the prior precision, with all that it tried. A report must end with the same metrics and
predictions. A saving must leave the old file or the new one. Of a fit of several processes one is
killed; the same number of them must end with the same bytes, another number with the same curvature
up to rounding. The children are processes of their own.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import kill_tasks as tasks

from laplace_debias import Laplace

CURVATURES = ("kfac", "ekfac", "diag", "full", "lowrank")
METRICS = ("nll", "brier")
# How many processes a fit has before and after one of them is killed.
SIZES = ((2, 2), (2, 1), (1, 2), (3, 2), (3, 3))
_LONGEST = 120
# Of the largest entry of the curvature.
_ROUNDING = 1e-12


@dataclass
class Outcomes:
    """What the kills came to."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def kill_fits(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill fits and go on with them.

    Args:
        kills: How many fits.
        seed: Decides the moments.
        folder: For their files.
    """
    return _kill_and_go_on(tasks.fit, CURVATURES, kills, seed, folder)


def kill_tunings(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill searches for the prior precision and go on; arguments as `kill_fits`."""
    return _kill_and_go_on(tasks.tune, METRICS, kills, seed, folder)


def _kill_and_go_on(
    task: Callable, variants: tuple[str, ...], kills: int, seed: int, folder: Path
) -> Outcomes:
    random_, found = random.Random(seed), Outcomes()
    expected, seconds = {}, {}
    for variant in variants[:kills]:
        output = folder / f"{variant}.alone"
        seconds[variant] = _run(folder, task, variant, None, output)
        expected[variant] = output.read_bytes()
    for number in range(kills):
        variant = variants[number % len(variants)]
        state, output = folder / f"state-{number}", folder / f"{number}.killed"
        # Half of them are killed twice.
        for _ in range(1 + number // len(variants) % 2):
            moment = random_.uniform(0, seconds[variant])
            if not output.exists():
                _run(folder, task, variant, state, output, kill_after=moment)
        found.counts["ended before it was killed" if output.exists() else _found(state)] += 1
        if not output.exists():
            _run(folder, task, variant, state, output)
        if output.read_bytes() != expected[variant] or state.exists():
            found.failures.append(f"{task.__name__} {number}, {variant}, seed {seed}")
    return found


def kill_savings(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill savings of one file; arguments as `kill_fits`."""
    random_, found = random.Random(seed), Outcomes()
    of_each = {value: folder / f"{value}.alone" for value in (1.0, 2.0)}
    _run(folder, partial(tasks.save, ever=False), of_each)
    expected = {path.read_bytes(): value for value, path in of_each.items()}
    path = folder / "posterior"
    path.write_bytes(of_each[1.0].read_bytes())
    for number in range(kills):
        again = partial(tasks.save, ever=True)
        _run(folder, again, dict.fromkeys(of_each, path), kill_after=random_.uniform(0, 0.1))
        left = len(list(folder.glob(".posterior.*.partial")))
        value = expected.get(path.read_bytes())
        found.counts[f"prior precision {value}, {left} temporary file(s)"] += 1
        if value is None or left > 1:
            found.failures.append(f"saving {number}, seed {seed}")
    return found


def kill_reports(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill reports and go on with them; arguments as `kill_fits`."""
    random_, found = random.Random(seed), Outcomes()
    seconds = _run(folder, tasks.report, folder / "alone")
    expected = _contents(folder / "alone")
    for number in range(kills):
        run = folder / f"run-{number}"
        for _ in range(1 + number % 2):
            _run(folder, tasks.report, run, kill_after=random_.uniform(0, seconds))
        states = sorted({path.parent.name for path in run.glob("state/*/pass-*")})
        found.counts[f"killed within {', '.join(states) or 'no pass'}"] += 1
        _run(folder, tasks.report, run)
        again = _contents(run)
        different = [name for name in {*expected, *again} if expected.get(name) != again.get(name)]
        if different:
            found.failures.append(f"report {number}, seed {seed}: {different}")
    return found


def kill_ranks(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill one process of a fit and go on with as many or another number; as `kill_fits`."""
    random_, found = random.Random(seed), Outcomes()
    cases = [(sizes, curvature) for sizes in SIZES for curvature in ("kfac", "ekfac", "full")]
    # A step that is prime to their number: a few of them are of different sizes.
    cases = [cases[7 * number % len(cases)] for number in range(kills)]
    expected = {}
    for (_, after), curvature in cases:
        if (after, curvature) not in expected:
            output = folder / f"{after}-{curvature}.alone"
            _run_ranks(folder, after, curvature, None, output)
            expected[after, curvature] = output
    for number, ((before, after), curvature) in enumerate(cases):
        state, output = folder / f"state-{number}", folder / f"{number}.killed"
        num_passes = 2 if curvature == "ekfac" else 1
        moment = random_.uniform(0, num_passes * tasks.NUM_BATCHES * tasks.PAUSE)
        victim = random_.randrange(before)
        _run_ranks(folder, before, curvature, state, output, kill=(victim, moment))
        how = "ended before it was killed" if output.exists() else _found(state)
        found.counts[f"{before} to {after}: {how}"] += 1
        if not output.exists():
            _run_ranks(folder, after, curvature, state, output)
        alone = expected[after, curvature]
        is_same = output.read_bytes() == alone.read_bytes()
        difference = _difference(output, alone)
        if (
            difference > _ROUNDING
            or state.exists()
            or (before == after and curvature != "lowrank" and not is_same)
        ):
            found.failures.append(
                f"ranks {number}, {before} to {after}, {curvature}, seed {seed}: {difference:.1e}"
            )
    return found


def _difference(one: Path, other: Path) -> float:
    """The largest difference of two posteriors' curvature, in units of its largest entry."""
    model = tasks.network().double()
    a, b = (Laplace.load(path, model).posterior.curvature.to_dense() for path in (one, other))
    return float((a - b).abs().max() / b.abs().max())


def _contents(run: Path) -> dict[str, bytes]:
    """What a run found, without times."""
    kept = ("metrics.json", "examples.json", "sweeps/*", "spectra/*", "posteriors/*", "state/*")
    found = {
        str(path.relative_to(run)): path.read_bytes()
        for pattern in kept
        for path in run.glob(pattern)
        if path.is_file()
    }
    told = json.loads((run / "run.json").read_text(encoding="utf-8"))
    found["conclusion"] = json.dumps([told["status"], told["conclusion"]]).encode()
    return found


def _found(state: Path) -> str:
    names = {path.name.partition(".")[0] for path in state.glob("pass-*")}
    return f"killed in {max(names)}" if names else "killed before the first state"


def _begin(folder: Path, task: Callable, *arguments: object) -> tuple[object, Path]:
    """A process that does a task; and the file that says that its work has begun."""
    # Its server imports torch once; a child of it has no thread of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "laplace_debias"])
    begun = folder / f"begun-{time.monotonic_ns()}"
    process = context.Process(target=task, args=(begun, *arguments), daemon=True)
    process.start()
    return process, begun


def _wait_for(process: object, begun: Path) -> float:
    limit = time.monotonic() + _LONGEST
    while not begun.exists() and process.is_alive() and time.monotonic() < limit:
        time.sleep(0.002)
    return time.monotonic()


def _run(
    folder: Path, task: Callable, *arguments: object, kill_after: float | None = None
) -> float:
    """Run a task in a process of its own.

    Args:
        folder: For the file that says that its work has begun.
        task: Called with that file and the arguments.
        arguments: Picklable ones.
        kill_after: Seconds of work after which the process is killed; None to let it end.

    Returns:
        The seconds that the work took.
    """
    process, begun = _begin(folder, task, *arguments)
    start = _wait_for(process, begun)
    process.join(_LONGEST if kill_after is None else kill_after)
    seconds = time.monotonic() - start
    process.kill()
    process.join()
    if process.exitcode != 0 and not (kill_after is not None and process.exitcode == -9):
        raise RuntimeError(f"{task}{arguments} ended with {process.exitcode}")
    return seconds


def _run_ranks(
    folder: Path,
    size: int,
    curvature: str,
    state: Path | None,
    output: Path,
    kill: tuple[int, float] | None = None,
) -> float:
    """Fit in several processes; arguments as `_run`, `kill` a rank and after how many seconds."""
    store = folder / f"store-{time.monotonic_ns()}"
    started = [
        _begin(folder, tasks.fit_of_ranks, rank, size, store, curvature, state, output)
        for rank in range(size)
    ]
    start = max(_wait_for(*one) for one in started)
    processes = [process for process, _ in started]
    if kill is not None:
        # From the first state on: what comes before it takes most of the time.
        while not any(state.glob("pass-*")) and processes[kill[0]].is_alive():
            time.sleep(0.002)
        processes[kill[0]].join(kill[1])
        processes[kill[0]].kill()
        # The others wait for it, and are ended as a launcher would.
        for process in processes:
            process.join(1)
            process.kill()
    for process in processes:
        process.join(_LONGEST)
    seconds = time.monotonic() - start
    if kill is None and any(process.exitcode for process in processes):
        raise RuntimeError(f"a fit of {size} ended with {[p.exitcode for p in processes]}")
    return seconds


KILLS = {
    "fit": kill_fits,
    "save": kill_savings,
    "tune": kill_tunings,
    "report": kill_reports,
    "ranks": kill_ranks,
}


def main() -> None:
    """Kill work, and print what came of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--what", nargs="+", choices=KILLS, default=list(KILLS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for what in options.what:
        with tempfile.TemporaryDirectory() as folder:
            found = KILLS[what](options.kills, options.seed, Path(folder))
        right = options.kills - len(found.failures)
        told = f"{what}: {right} of {options.kills} right; {dict(found.counts)}"
        print("\n  ".join([told, *found.failures]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
