"""Kill work at random moments (SIGKILL), go on, and compare with work that was left alone.

    python tests/support/kill_fits.py --what fit save report ranks --kills 20 --seed 0

A fit that was killed, perhaps twice, and begun again with the same `resume` folder must end with
the posterior file of a fit that was left alone, byte for byte, and leave no folder. A report must
end with the same metrics and predictions. A saving must leave the old file or the new one. Of a fit
of several processes one is killed; as many must go on to the same bytes.

The children are processes of their own. Each tells its steps (a batch is read, a file reaches the
disk, a file takes its place), and is killed a few milliseconds after a random one of them, however
fast the machine is. Where the work ended before the kill, it is done again with another moment, and
is not counted.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import kill_tasks as tasks
from killing import Child, Moment, killed, run

CURVATURES = ("kfac", "ekfac", "diag", "full", "lowrank")
_MOST_TRIES = 50


@dataclass
class Outcomes:
    """What the kills came to.

    Attributes:
        steps: How many kills landed after which step.
        num_missed: How many runs ended before their kill, and were done again.
        failures: What ended otherwise than work that was left alone.
    """

    steps: Counter[str] = field(default_factory=Counter)
    num_missed: int = 0
    failures: list[str] = field(default_factory=list)

    def tries(self) -> Iterator[int]:
        """Numbers of tries; after the first one the last was missed.

        Raises:
            RuntimeError: If none lands.
        """
        yield 0
        for number in range(1, _MOST_TRIES):
            self.num_missed += 1
            yield number
        raise RuntimeError(f"{_MOST_TRIES} runs ended before their kill.")

    def told(self, what: str, kills: int) -> str:
        """A line for people, and one for each failure."""
        right = kills - len(self.failures)
        steps = ", ".join(f"{step} ({count})" for step, count in sorted(self.steps.items()))
        line = (
            f"{what}: {right} of {kills} right, after {self.steps.total()} kills at work "
            f"({self.num_missed} runs ended before theirs and were repeated); killed after: {steps}"
        )
        return "\n  ".join([line, *self.failures])


def kill_fits(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill fits and go on with them.

    Args:
        kills: How many fits.
        seed: Decides the moments.
        folder: For their files.
    """
    alone = {curvature: folder / f"{curvature}.alone" for curvature in CURVATURES[:kills]}
    for curvature, output in alone.items():
        run(tasks.fit, curvature, None, output)

    def places(number: int, attempt: int) -> tuple[str, Path, Path]:
        name = f"{number}-{attempt}"
        return CURVATURES[number % len(CURVATURES)], folder / f"state-{name}", folder / name

    def is_same(curvature: str, state: Path, output: Path) -> bool:
        return output.read_bytes() == alone[curvature].read_bytes() and not state.exists()

    steps = [run(tasks.fit, *places(number, -1)) for number in range(len(alone))]
    return _kill_and_go_on(tasks.fit, steps, places, is_same, kills, seed)


def kill_reports(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill reports and go on with them; arguments as `kill_fits`."""
    steps = run(tasks.report, folder / "alone")
    expected = _contents(folder / "alone")

    def places(number: int, attempt: int) -> tuple[Path]:
        return (folder / f"run-{number}-{attempt}",)

    def is_same(run_folder: Path) -> bool:
        found = _contents(run_folder)
        shutil.rmtree(run_folder)
        return found == expected

    return _kill_and_go_on(tasks.report, [steps], places, is_same, kills, seed)


def _kill_and_go_on(
    task: Callable,
    steps: list[list[str]],
    places: Callable,
    is_same: Callable,
    kills: int,
    seed: int,
) -> Outcomes:
    """Half of the runs of each variant are killed twice; those that end before are repeated."""
    random_, found, num_variants = random.Random(seed), Outcomes(), len(steps)
    for number in range(kills):
        num_kills = 1 + number // num_variants % 2
        for attempt in found.tries():
            arguments, landed = places(number, attempt), []
            for _ in range(num_kills):
                moment = Moment.of(random_, steps[number % num_variants])
                step = killed(moment, task, *arguments)
                if step is None:
                    break
                landed.append(step)
            if len(landed) == num_kills:
                run(task, *arguments)
            if not is_same(*arguments):
                found.failures.append(f"{task.__name__} {number}, seed {seed}, after {landed}")
            if len(landed) == num_kills:
                found.steps.update(landed)
                break
    return found


def kill_savings(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill savings of one file; arguments as `kill_fits`."""
    random_, found = random.Random(seed), Outcomes()
    alone = {value: folder / f"{value}.alone" for value in (1.0, 2.0)}
    run(tasks.save, alone, 1)
    target = folder / "target"
    targets = dict.fromkeys(alone, target)
    steps = run(tasks.save, targets, 3)
    for number in range(kills):
        for _ in found.tries():
            step = killed(Moment.of(random_, steps), tasks.save, targets, None)
            assert step is not None  # It goes on for ever.
            is_one = target.read_bytes() in [path.read_bytes() for path in alone.values()]
            if not is_one:
                found.failures.append(f"saving {number}, seed {seed}, after {step}")
            # Otherwise it was killed between two savings.
            if step != "saved":
                found.steps[step.replace(target.name, "the file")] += 1
                break
    return found


def kill_ranks(kills: int, seed: int, folder: Path) -> Outcomes:
    """Kill one process of a fit and go on with as many; arguments as `kill_fits`."""
    random_, found = random.Random(seed), Outcomes()
    cases = [(size, curvature) for size in (2, 3) for curvature in ("kfac", "ekfac", "full")]
    cases = [cases[number % len(cases)] for number in range(kills)]
    names = itertools.count()
    alone: dict[tuple[int, str], Path] = {}
    steps: dict[tuple[int, str], list[list[str]]] = {}
    for size, curvature in dict.fromkeys(cases):
        alone[size, curvature] = folder / f"{size}-{curvature}.alone"
        state = folder / "state"
        children = _ranks(folder, next(names), size, curvature, state, alone[size, curvature])
        steps[size, curvature] = [child.end() for child in children]
        children = _ranks(folder, next(names), size, curvature, None, alone[size, curvature])
        assert all(child.end() for child in children)
    for number, (size, curvature) in enumerate(cases):
        for attempt in found.tries():
            state, output = folder / f"state-{number}-{attempt}", folder / f"{number}-{attempt}"
            victim = random_.randrange(size)
            moment = Moment.of(random_, steps[size, curvature][victim])
            children = _ranks(folder, next(names), size, curvature, state, output)
            children[victim].wait(moment.step)
            was_killed = children[victim].kill(after=moment.delay)
            # The others wait for it, and are ended as a launcher would.
            for child in children:
                child.stop(after=1.0)
            if was_killed:
                break
        found.steps[f"{size}: {children[victim].where}"] += 1
        for child in _ranks(folder, next(names), size, curvature, state, output):
            child.end()
        is_same = output.read_bytes() == alone[size, curvature].read_bytes()
        if state.exists() or not is_same:
            found.failures.append(
                f"ranks {number}, {size}, {curvature}, seed {seed}, killed after "
                f"{children[victim].where} of rank {victim}"
            )
    return found


def _ranks(
    folder: Path, name: int, size: int, curvature: str, state: Path | None, output: Path
) -> list[Child]:
    """The processes of a fit."""
    store = folder / f"store-{name}"
    return [
        Child(tasks.fit_of_ranks, rank, size, store, curvature, state, output)
        for rank in range(size)
    ]


def _contents(run_folder: Path) -> dict[str, bytes]:
    """What a run found, without times."""
    kept = ("metrics.json", "examples.json", "sweeps/*", "spectra/*", "posteriors/*", "state/*")
    found = {
        str(path.relative_to(run_folder)): path.read_bytes()
        for pattern in kept
        for path in run_folder.glob(pattern)
        if path.is_file()
    }
    told = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    found["conclusion"] = json.dumps([told["status"], told["conclusion"]]).encode()
    return found


KILLS = {
    "fit": kill_fits,
    "save": kill_savings,
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
        print(found.told(what, options.kills), flush=True)


if __name__ == "__main__":
    main()
