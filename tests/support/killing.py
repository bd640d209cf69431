"""Processes that tell each step of their work, and are killed (SIGKILL) after one of them."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

END = "end"
# Seconds: until a step that does not come is given up, and after a step until the kill at most.
_LONGEST = 120.0
_LATEST = 0.005


class Tell:
    """What tells the steps of this process's work; nothing before `begin`."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None

    def begin(self, pipe: Connection | None) -> None:
        """Tell from now on, also when a file reaches the disk and when it takes its place."""
        self._pipe = pipe
        fsync, replace = os.fsync, os.replace

        def told_fsync(descriptor: int) -> None:
            self("writing to the disk")
            fsync(descriptor)

        def told_replace(source: Path, target: Path) -> None:
            self(f"putting {Path(target).name} in its place")
            replace(source, target)
            self(f"{Path(target).name} is in its place")

        os.fsync, os.replace = told_fsync, told_replace

    def __call__(self, step: str) -> None:
        """Tell a step."""
        if self._pipe is not None:
            self._pipe.send_bytes(step.encode())


tell = Tell()


class TellingList(list):
    """Batches in a list, which tell when one is read."""

    def __init__(self, name: str, batches: Iterable) -> None:
        super().__init__(batches)
        self.name = name

    def __iter__(self) -> Iterator:
        return telling(self.name, super().__iter__())


def telling(name: str, batches: Iterable) -> Iterator:
    """The same batches; when one is read it is told."""
    for number, batch in enumerate(batches, start=1):
        tell(f"{name} batch {number}")
        yield batch


@dataclass(frozen=True)
class Moment:
    """When a process is killed.

    Attributes:
        step: After how many steps.
        delay: How many seconds later.
    """

    step: int
    delay: float

    @classmethod
    def of(cls, random_: random.Random, steps: Sequence[str]) -> "Moment":
        """A random one of work that has some steps."""
        return cls(random_.randint(1, len(steps)), random_.uniform(0, _LATEST))


class Child:
    """A process that works.

    Args:
        task: Called with the pipe for its steps, which it gives to `tell.begin`, and the arguments.
        arguments: Picklable ones.

    Attributes:
        steps: What it has told so far.
    """

    def __init__(self, task: Callable, *arguments: object) -> None:
        # Its server imports torch once; a child of it has no thread of this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "laplace_debias.laplace.laplace"])
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(
            target=_work, args=(task, theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        self.steps: list[str] = []

    @property
    def where(self) -> str:
        """The last step, and the batch before it."""
        batches = [step for step in self.steps if " batch " in step]
        return ", ".join(dict.fromkeys([*batches[-1:], *self.steps[-1:]]))

    def wait(self, step: int | None = None) -> None:
        """Wait until it has told so many steps, or has ended.

        Raises:
            TimeoutError: If nothing is told for long.
        """
        while step is None or len(self.steps) < step:
            if not self._pipe.poll(_LONGEST):
                raise TimeoutError(f"nothing after {self.steps[-3:]}")
            try:
                self.steps.append(self._pipe.recv_bytes().decode())
            except EOFError:
                break

    def kill(self, after: float = 0.0) -> bool:
        """Kill it.

        Args:
            after: How many seconds from now; at once if it ends before.

        Returns:
            Whether it was at work.

        Raises:
            RuntimeError: If it had failed.
        """
        self.stop(after)
        is_over = bool(self.steps) and self.steps[-1] == END
        if self._process.exitcode != -signal.SIGKILL and not is_over:
            raise self._failed()
        return not is_over

    def stop(self, after: float) -> None:
        """Kill it, whatever it is doing; arguments as `kill`."""
        self._process.join(after)
        self._process.kill()
        self.wait()
        self._process.join()

    def end(self) -> list[str]:
        """Let it end.

        Returns:
            The steps of its work.

        Raises:
            RuntimeError: If it fails.
        """
        self.wait()
        self._process.join()
        if self._process.exitcode != 0 or self.steps[-1] != END:
            raise self._failed()
        return self.steps[:-1]

    def _failed(self) -> RuntimeError:
        return RuntimeError(f"It ended with {self._process.exitcode} after {self.steps[-3:]}.")


def _work(task: Callable, pipe: Connection, *arguments: object) -> None:
    task(pipe, *arguments)
    tell(END)


def run(task: Callable, *arguments: object) -> list[str]:
    """The steps of work that is left alone; raises as `Child.end`."""
    return Child(task, *arguments).end()


def killed(moment: Moment, task: Callable, *arguments: object) -> str | None:
    """Kill work at a moment.

    Args:
        moment: When.
        task: As `Child` takes it, and the arguments.

    Returns:
        Where, as `Child.where` has it; None if it ended before.

    Raises:
        RuntimeError: If it fails.
    """
    child = Child(task, *arguments)
    child.wait(moment.step)
    return child.where if child.kill(moment.delay) else None
