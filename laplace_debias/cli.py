"""The command line: `laplace-debias demo | train | fit | tune | evaluate | spectrum | ...`."""

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_EXTRAS = {"jsonargparse", "yaml", "matplotlib", "rich", "PIL", "sklearn", "timm", "torchvision"}
_HINT = "pip install 'laplace-debias[cli]'"

Command = tuple[type, Callable[[Any], object], str]
"""A dataclass of settings, what runs with them, and help in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What stands behind `laplace-debias`; that of the process if None.

    Returns:
        The exit status: 0, or 2 after an error that is told in one line.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRAS:
            raise
        return _fail(f"this command needs {error.name}, which is not installed: {_HINT}")
    except (ValueError, TypeError, NotImplementedError, ArithmeticError, OSError) as error:
        return _fail(str(error))
    except ImportError as error:
        if _HINT not in str(error):
            raise
        return _fail(str(error))


def _run(arguments: list[str]) -> int:
    # Its parser knows every experiment's options, which takes a moment to build.
    if arguments[:1] == ["experiment"]:
        description = "Repeat one of the paper's experiments."
        return _dispatch(
            "laplace-debias experiment", description, _experiments(), arguments[1:], lists=True
        )
    description = "Laplace approximations of trained networks, debiased."
    return _dispatch("laplace-debias", description, _commands(), arguments)


def _dispatch(
    prog: str,
    description: str,
    commands: dict[str, Command],
    arguments: list[str],
    lists: bool = False,
) -> int:
    from jsonargparse import ArgumentParser

    options: dict[str, list[str]] = {}

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            chosen = next((options[word] for word in arguments if word in options), [])
            raise ValueError(_explained(message, commands, chosen)) from ex

    # A cut off option is a mistyped one, not whatever begins like it.
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    if lists:
        parser.add_argument("--list", action=_List, help="List the experiments and exit.")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, (settings, _, help_) in commands.items():
        subparser = Parser(description=help_, allow_abbrev=False)
        if settings is not _Anything:
            subparser.add_argument("--config", action="config", help="YAML file of these options.")
            subparser.add_class_arguments(settings, as_group=False)
            for field in dataclasses.fields(settings):
                if field.type in (bool, "bool"):  # `--resume` is short for `--resume=true`
                    action = subparser._option_string_actions[f"--{field.name}"]
                    action.nargs, action.const = "?", "true"
        subcommands.add_subcommand(name, subparser, help=help_)
        options[name] = list(subparser.get_defaults().keys(branches=True))
    parsed = parser.parse_args(arguments)
    # jsonargparse 4.49 renamed the method.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    chosen = instantiate(parsed)[parsed.command]
    settings, run, _ = commands[parsed.command]
    del chosen["config"]
    run(settings(**vars(chosen)))
    return 0


class _Anything:
    """Settings of a command that has subcommands of its own."""


class _List(argparse.Action):
    """Prints the experiments, one a line, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=options.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from laplace_debias.experiments.registry import EXPERIMENTS

        rows = [(entry.name, entry.figure, entry.help) for entry in EXPERIMENTS]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, figure, help_ in rows:
            print(f"{name:{widths[0]}}  {figure:{widths[1]}}  {help_}")
        parser.exit()


def _experiments() -> dict[str, Command]:
    from laplace_debias.experiments.registry import EXPERIMENTS

    return {
        entry.name: (entry.settings, entry.run, f"{entry.figure}: {entry.help}")
        for entry in EXPERIMENTS
    }


def _commands() -> dict[str, Command]:
    from laplace_debias.experiments.bias.spectrum import SpectrumSettings, run_spectrum
    from laplace_debias.experiments.posteriors.demo import DemoSettings, run_demo
    from laplace_debias.experiments.posteriors.evaluation import EvaluationSettings, run_evaluation
    from laplace_debias.experiments.posteriors.posterior_file import (
        FittingSettings,
        TuningSettings,
        run_fit,
        run_tune,
    )
    from laplace_debias.experiments.shared.training import TrainingSettings, run_training

    return {
        "demo": (
            DemoSettings,
            run_demo,
            "Train a small network on digits and make it Bayesian four ways.",
        ),
        "evaluate": (
            EvaluationSettings,
            run_evaluation,
            "Compare posteriors of a trained All-CNN-C on CIFAR-10.",
        ),
        "fit": (
            FittingSettings,
            run_fit,
            "Fit the posterior of a trained network and save it.",
        ),
        "tune": (
            TuningSettings,
            run_tune,
            "Tune a saved posterior's prior precision.",
        ),
        "spectrum": (
            SpectrumSettings,
            run_spectrum,
            "Measure the leading eigenpairs, the trace and the density of a network's curvature.",
        ),
        "train": (
            TrainingSettings,
            run_training,
            "Train a test problem's network.",
        ),
        "experiment": (_Anything, lambda _: None, "Repeat one of the paper's experiments."),
    }


def _explained(message: str, commands: Iterable[str], options: Iterable[str]) -> str:
    """The parser's message, with options called as on the command line and the nearest ones.

    Args:
        message: The parser's.
        commands: All commands.
        options: Options of the one that was chosen, without dashes.
    """
    message = re.sub(rf"(?<![\w/.-])({'|'.join(commands)})\.(?=\w)", "--", message)
    unknown: list[str] = []
    known = list(options)
    if message.startswith("unrecognized arguments"):
        unknown, known = re.findall(r"--[\w.-]+", message), [f"--{option}" for option in options]
    elif key := re.search(r"does not accept option '([^']*)'", message):
        unknown = [key[1]]
    elif choice := re.search(r"invalid choice: '([^']*)'", message):
        unknown, known = [choice[1]], list(commands)
    near = [close for name in unknown for close in difflib.get_close_matches(name, known, n=1)]
    return f"{message}; did you mean {' '.join(near)}?" if near else message


def _fail(message: str) -> int:
    print(f"laplace-debias: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
