"""The command line of a command, which fills a dataclass of settings from options and files.

`argparse` splits the words of the command line and formats the help.

This module does not import torch, so that help and errors are printed quickly.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from laplace_debias.commands.values import (
    UnexpectedValueError,
    convert,
    members,
    parsed_yaml,
    plain,
)
from laplace_debias.system.settings import CommandSettings

Settings = TypeVar("Settings", bound=CommandSettings)

_COLUMN = 28
_MOST_COLUMNS = 100
_METAVARS: Mapping[Any, str] = {
    int: "N",
    float: "NUMBER",
    str: "NAME",
    Path: "PATH",
    bool: "true|false",
    Any: "VALUE",
}


@dataclass(frozen=True)
class Option:
    """An option of a command, which sets one field of its settings.

    Attributes:
        field: Name of the field.
        name: Name on the command line, without dashes.
        kind: Type of its value.
        default: Value if the option is not given; `dataclasses.MISSING` if it is required.
        text: Description.
        metavar: Placeholder of its value in the help.
        heading: Heading in the help.
        repeats: Field of the option whose values after the first one this option takes, or None.
    """

    field: str
    name: str
    kind: Any
    default: Any
    text: str
    metavar: str
    heading: str
    repeats: str | None

    @property
    def is_required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    @property
    def container(self) -> Any:
        """`dict`, `list` or `tuple` for containers, otherwise the type itself."""
        kinds = [kind for kind in members(self.kind) if kind is not NoneType]
        return get_origin(kinds[0]) or kinds[0]

    @property
    def help(self) -> str:
        """The description and the default, in the form of `argparse`."""
        text = self.text
        if self.is_required:
            text += " Required."
        elif isinstance(self.default, bool):
            text += " Default: true." if self.default else ""
        elif isinstance(self.default, str | int | float | Path) and self.default != "":
            text += f" Default: {self.default}."
        return text.replace("%", "%%")

    def value(self, text: str, key: str = "") -> Any:
        """Convert a text of the command line to the type of the field.

        Args:
            text: The text. For a dictionary, it is `KEY=VALUE`, JSON or YAML.
            key: A key of a dictionary, whose value is the text.

        Raises:
            argparse.ArgumentTypeError: If the text cannot be converted.
        """
        if not text:
            raise argparse.ArgumentTypeError("the value is empty")
        content: Any = text
        if key:
            content = {key: text}
        elif self.container is dict and not text.lstrip().startswith("{"):
            key, _, entry = text.partition("=")
            if not key or not entry:
                raise argparse.ArgumentTypeError(f"expected {self.metavar}, got {text!r}")
            content = {key: entry}
        try:
            return convert(content, self.kind)
        except UnexpectedValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from error


class CommandLine(Generic[Settings]):
    """The options of a command.

    Args:
        settings: The class of its settings.
        program: The words with which the command is called.
        summary: The purpose of the command, a sentence.
    """

    def __init__(self, settings: type[Settings], program: str, summary: str) -> None:
        self._settings = settings
        self._program = program
        self._summary = summary
        self._options = list(_options(settings))
        self._by_name = {option.name: option for option in self._options}
        self._by_name |= {option.field: option for option in self._options}
        self._further = {option.repeats: option for option in self._options if option.repeats}

    def settings(self, arguments: Sequence[str]) -> tuple[Settings, list[str]] | None:
        """Read the options; if help is requested, print it and return None.

        Returns:
            The settings, and a line on each option of a file that has no effect.

        Raises:
            ValueError: For an unknown or missing option, or a value of another type.
            OSError: For a file that cannot be read.
        """
        if "--help" in arguments or "-h" in arguments:
            print(self._parser().format_help(), end="")
            return None
        on_line = vars(self._parse(arguments))
        paths = on_line.pop("config")
        only_prints = on_line.pop("print_config")
        values: dict[str, Any] = {}
        for path in paths:
            values |= self._values_of_file(path)
        for option in self._options:
            given = on_line.get(option.field, [])
            if option.field in self._further:
                _merge(self._further[option.field], [given[1:]], values)
                given = given[:1]
            _merge(option, given, values)
        if only_prints:
            print(self._as_yaml(values), end="")
            return None
        self._check_required(values)
        settings = self._settings(**values)
        return settings, self._unused_lines(settings, on_line)

    # ------------------------------------------------------------------------- the command line

    def _parser(self) -> argparse.ArgumentParser:
        """Return a parser that collects the values of each field in a list."""
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        required = [f"--{each.name} {each.metavar}" for each in self._options if each.is_required]
        parser = argparse.ArgumentParser(
            usage=" ".join([self._program, *required, "[options]"]),
            description=self._summary,
            epilog=_examples(self._settings.usage, width),
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=_COLUMN, width=width
            ),
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        # The help begins with the heading of the class, and lists its fields before inherited ones.
        heading = self._settings.heading
        groups = {heading: parser.add_argument_group(heading)}
        own_fields = inspect.get_annotations(self._settings)
        for option in sorted(self._options, key=lambda option: option.field not in own_fields):
            is_hidden = option.repeats is not None or option.field in self._settings.unused
            if option.heading not in groups and not is_hidden:
                groups[option.heading] = parser.add_argument_group(option.heading)
            is_flag = option.container is bool
            groups.get(option.heading, parser).add_argument(
                f"--{option.name}",
                dest=option.field,
                action="append",
                type=option.value,
                nargs="?" if is_flag else None,
                const="true" if is_flag else None,
                metavar=option.metavar,
                help=argparse.SUPPRESS if is_hidden else option.help,
            )
        common = parser.add_argument_group("Besides these")
        common.add_argument(
            "--config",
            action="append",
            default=[],
            type=_path,
            metavar="FILE",
            help="A YAML file of these options. Options on the command line override it.",
        )
        common.add_argument(
            "--print_config",
            action="store_true",
            default=False,
            help="Print the settings in the form of a settings file, and do nothing else.",
        )
        return parser

    def _parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return `config`, `print_config` and, for each field on the command line, its values."""
        parser = self._parser()
        # The keys of dictionaries are not known in advance. Add the keys in the arguments as
        # options, such as --model_args.depth.
        for flag in {word.partition("=")[0] for word in arguments if word.startswith("--")}:
            name, _, key = flag[2:].partition(".")
            option = self._by_name.get(name)
            if key and option is not None and option.container is dict:
                convert_entry = partial(option.value, key=key)
                parser.add_argument(flag, dest=option.field, action="append", type=convert_entry)
        try:
            parsed, unknown = parser.parse_known_args(_with_joined_values(arguments))
        except argparse.ArgumentError as error:
            raise ValueError(self._correction(error)) from error
        if unknown and not unknown[0].startswith("--"):
            raise ValueError(
                f"{unknown[0]!r} is not an option. Options begin with --. Separate several values "
                "of an option by commas."
            )
        if unknown:
            raise ValueError(self._unknown(unknown[0].partition("=")[0], "--"))
        return parsed

    def _correction(self, error: argparse.ArgumentError) -> str:
        """Return the message for an option without a value, or with a wrong one."""
        flag = str(error.argument_name)
        advice = "--help lists the options."
        option = self._by_name.get(flag.removeprefix("--"))
        if option is not None:
            advice = f"Use {flag} {option.metavar}."
        return f"{flag}: {error.message}. {advice}"

    def _unknown(self, name: str, dashes: str) -> str:
        """Return the message for an unknown option, with the nearest name."""
        names = [dashes + option.name for option in self._options]
        if dashes:
            names += ["--help", "--config", "--print_config"]
        nearest = difflib.get_close_matches(name, names, n=1)
        advice = f"Did you mean {nearest[0]}?" if nearest else "--help lists the options."
        return f"{self._program} has no option {name}. {advice}"

    # ------------------------------------------------------------------------- files and checks

    def _values_of_file(self, path: Path) -> dict[str, Any]:
        """Return the values in a settings file, by field."""
        if not path.is_file():
            raise FileNotFoundError(
                f"The file of --config, {path}, does not exist. Check the path."
            )
        content = parsed_yaml(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{path} must contain options, but contains {str(content)[:60]!r}. Write "
                "`OPTION: VALUE` for each option, on a separate line."
            )
        values = {}
        for name, value in content.items():
            option = self._by_name.get(str(name))
            if option is None:
                raise ValueError(f"{path}: {self._unknown(str(name), '')}")
            try:
                values[option.field] = convert(value, option.kind)
            except UnexpectedValueError as error:
                raise ValueError(
                    f"`{name}: {value}` in {path} is not valid. Pass {error}."
                ) from error
        return values

    def _as_yaml(self, values: Mapping[str, Any]) -> str:
        """Format the settings as a file that `--config` can read."""
        import yaml

        content = {
            option.field: plain(values.get(option.field, option.default))
            for option in self._options
            if option.field in values or not option.is_required
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)

    def _check_required(self, values: Mapping[str, Any]) -> None:
        """Require every option without a default."""
        missing = [
            f"--{option.name}"
            for option in self._options
            if option.is_required and option.field not in values
        ]
        if not missing:
            return
        message = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required."
        also = [f"--{name}" for name in self._settings.needed_by_most if name not in values]
        if also:
            message += f" Most commands also need {' and '.join(also)}."
        raise ValueError(message)

    def _unused_lines(self, settings: Settings, on_line: Mapping[str, Any]) -> list[str]:
        """Return a line per reason for which options of a file have no effect.

        An option of the command line that has no effect raises an error.
        """
        reasons = {**settings.unused, **settings.without_effect()}
        names_by_reason: dict[str, list[str]] = {}
        for option in self._options:
            reason = reasons.get(option.field)
            if reason is None:
                continue
            if option.field in on_line:
                raise ValueError(f"--{option.name} has no effect here ({reason}). Remove it.")
            if getattr(settings, option.field) != option.default:
                names_by_reason.setdefault(reason, []).append(option.name)
        return [
            f"Not used: {', '.join(names)} ({reason})." for reason, names in names_by_reason.items()
        ]


def _path(text: str) -> Path:
    """Convert a text of the command line to a path."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return Path(text)


def _merge(option: Option, given: Sequence[Any], values: dict[str, Any]) -> None:
    """Add the values of an option to the values by field; entries of containers are kept."""
    for value in given:
        if option.container is dict:
            values[option.field] = {**values.get(option.field, {}), **value}
        elif option.container is list:
            values[option.field] = [*values.get(option.field, []), *value]
        else:
            values[option.field] = value


def _with_joined_values(arguments: Sequence[str]) -> list[str]:
    """Write a value that begins with a dash, such as -1,2, in the form `--mean=-1,2`.

    Otherwise `argparse` takes the value for an option.
    """
    words: list[str] = []
    for word in arguments:
        if re.match("-[^-]", word) and words and re.fullmatch("--[^=]+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _options(settings: type[Any]) -> Iterator[Option]:
    """Yield the fields of settings as options."""
    kinds = get_type_hints(settings)
    texts = _texts(settings)
    headings: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if issubclass(cls, CommandSettings):
            headings |= dict.fromkeys(inspect.get_annotations(cls), cls.heading)
    for entry in dataclasses.fields(settings):
        default = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        yield Option(
            field=entry.name,
            name=entry.metadata.get("name") or entry.name,
            kind=kinds[entry.name],
            default=default,
            text=texts.get(entry.name, ""),
            metavar=entry.metadata.get("metavar") or _metavar(kinds[entry.name]),
            heading=entry.metadata.get("heading") or headings[entry.name],
            repeats=entry.metadata.get("repeats"),
        )


def _texts(settings: type) -> dict[str, str]:
    """Read the texts of attributes in docstrings; a class overrides its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition(
            "Attributes:\n"
        )
        section = re.split(r"\n(?=\S)", section)[0]
        for entry in re.split(r"\n(?=    \S)", section):
            name, _, text = entry.strip().partition(":")
            if text:
                texts[name] = " ".join(text.split())
    return texts


def _examples(calls: Sequence[str], width: int) -> str:
    """Format the examples that end the help, with at most `width` columns."""
    lines = []
    for call in calls:
        lines_of_call = textwrap.wrap(call, width - 8, break_on_hyphens=False)
        lines.append("\n  " + " \\\n      ".join(lines_of_call))
    return "Examples:" + "".join(lines) if lines else ""


def _metavar(kind: Any) -> str:
    """Return the placeholder of a value in the help."""
    (first, *_) = [member for member in members(kind) if member is not NoneType]
    origin = get_origin(first) or first
    if origin is Literal:
        return "|".join(map(str, get_args(first)))
    if origin is dict:
        return "KEY=VALUE"
    if origin in (tuple, list):
        metavar = _metavar(get_args(first)[0])
        return f"{metavar},…" if origin is tuple else metavar
    return _METAVARS[first]
