"""Kill work at random moments (SIGKILL), go on, and compare with work that was left alone.

A fit that was killed, perhaps twice, and begun again with the same `resume` folder must end with
the posterior file of a fit that was left alone, byte for byte, and leave no folder. A report must
end with the same metrics and predictions.

The children are processes of their own. Each tells its steps (a batch is read, a file reaches the
disk, a file takes its place), and is killed a few milliseconds after a random one of them, however
fast the machine is. Where the work ended before the kill, it is done again with another moment.
"""

import json
import multiprocessing
import random
import shutil
import signal

import kill_tasks as tasks

CURVATURES = ("kfac", "ekfac", "diag", "full", "lowrank")
# Seconds: until a step that does not come is given up, and after a step until the kill at most.
_LONGEST, _LATEST = 120.0, 0.005
_MOST_TRIES = 50


class Child:
    """A process that calls a task with the pipe for its steps, and with the arguments."""

    def __init__(self, task, *arguments):
        # Its server imports torch once; a child of it has no thread of this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "laplace_debias.laplace.laplace"])
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=task, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.steps = []

    def wait(self, step=None):
        """Wait until it has told so many steps, or has ended."""
        while step is None or len(self.steps) < step:
            assert self._pipe.poll(_LONGEST), f"nothing after {self.steps[-3:]}"
            try:
                self.steps.append(self._pipe.recv_bytes().decode())
            except EOFError:
                break

    def kill(self, step, delay):
        """Whether it was at work when it was killed, so many seconds after a step."""
        self.wait(step)
        self._process.join(delay)
        self._process.kill()
        self.wait()
        self._process.join()
        is_over = self.steps[-1:] == [tasks.END]
        assert is_over or self._process.exitcode == -signal.SIGKILL, self.steps[-3:]
        return not is_over

    def end(self):
        """The number of its steps, when it has ended."""
        self.wait()
        self._process.join()
        assert (self._process.exitcode, self.steps[-1]) == (0, tasks.END), self.steps[-3:]
        return len(self.steps) - 1


def kill_fits(kills, seed, folder):
    """Kill so many fits, at moments that the seed decides, and go on with them."""
    alone = {curvature: folder / f"{curvature}.alone" for curvature in CURVATURES[:kills]}
    for curvature, output in alone.items():
        Child(tasks.fit, curvature, None, output).end()

    def places(number, attempt):
        name = f"{number}-{attempt}"
        return CURVATURES[number % len(CURVATURES)], folder / f"state-{name}", folder / name

    def is_same(curvature, state, output):
        return output.read_bytes() == alone[curvature].read_bytes() and not state.exists()

    steps = [Child(tasks.fit, *places(number, -1)).end() for number in range(len(alone))]
    _kill_and_go_on(tasks.fit, steps, places, is_same, kills, seed)


def kill_reports(kills, seed, folder):
    """Kill reports and go on with them; arguments as `kill_fits`."""
    steps = Child(tasks.report, folder / "alone").end()
    expected = _contents(folder / "alone")

    def places(number, attempt):
        return (folder / f"run-{number}-{attempt}",)

    def is_same(run_folder):
        found = _contents(run_folder)
        shutil.rmtree(run_folder)
        return found == expected

    _kill_and_go_on(tasks.report, [steps], places, is_same, kills, seed)


def _kill_and_go_on(task, steps, places, is_same, kills, seed):
    """Half of the runs of each variant are killed twice; those that end before are repeated."""
    random_ = random.Random(seed)
    for number in range(kills):
        for attempt in range(_MOST_TRIES):
            arguments, children = places(number, attempt), []
            for _ in range(1 + number // len(steps) % 2):
                children.append(Child(task, *arguments))
                step = random_.randint(1, steps[number % len(steps)])
                was_at_work = children[-1].kill(step, random_.uniform(0, _LATEST))
                if not was_at_work:
                    break
            if was_at_work:
                Child(task, *arguments).end()
            told = [child.steps[-3:] for child in children]
            assert is_same(*arguments), f"{task.__name__} {number}, seed {seed}, after {told}"
            if was_at_work:
                break
        else:
            raise AssertionError(f"{_MOST_TRIES} runs ended before their kill")


def _contents(run_folder):
    """What a run found, without times."""
    kept = ("metrics.json", "examples.json", "sweeps/*", "posteriors/*", "state/*")
    found = {
        str(path.relative_to(run_folder)): path.read_bytes()
        for pattern in kept
        for path in run_folder.glob(pattern)
        if path.is_file()
    }
    told = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    return found | {"conclusion": [told["status"], told["conclusion"]]}
