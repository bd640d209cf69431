"""One command in several processes, as a launcher starts them."""

import contextlib
import io
import os
import socket
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """How one process ended."""

    status: int
    out: str
    err: str


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def command(rank, num_ranks, folder, port, arguments, modules=("nets",)):
    """`laplace-debias` in a folder, as rank `rank`."""
    from laplace_debias.cli import main

    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder)
    path, before = list(sys.path), dict(os.environ)
    for name in modules:
        sys.modules.pop(name, None)
    out, err = io.StringIO(), io.StringIO()
    os.environ.update(launched)
    try:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        # A process that has run another command has shown no warning yet.
        with streams[0], streams[1], warnings.catch_warnings():
            status = main(list(arguments))
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)
    return Done(status, out.getvalue(), err.getvalue())


def together(processes, num_ranks, folder, *arguments):
    """The ends of all processes of one command, by rank."""
    port = free_port()
    processes.start(num_ranks, command, num_ranks, str(folder), port, arguments, has_group=False)
    return [processes.result(rank) for rank in range(num_ranks)]
