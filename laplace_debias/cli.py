"""The command line: `laplace-debias fit | tune | predict | evaluate | report | spectrum`.

A command is imported when it is chosen: help and mistyped names cost no import of torch.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from laplace_debias.commands import COMMANDS
from laplace_debias.system.ranks import RankError, together

_EXTRAS = {
    *("jsonargparse", "yaml", "matplotlib", "rich", "PIL", "sklearn", "timm", "torchvision"),
    *("pandas", "pyarrow", "jinja2"),
}
_HINT = "pip install 'laplace-debias[cli]'"
_TRACEBACK = "--traceback"
_USAGE = """usage: laplace-debias [--help] [--version] command [options]

Laplace approximations of trained networks, debiased."""
# Until torchrun ends a process that has failed, the first one has told why.
_TOLD = 1.0
# What torch says of an error of a data set in a worker; another rank's is told of before.
_IN_WORKER = re.compile(r"(Rank \d+ failed with \w+: )?Caught \w+ in DataLoader worker process")
_WRONG = re.compile(r'Parser key "([\w.]+)": (.*?)G(?:iven|ot) value: ([^{]*)', re.DOTALL)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
# Errors whose text is meant for the user.
_SAID = (ValueError, TypeError, NotImplementedError, ArithmeticError, OSError, RankError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words after `laplace-debias`; those of the process if None.

    Returns:
        The exit status: 0, 2 after an error that is told in one line, or 130 after Ctrl-C.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    rest = [argument for argument in given if argument != _TRACEBACK]
    stderr, as_python_does = sys.stderr, warnings.formatwarning
    # One line, without the place in the source.
    warnings.formatwarning = lambda message, *_, **__: (
        f"Warning: {' '.join(str(message).split())}\n"
    )
    try:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return _run(rest)
        with _as_one_of_several():
            return _run(rest)
    except (KeyboardInterrupt, Exception) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_TOLD)
            return 2
        if len(rest) < len(given) and isinstance(error, Exception):
            traceback.print_exception(error, file=stderr)
        if isinstance(error, KeyboardInterrupt):
            how = str(error) or "it has not begun; give the same command again"
            # On a line of its own: the terminal shows ^C, or a progress bar.
            print(f"\nlaplace-debias: stopped: {how}", file=stderr, flush=True)
            return 130
        told = " ".join(_told(error).split())
        print(f"laplace-debias: error: {told}", file=stderr, flush=True)
        return 2
    finally:
        warnings.formatwarning = as_python_does


@contextlib.contextmanager
def _as_one_of_several() -> Iterator[None]:
    """The process group that torchrun, or another launcher, describes; its first process prints."""
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with contextlib.ExitStack() as stack:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        )
        stack.callback(distributed.destroy_process_group)
        if distributed.get_rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(together("laplace-debias"))
        yield


def _told(error: BaseException) -> str:
    """An error in one line."""
    if (in_worker := _IN_WORKER.match(str(error))) is not None:
        # The rest is the traceback in the process.
        last = str(error).strip().splitlines()[-1]
        return (
            f"{in_worker[1] or ''}the data set failed in a process that reads it: {last}; "
            f"--workers=0 with {_TRACEBACK} shows where"
        )
    if "DataLoader worker (pid" in str(error):
        return (
            f"{' '.join(str(error).split()).rstrip('.')}: memory, or the shared memory /dev/shm of "
            "a container (docker run --shm-size=8g), ran out, or it crashed. Take fewer --workers "
            "or smaller batches, or --workers=0 to see where it crashes"
        )
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if error.name.partition(".")[0] in _EXTRAS:
            return f"this command needs {error.name}, which is not installed: {_HINT}"
    elif isinstance(error, _SAID) or (isinstance(error, ImportError) and _HINT in str(error)):
        return str(error) or type(error).__name__
    # Nobody foresaw it, so its type says as much as its text.
    return f"{type(error).__name__}: {error}; {_TRACEBACK} shows where"


def _run(arguments: Sequence[str]) -> int:
    """Run the command that comes first with the options behind it; help where it is asked for."""
    if not arguments:
        raise ValueError(f"there is no command; expected one of {', '.join(COMMANDS)}")
    command, *given = arguments
    if command in ("-h", "--help"):
        lines = "".join(f"  {name:10}{text}\n" for name, text in COMMANDS.items())
        print(f"{_USAGE}\n\ncommands (--help after one shows its options):\n{lines}", end="")
        return 0
    if command == "--version":
        print(version("laplace-debias"))
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(COMMANDS)}"
        raise ValueError(f"there is no command {command!r}{meant}")
    module = importlib.import_module(f"laplace_debias.commands.{command}")
    options, unused = _options(command, module.Settings, given)
    try:
        with contextlib.ExitStack() as stack:
            if options.json:  # What libraries and the user's own modules print goes elsewhere.
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            for line in unused:
                print(line)
            result = module.run(options)
            if not options.json:
                return 0
            found = module.as_json(options, result)
        print(json.dumps(found, allow_nan=False))
    except KeyboardInterrupt as stopped:
        how = "nothing was saved; give the same command again"
        if getattr(options, "goes_on", False) or getattr(options, "resume", None):
            how = "give the same command again, and it goes on from what was saved"
        elif hasattr(options, "resume"):
            how += ", with --resume FOLDER"
        raise KeyboardInterrupt(how) from stopped
    return 0


def _options(command: str, settings: type, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The settings that options, or a YAML file of them, make; lines on those without effect."""
    from jsonargparse import ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            options = self.get_defaults(skip_validation=True).keys(branches=True)
            raise ValueError(_explained(message, options, also)) from ex

    given = {part.partition("=")[0] for part in arguments if part.startswith("--")}
    most = [f"--{name}" for name in getattr(settings, "needed_by_most", ())]
    also = [option for option in most if option not in given]

    # A cut off option is a mistyped one, not whatever begins like it.
    epilog = f"{_TRACEBACK}: show where in the source an error came from, too."
    prog, description = f"laplace-debias {command}", COMMANDS[command]
    parser = Parser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file of these options.")
    parser.add_class_arguments(settings, as_group=False)
    for field in dataclasses.fields(settings):
        if field.type in (bool, "bool", bool | None):  # `--resume` is short for `--resume=true`
            action = parser._option_string_actions[f"--{field.name}"]
            action.nargs, action.const = "?", "true"
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    chosen = instantiate(parser.parse_args(_with_named(_arranged(settings, arguments))))
    del chosen["config"]
    options = settings(**vars(chosen))
    return options, _unused_options(options, given)


def _unused_options(options: Any, given: Collection[str]) -> list[str]:
    """A line on options of a file that have no effect, for each reason."""
    why: Mapping[str, str] = getattr(options, "without_effect", dict)()
    spelled = {value: key for key, value in getattr(options, "spelled", {}).items()}
    there = {option.removeprefix("--").partition(".")[0].rstrip("+") for option in given}
    reasons: dict[str, list[str]] = {}
    for field in dataclasses.fields(options):
        if field.name not in why:
            continue
        if field.name in there:
            option = spelled.get(f"--{field.name}", f"--{field.name}")
            raise ValueError(f"{option} has no effect here ({why[field.name]}): leave it out")
        make: Any = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if getattr(options, field.name) != default:
            reasons.setdefault(why[field.name], []).append(field.name)
    return [f"Not used: {', '.join(names)} ({reason})." for reason, names in reasons.items()]


def _arranged(settings: type, arguments: Sequence[str]) -> list[str]:
    """Options as the parser takes them.

    Those with another name in the settings, as Python has reserved theirs or they are given again,
    get it; several values, such as `--corruptions 1,3`, are written `--corruptions=[1,3]`.
    """
    several = {f"--{f.name}" for f in dataclasses.fields(settings) if "tuple[" in str(f.type)}
    spelled: Mapping[str, str] = getattr(settings, "spelled", {})
    again: Mapping[str, str] = getattr(settings, "again", {})
    found: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_again = any(name == one.partition("=")[0] for one in found)
        name = again.get(name, name) if is_again else spelled.get(name, name)
        if found and found[-1] in several and not name.startswith("--"):
            name, equals, value = found.pop(), "=", argument
        if equals and name in several and value[:1] not in ("[", "(", "") and value != "null":
            value = f"[{value}]"
        found.append(f"{name}{equals}{value}")
    return found


def _with_named(arguments: Sequence[str]) -> list[str]:
    """Options with `--ood NAME=PATH` written as `--ood.NAME=PATH`, which may be repeated."""
    line = "".join(f"\0{argument}" for argument in arguments)
    line = re.sub(r"\0--ood[\0=]([^\0={-][^\0=]*=[^\0])", r"\0--ood.\1", line)
    # A JSON or YAML mapping of all of them is left to the parser.
    if re.search(r"\0--ood([\0=](?!\s*\{)|$)", line):
        raise ValueError("--ood: expected --ood NAME=PATH, for example --ood digits=PATH")
    return line.split("\0")[1:]


def _explained(message: str, options: Iterable[str], also: Sequence[str] = ()) -> str:
    """The parser's message, with options written as on the command line, and the nearest ones.

    Args:
        message: The parser's.
        options: The command's options, without dashes.
        also: Options that were not given and that most commands need besides the required ones.
    """
    if wrong := _WRONG.fullmatch(" ".join(message.split())):
        wanted = [
            f"one of {names}" for names in re.findall(r"Expected a \S*Literal\[(.*?)\]", wrong[2])
        ]
        wanted += [word for kind, word in _KINDS.items() if f"<class '{kind}'>" in wrong[2]]
        if wanted:
            return f"--{wrong[1]} {wrong[3]}: expected {' or '.join(wanted)}"
    required, _, missing = message.partition("are required: ")
    if missing:
        told = f"{required}are required: {', '.join(f'--{name}' for name in missing.split(', '))}"
        return f"{told}; most need {' and '.join(also)} too" if also else told
    is_line = message.startswith("unrecognized arguments")
    name = r"--([\w.-]+)" if is_line else r"Option '([^']*)' is not accepted"
    unknown, known = re.findall(name, message), list(options)
    near = [f"--{o}" for name in unknown for o in difflib.get_close_matches(name, known, n=1)]
    return f"{message}; did you mean {' '.join(near)}?" if near else message
