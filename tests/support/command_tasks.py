"""One command in several processes, as a launcher starts them."""

import contextlib
import io
import os
import socket
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Completed:
    """The exit status and the output of one process."""

    status: int
    out: str
    err: str


def free_port():
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


def command(rank, num_ranks, folder, port, arguments, modules=("nets",)):
    """Run `laplace-debias` in a folder, as one of several processes."""
    from laplace_debias.cli import main

    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder)
    original_path = list(sys.path)
    original_environment = dict(os.environ)
    for name in modules:
        sys.modules.pop(name, None)
    out = io.StringIO()
    err = io.StringIO()
    os.environ.update(launched)
    try:
        capture_out = contextlib.redirect_stdout(out)
        capture_err = contextlib.redirect_stderr(err)
        # An earlier command in this process must not suppress warnings that are shown once.
        with capture_out, capture_err, warnings.catch_warnings():
            status = main(list(arguments))
    finally:
        sys.path[:] = original_path
        os.environ.clear()
        os.environ.update(original_environment)
    return Completed(status, out.getvalue(), err.getvalue())


def together(processes, num_ranks, folder, *arguments):
    """Run one command in several processes; return their results by rank."""
    port = free_port()
    processes.start(num_ranks, command, num_ranks, str(folder), port, arguments, has_group=False)
    return [processes.result(rank) for rank in range(num_ranks)]
