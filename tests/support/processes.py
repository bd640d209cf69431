"""Processes that run tasks of tests: started once, with a new process group for each task."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

MAX_PROCESSES = 4
_TIMEOUT = 120
_NO_GROUP = "the processes did not connect"


class Processes:
    """Up to `MAX_PROCESSES` processes, started when they are needed.

    A task is a function of a module in `tests/support`. Each process calls it with its rank and the
    further arguments, in a process group or without one.
    """

    def __init__(self):
        self._workers = []
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0

    def run(self, num_ranks, task, *args):
        """Return the results of a task, by rank; an error is its class name and its message."""
        # On a busy machine, gloo sometimes closes a connection while it makes the group.
        for _ in range(3):
            self.start(num_ranks, task, *args)
            results = []
            for rank in range(num_ranks):
                results.append(self.result(rank))
                if isinstance(results[-1], str) and results[-1] == _NO_GROUP:
                    self.close()
                    break
            else:
                return results
        raise AssertionError(_NO_GROUP)

    def start(self, num_ranks, task, *args, has_group=True):
        # The processes are forked from a server that has imported these modules already, because
        # the imports take seconds.
        context = multiprocessing.get_context("forkserver")
        commands = [f"laplace_debias.commands.{name}" for name in ("report", "spectrum", "predict")]
        context.set_forkserver_preload(["torch._dynamo", "yaml", "rich.console", *commands])
        while len(self._workers) < num_ranks:
            ours, theirs = context.Pipe()
            stacks = self._stacks_file(len(self._workers))
            process = context.Process(target=_work, args=(theirs, stacks), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._count += 1
        store = Path(self._folder.name) / str(self._count)
        for rank, (_, pipe) in enumerate(self._workers[:num_ranks]):
            url = store.as_uri() if has_group else None
            pipe.send_bytes(pickle.dumps((task, rank, num_ranks, url, args)))

    def result(self, rank):
        _, pipe = self._workers[rank]
        if not pipe.poll(_TIMEOUT):
            report = f"rank {rank} did not answer within {_TIMEOUT} s\n{self._report()}"
            # The next task must not wait for a process that still works at this one.
            self.close()
            raise AssertionError(report)
        return pickle.loads(pipe.recv_bytes())

    def _report(self):
        """Say what each process has answered, or else what its threads are doing."""
        for process, _ in self._workers:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        lines = []
        for rank, (_, pipe) in enumerate(self._workers):
            if pipe.poll():
                lines.append(f"rank {rank} answered {pickle.loads(pipe.recv_bytes())}")
            else:
                lines.append(f"rank {rank}:\n{self._stacks_file(rank).read_text()}")
        return "\n".join(lines)

    def _stacks_file(self, rank):
        return Path(self._folder.name) / f"stacks_{rank}"

    def process(self, rank):
        return self._workers[rank][0]

    def close(self):
        """End all processes; the next task starts others."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def _work(pipe, stacks):
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.fsync = lambda descriptor: None  # as tests/conftest.py
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            task, rank, num_ranks, url, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if url is not None:
            try:
                dist.init_process_group("gloo", init_method=url, rank=rank, world_size=num_ranks)
            except RuntimeError:
                pipe.send_bytes(pickle.dumps(_NO_GROUP))
                return
        try:
            result = task(rank, *args)
        except BaseException as error:
            if os.environ.get("SHOW_ERRORS"):
                traceback.print_exc()
            result = type(error).__name__, str(error)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(result))
