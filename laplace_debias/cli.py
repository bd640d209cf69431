"""The command line, `laplace-debias COMMAND`, which runs one of the `COMMANDS`.

Importing torch takes seconds, so a command reads its options and checks its files first.
"""

import contextlib
import dataclasses
import difflib
import importlib
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from laplace_debias.commands import COMMANDS
from laplace_debias.commands.options import CommandLine
from laplace_debias.sources.imports import check_input
from laplace_debias.system.errors import RankError

_EXTRAS = {
    "PIL",
    "jinja2",
    "matplotlib",
    "pandas",
    "pyarrow",
    "rich",
    "sklearn",
    "timm",
    "torchvision",
    "yaml",
}
"""Packages that are installed with the extra `cli`."""
_HINT = "pip install 'laplace-debias[cli]'"
_TRACEBACK = "--traceback"
_USAGE = """usage: laplace-debias [--help] [--version] command [options]

Fit, tune and evaluate Laplace approximations of trained PyTorch networks."""
_SECONDS_OF_FIRST_RANK = 1.0
"""Seconds that the other processes wait before they exit. This gives the first process time to
print its error before torchrun terminates all of them."""
_IN_WORKER = re.compile(r"(Rank \d+ failed with \w+: )?Caught \w+ in DataLoader worker process")
"""The beginning of torch's message about an error that a data set raised in a worker process."""
_EXPLAINED = (ValueError, TypeError, NotImplementedError, ArithmeticError, OSError, RankError)
"""Errors whose message is printed as it is, without the type, because it is written for the
user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The arguments after `laplace-debias`. Default: `sys.argv[1:]`.

    Returns:
        The exit status: 0, 2 after an error that is printed in one line, or 130 after Ctrl-C.
    """
    all_words = sys.argv[1:] if arguments is None else list(arguments)
    words = [word for word in all_words if word != _TRACEBACK]
    stderr = sys.stderr
    format_before = warnings.formatwarning
    # Print warnings on one line, without their location in the source.
    warnings.formatwarning = lambda message, *_, **__: (
        f"Warning: {' '.join(str(message).split())}\n"
    )
    try:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return _run(words)
        with _process_group():
            return _run(words)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
            # Python 3.11 replaces Ctrl-C by a RuntimeError if a class is being created.
            error = error.__cause__
        if os.environ.get("RANK", "0") != "0":
            # Only the first process prints the error. Wait for it, because torchrun stops it as
            # soon as this process exits.
            time.sleep(_SECONDS_OF_FIRST_RANK)
            return 2
        if len(words) < len(all_words) and isinstance(error, Exception):
            traceback.print_exception(error, file=stderr)
        if isinstance(error, KeyboardInterrupt):
            remedy = str(error) or "The command had not started. Run the same command again."
            # Start a new line, because the cursor may be after ^C or a progress bar.
            print(f"\nlaplace-debias: stopped: {remedy}", file=stderr, flush=True)
            return 130
        message = " ".join(_message(error).split())
        print(f"laplace-debias: error: {message}", file=stderr, flush=True)
        return 2
    finally:
        warnings.formatwarning = format_before


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Join the process group of torchrun or another launcher, and let only rank 0 print."""
    import torch
    from torch import distributed

    from laplace_debias.system.ranks import collective

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with contextlib.ExitStack() as stack:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        )
        stack.callback(distributed.destroy_process_group)
        if distributed.get_rank() > 0:
            null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        stack.enter_context(collective("laplace-debias"))
        yield


def _message(error: BaseException) -> str:
    """Return the message that the user sees for an error."""
    in_worker = _IN_WORKER.match(str(error))
    if in_worker is not None:
        # All lines but the last are the traceback from the worker process.
        last = str(error).strip().splitlines()[-1]
        kind, _, text = last.partition(": ")
        if kind in {explained.__name__ for explained in _EXPLAINED}:
            last = text
        return (
            f"{in_worker[1] or ''}The data set failed in a worker process: {last.rstrip('.')}. "
            f"To see where, run the command with --workers=0 {_TRACEBACK}."
        )
    if "DataLoader worker (pid" in str(error):
        return (
            f"{' '.join(str(error).split()).rstrip('.')}. The worker process ran out of memory "
            "or of shared memory (in a container: /dev/shm, docker run --shm-size=8g), or it "
            "crashed. Use fewer --workers or smaller batches. To see a crash, use --workers=0."
        )
    if isinstance(error, BrokenPipeError):
        return (
            "The program that reads the output, such as head or less, ended before the command. "
            "Run the command again, and write its output to a file."
        )
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if error.name.partition(".")[0] in _EXTRAS:
            return f"This command needs {error.name}, which is not installed. Run {_HINT}."
    elif isinstance(error, _EXPLAINED) or (isinstance(error, ImportError) and _HINT in str(error)):
        return str(error) or type(error).__name__
    # Show the type of an unexpected error, because the type is often as informative as the text.
    text = str(error).rstrip(".")
    return f"{type(error).__name__}: {text}. To see where it was raised, add {_TRACEBACK}."


def _run(words: Sequence[str]) -> int:
    """Run the command that the first word names, or print the help or the version."""
    if not words:
        raise ValueError(f"No command was specified. Use one of {', '.join(COMMANDS)}.")
    command, *options = words
    if command in ("-h", "--help"):
        lines = "".join(f"  {name:10}{text}\n" for name, text in COMMANDS.items())
        print(f"{_USAGE}\n\ncommands (--help after one shows its options):\n{lines}")
        print(f"{_TRACEBACK} shows where in the source an error was raised.")
        return 0
    if command == "--version":
        from laplace_debias.system.version import __version__

        print(__version__)
        return 0
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        expected = f" Use one of {', '.join(COMMANDS)}."
        if nearest:
            expected = f" Did you mean {nearest[0]}?"
        raise ValueError(f"There is no command {command!r}.{expected}")
    module = importlib.import_module(f"laplace_debias.commands.{command}")
    line = CommandLine(module.Settings, f"laplace-debias {command}", COMMANDS[command])
    read = line.settings(options)
    if read is None:
        return 0
    settings, notes = read
    _check_inputs(settings)
    try:
        _execute(module, settings, notes)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_how_to_resume(settings)) from error
    return 0


def _check_inputs(settings: Any) -> None:
    """Raise an error if an option names a file, folder or module that does not exist."""
    for field in dataclasses.fields(settings):
        if not field.metadata.get("is_input"):
            continue
        value = getattr(settings, field.name)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                check_input(path, field.metadata["name"] or field.name)


def _execute(module: Any, settings: Any, notes: Sequence[str]) -> None:
    """Run a command; if `json` is set, print only its JSON object to standard output."""
    if not settings.json:
        for note in notes:
            print(note)
        module.run(settings)
        return
    # Libraries and the user's modules may also print. Their output must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        for note in notes:
            print(note)
        result = module.as_json(settings, module.run(settings))
    print(json.dumps(result, allow_nan=False))


def _how_to_resume(settings: Any) -> str:
    """Return a sentence on how to resume or restart the command after Ctrl-C."""
    if settings.resumes or getattr(settings, "resume", None):
        return "To resume, run the same command again."
    restart = "Nothing was saved. To start again, run the same command"
    return f"{restart} with --resume FOLDER." if hasattr(settings, "resume") else f"{restart}."
