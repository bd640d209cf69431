"""Fill a command's dataclass of settings from the command line and from settings files.

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
    """A command-line option, which sets one field of the command's settings.

    Attributes:
        field: Name of the field.
        name: Name on the command line, without dashes.
        kind: Type of its value.
        default: Value if the option is not given; `dataclasses.MISSING` if it is required.
        text: Description.
        metavar: Placeholder of its value in the help.
        heading: Heading in the help.
        repeats: Field of another option. If that option is repeated, this option gets the values
            after the first one. None if there is no such option.
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
        """The help text for `argparse`: the description and the default."""
        text = self.text
        if self.is_required:
            text += " Required."
        elif isinstance(self.default, bool):
            text += " Default: true." if self.default else ""
        elif isinstance(self.default, str | int | float | Path) and self.default != "":
            text += f" Default: {self.default}."
        return text.replace("%", "%%")

    def value(self, text: str, key: str = "") -> Any:
        """Convert a string from the command line to the type of the field.

        Args:
            text: The string. For a dictionary, it is `KEY=VALUE` or a JSON or YAML mapping.
            key: If the field is a dictionary, the key whose value is `text`.

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
        program: The words that call the command, such as `laplace-debias fit`.
        summary: One sentence on what the command does.
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
        """Read the options. If the help or the settings are requested, print them and return None.

        Returns:
            The settings, and messages about options in the settings file that have no effect.

        Raises:
            ValueError: If an option is unknown, missing or without effect, or a value has the wrong
                type.
            OSError: If a file cannot be read.
        """
        if "--help" in arguments or "-h" in arguments:
            print(self._parser().format_help(), end="")
            return None
        values_on_line = vars(self._parse(arguments))
        paths = values_on_line.pop("config")
        only_prints = values_on_line.pop("print_config")
        values: dict[str, Any] = {}
        for path in paths:
            values |= self._values_of_file(path)
        for option in self._options:
            option_values = values_on_line.get(option.field, [])
            if option.field in self._further:
                _merge(self._further[option.field], [option_values[1:]], values)
                option_values = option_values[:1]
            _merge(option, option_values, values)
        if only_prints:
            print(self._as_yaml(values), end="")
            return None
        self._check_required(values)
        settings = self._settings(**values)
        return settings, self._unused_lines(settings, values_on_line)

    # ------------------------------------------------------------------------- the command line

    def _parser(self) -> argparse.ArgumentParser:
        """Return a parser that collects all values of an option in a list."""
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
        # In the help, the heading of this command comes first, and its own fields come before
        # inherited ones.
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
        """Return `config`, `print_config`, and the values of each field on the command line."""
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
        """Return the message for an option whose value is missing or invalid."""
        flag = str(error.argument_name)
        advice = "--help lists the options."
        option = self._by_name.get(flag.removeprefix("--"))
        if option is not None:
            advice = f"Use {flag} {option.metavar}."
        return f"{flag}: {error.message}. {advice}"

    def _unknown(self, name: str, dashes: str) -> str:
        """Return the message for an unknown option, with the most similar name."""
        names = [dashes + option.name for option in self._options]
        if dashes:
            names += ["--help", "--config", "--print_config"]
        nearest = difflib.get_close_matches(name, names, n=1)
        advice = f"Did you mean {nearest[0]}?" if nearest else "--help lists the options."
        return f"{self._program} has no option {name}. {advice}"

    # ------------------------------------------------------------------------- files and checks

    def _values_of_file(self, path: Path) -> dict[str, Any]:
        """Return the values from a settings file, keyed by field."""
        if not path.is_file():
            state = "is not a file" if path.exists() else "does not exist"
            raise FileNotFoundError(f"The file of --config, {path}, {state}. Check the path.")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not a text file in UTF-8. Save it with this encoding."
            ) from error
        content = parsed_yaml(text, str(path))
        if not isinstance(content, Mapping):
            state = "is empty" if content is None else f"contains {str(content)[:60]!r}"
            raise ValueError(
                f"{path} must contain options, but {state}. Write "
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
        """Format the settings as YAML that `--config` can read."""
        import yaml

        content = {
            option.field: plain(values.get(option.field, option.default))
            for option in self._options
            if option.field in values or not option.is_required
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)

    def _check_required(self, values: Mapping[str, Any]) -> None:
        """Raise an error if an option without a default is missing."""
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
        """Return a line for each reason why options in the settings file have no effect.

        On the command line, an option that has no effect raises an error instead.
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
    """Convert a string from the command line to a path."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return Path(text)


def _merge(option: Option, option_values: Sequence[Any], values: dict[str, Any]) -> None:
    """Add an option's values to `values`; dictionaries and lists are extended, not replaced."""
    for value in option_values:
        if option.container is dict:
            values[option.field] = {**values.get(option.field, {}), **value}
        elif option.container is list:
            values[option.field] = [*values.get(option.field, []), *value]
        else:
            values[option.field] = value


def _with_joined_values(arguments: Sequence[str]) -> list[str]:
    """Join an option and a value that begins with a dash, such as -1,2, to `--mean=-1,2`.

    Otherwise, `argparse` would mistake the value for an option.
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
    """Read the descriptions of attributes from docstrings; a class overrides its base classes."""
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
    """Format the examples at the end of the help, in lines of at most `width` characters."""
    lines = []
    for call in calls:
        lines_of_call = textwrap.wrap(call, width - 8, break_on_hyphens=False)
        lines.append("\n  " + " \\\n      ".join(lines_of_call))
    return "Examples:" + "".join(lines) if lines else ""


def _metavar(kind: Any) -> str:
    """Return the placeholder that represents a value in the help."""
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
