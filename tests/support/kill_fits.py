"""Kill fits and reports at random moments (SIGKILL), resume them, and check their results.

A fit is killed once or twice and resumed with the same `resume` folder. Its posterior file must be
equal, byte for byte, to the file of a fit that was not killed, and the folder must be removed. A
report must end with the same metrics and predictions.

Each task runs in a separate process, which reports its steps: a batch is read, a file is written to
the disk, a file is moved to its place. The process is killed a few milliseconds after a random
step, so that the speed of the machine does not matter. If the task ends before the kill, it is
repeated with another moment.
"""

import json
import multiprocessing
import random
import shutil
import signal

import kill_tasks as tasks

CURVATURES = ("kfac", "ekfac", "diag", "full", "lowrank")
_TIMEOUT = 120.0
"""The time in seconds that a step may take."""
_MAX_DELAY = 0.005
"""The longest time in seconds between a step and the kill."""
_MAX_ATTEMPTS = 50


class Child:
    """A process that calls a task with a pipe for its steps, and with the arguments."""

    def __init__(self, task, *arguments):
        # The server imports torch once, and its children have no threads of this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "laplace_debias.laplace.laplace"])
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=task, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.steps = []

    def wait(self, step=None):
        """Wait until the process has reported this many steps, or has ended."""
        while step is None or len(self.steps) < step:
            assert self._pipe.poll(_TIMEOUT), f"nothing after {self.steps[-3:]}"
            try:
                self.steps.append(self._pipe.recv_bytes().decode())
            except EOFError:
                break

    def kill(self, step, delay):
        """Kill the process some seconds after a step; return whether it was still at work."""
        self.wait(step)
        self._process.join(delay)
        self._process.kill()
        self.wait()
        self._process.join()
        is_over = self.steps[-1:] == [tasks.END]
        assert is_over or self._process.exitcode == -signal.SIGKILL, self.steps[-3:]
        return not is_over

    def end(self):
        """Wait for the end of the process, and return the number of its steps."""
        self.wait()
        self._process.join()
        assert (self._process.exitcode, self.steps[-1]) == (0, tasks.END), self.steps[-3:]
        return len(self.steps) - 1


def kill_fits(kills, seed, folder):
    """Kill fits at random moments, and resume them.

    Args:
        kills: The number of fits.
        seed: The seed of the moments.
        folder: A folder for the files.
    """
    undisturbed = {curvature: folder / f"{curvature}.alone" for curvature in CURVATURES[:kills]}
    for curvature, output in undisturbed.items():
        Child(tasks.fit, curvature, None, output).end()

    def arguments_of(number, attempt):
        name = f"{number}-{attempt}"
        return CURVATURES[number % len(CURVATURES)], folder / f"state-{name}", folder / name

    def is_same(curvature, state, output):
        return output.read_bytes() == undisturbed[curvature].read_bytes() and not state.exists()

    steps = [
        Child(tasks.fit, *arguments_of(number, -1)).end() for number in range(len(undisturbed))
    ]
    _kill_and_go_on(tasks.fit, steps, arguments_of, is_same, kills, seed)


def kill_reports(kills, seed, folder):
    """Kill reports at random moments, and resume them; for the arguments, see `kill_fits`."""
    steps = Child(tasks.report, folder / "alone").end()
    expected = _contents(folder / "alone")

    def arguments_of(number, attempt):
        return (folder / f"run-{number}-{attempt}",)

    def is_same(run_folder):
        contents = _contents(run_folder)
        shutil.rmtree(run_folder)
        return contents == expected

    _kill_and_go_on(tasks.report, [steps], arguments_of, is_same, kills, seed)


def _kill_and_go_on(task, steps, arguments_of, is_same, kills, seed):
    """Kill and resume a task; half of the runs of each variant are killed twice.

    Args:
        task: A function of `kill_tasks.py`.
        steps: The number of steps of each variant of the task.
        arguments_of: A function from the numbers of a run and of an attempt to the arguments.
        is_same: A function from the arguments to whether the results are right.
        kills: The number of runs.
        seed: The seed of the moments.
    """
    chance = random.Random(seed)
    for number in range(kills):
        for attempt in range(_MAX_ATTEMPTS):
            arguments = arguments_of(number, attempt)
            children = []
            for _ in range(1 + number // len(steps) % 2):
                children.append(Child(task, *arguments))
                step = chance.randint(1, steps[number % len(steps)])
                was_at_work = children[-1].kill(step, chance.uniform(0, _MAX_DELAY))
                if not was_at_work:
                    break
            if was_at_work:
                Child(task, *arguments).end()
            last_steps = [child.steps[-3:] for child in children]
            assert is_same(*arguments), f"{task.__name__} {number}, seed {seed}, after {last_steps}"
            if was_at_work:
                break
        else:
            raise AssertionError(f"{_MAX_ATTEMPTS} runs ended before their kill")


def _contents(run_folder):
    """Return the results of a run: its files by their paths, and its conclusion, without times."""
    contents = {}
    for pattern in ("metrics.json", "examples.json", "sweeps/*", "posteriors/*", "state/*"):
        for path in run_folder.glob(pattern):
            if path.is_file():
                contents[str(path.relative_to(run_folder))] = path.read_bytes()
    record = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    contents["conclusion"] = [record["status"], record["conclusion"]]
    return contents
