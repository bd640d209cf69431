"""The parser of a command's settings, which fills a dataclass from options and files.

The types and the defaults are those of the dataclass; the help text of a field is its entry in the
`Attributes` of the docstring. The following class attributes are optional:

- `option_names`: names on the command line by field, if they differ from the field;
- `repeated`: by field, the field of type list that takes further values if an option is repeated;
- `groups`: headings of the help, each with fields; `metavars`: placeholders of values in the help;
- `unused`: fields that the command does not use, with the reason; the help leaves them out;
- `usage`: examples that end the help; `needed_by_most`: fields that most calls need.

This module does not import torch, so that help and errors are printed quickly.
"""

import dataclasses
import difflib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from laplace_debias.commands.values import (
    UnexpectedValueError,
    converted,
    members,
    parsed_yaml,
    plain,
)

Settings = TypeVar("Settings")

_COLUMN = 26
_MOST_COLUMNS = 100
_METAVARS: Mapping[Any, str] = {
    int: "N",
    float: "NUMBER",
    str: "NAME",
    Path: "PATH",
    bool: "true|false",
    Any: "VALUE",
}
_COMMON = {
    "--config FILE": "A YAML file of these options. Options on the command line override it.",
    "--print_config": "Print the settings in the form of a settings file, and do nothing else.",
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
    """

    field: str
    name: str
    kind: Any
    default: Any
    text: str
    metavar: str

    @property
    def container(self) -> Any:
        """`dict`, `list` or `tuple` for containers, otherwise the type itself."""
        kinds = [kind for kind in members(self.kind) if kind is not NoneType]
        return get_origin(kinds[0]) or kinds[0]


@dataclass
class OptionValues:
    """The values that were read so far, and the fields that were set on the command line."""

    values: dict[str, Any] = field(default_factory=dict)
    on_line: set[str] = field(default_factory=set)


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

    def settings(self, arguments: Sequence[str]) -> tuple[Settings, list[str]] | None:
        """Read the options; if help is requested, print it and return None.

        Returns:
            The settings, and a line on each option of a file that has no effect.

        Raises:
            ValueError: For an unknown or missing option, or a value of another type.
            OSError: For a file that cannot be read.
        """
        if "--help" in arguments or "-h" in arguments:
            print(self.help(), end="")
            return None
        words = [word for word in arguments if word != "--print_config"]
        values_read = self._read(words)
        if len(words) < len(arguments):
            print(self._as_yaml(values_read.values), end="")
            return None
        self._check_required(values_read.values)
        settings = self._settings(**values_read.values)
        return settings, self._unused_lines(settings, values_read.on_line)

    # ------------------------------------------------------------------------- reading

    def _read(self, words: Sequence[str]) -> OptionValues:
        """Read the files first, in their order, and then the options of the command line."""
        pairs = list(self._pairs(words))
        option_values = OptionValues()
        for name, text in pairs:
            if name == "config":
                self._read_file(Path(text), option_values)
        for name, text in pairs:
            if name != "config":
                self._read_option(name, text, option_values)
        return option_values

    def _pairs(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield option names and texts, from `--name=text`, `--name text` or only `--name`."""
        remaining = list(words)
        while remaining:
            word = remaining.pop(0)
            if not word.startswith("--"):
                raise ValueError(f"{word!r} is not an option. Options begin with --.")
            name, equals, text = word[2:].partition("=")
            if not equals and remaining and not remaining[0].startswith("--"):
                text = remaining.pop(0)
            elif not equals and self._is_flag(name):
                text = "true"
            elif not text:
                if name != "config":
                    self._option_and_key(name)
                raise ValueError(f"--{name} has no value. Use {self._form(name)}.")
            yield name, text

    def _is_flag(self, name: str) -> bool:
        option = self._by_name.get(name)
        return option is not None and option.container is bool

    def _form(self, name: str) -> str:
        """Return the form in which an option is written, for messages."""
        option = self._by_name.get(name)
        metavar = "VALUE" if option is None else option.metavar
        if name == "config":
            metavar = "FILE"
        separator = "" if metavar.startswith(".") else " "
        example = f", for example --{name} digits=PATH" if name == "ood" else ""
        return f"--{name}{separator}{metavar}{example}"

    def _option_and_key(self, name: str) -> tuple[Option, str]:
        """Return the option of a name such as `ood` or `model_args.depth`, and the key in it."""
        option = self._by_name.get(name)
        if option is not None:
            return option, ""
        field_name, _, key = name.partition(".")
        option = self._by_name.get(field_name)
        if option is None or not key or option.container is not dict:
            raise ValueError(self._unknown(f"--{name}", "--"))
        return option, key

    def _read_option(self, name: str, text: str, option_values: OptionValues) -> None:
        option, key = self._option_and_key(name)
        repeated: Mapping[str, str] = getattr(self._settings, "repeated", {})
        if option.field in option_values.on_line and option.field in repeated:
            option = self._by_name[repeated[option.field]]
        option_values.on_line.add(option.field)
        value: Any
        try:
            if option.container is dict:
                entries = {key: text} if key else self._entries(option, text)
                earlier = option_values.values.get(option.field, {})
                value = {**earlier, **converted(entries, option.kind)}
            elif option.container is list:
                value = [*option_values.values.get(option.field, []), *converted(text, option.kind)]
            else:
                value = converted(text, option.kind)
        except UnexpectedValueError as error:
            raise ValueError(f"`--{name} {text}` is not valid. Pass {error}.") from error
        option_values.values[option.field] = value

    def _entries(self, option: Option, text: str) -> Any:
        """Return the entries of a mapping, from `KEY=VALUE` or from JSON or YAML."""
        if text.lstrip().startswith("{"):
            return text
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"--{option.name} has no value. Use {self._form(option.name)}.")
        return {key: value}

    def _read_file(self, path: Path, option_values: OptionValues) -> None:
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
        for name, value in content.items():
            option = self._by_name.get(str(name))
            if option is None:
                raise ValueError(f"{path}: {self._unknown(str(name), '')}")
            try:
                option_values.values[option.field] = converted(value, option.kind)
            except UnexpectedValueError as error:
                raise ValueError(
                    f"`{name}: {value}` in {path} is not valid. Pass {error}."
                ) from error

    def _unknown(self, name: str, dashes: str) -> str:
        names = [dashes + option.name for option in self._options]
        nearest = difflib.get_close_matches(name, names, n=1)
        advice = f"Did you mean {nearest[0]}?" if nearest else "--help lists the options."
        return f"{self._program} has no option {name}. {advice}"

    def _check_required(self, values: Mapping[str, Any]) -> None:
        missing = [
            f"--{option.name}"
            for option in self._options
            if option.default is dataclasses.MISSING and option.field not in values
        ]
        if not missing:
            return
        message = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required."
        usual: Sequence[str] = getattr(self._settings, "needed_by_most", ())
        also = [f"--{name}" for name in usual if name not in values]
        if also:
            message += f" Most commands also need {' and '.join(also)}."
        raise ValueError(message)

    def _unused_lines(self, settings: Settings, on_line: set[str]) -> list[str]:
        """Return a line per reason for which options of a file have no effect.

        An option of the command line that has no effect raises an error.
        """
        reasons: dict[str, str] = dict(getattr(self._settings, "unused", {}))
        reasons |= getattr(settings, "without_effect", dict)()
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

    # ------------------------------------------------------------------------- printing

    def _as_yaml(self, values: Mapping[str, Any]) -> str:
        """Format the settings as a file that `--config` can read."""
        import yaml

        content = {
            option.field: plain(values.get(option.field, option.default))
            for option in self._options
            if option.field in values or option.default is not dataclasses.MISSING
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)

    def help(self) -> str:
        """Format the help: options under headings, then examples."""
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        required = [option for option in self._options if option.default is dataclasses.MISSING]
        usage = [f"--{option.name} {option.metavar}" for option in required]
        lines = [f"usage: {' '.join([self._program, *usage])} [options]", "", self._summary]
        for heading, options in self._by_heading().items():
            lines += ["", f"{heading}:"]
            for option in options:
                lines += _entry(option, width)
        lines += ["", "Besides these:"]
        for form, text in _COMMON.items():
            lines += _lines(form, text, width)
        examples: Sequence[str] = getattr(self._settings, "usage", ())
        if examples:
            lines += ["", "Examples:"]
            for example in examples:
                lines_of_example = textwrap.wrap(example, width - 8, break_on_hyphens=False)
                lines.append("  " + " \\\n      ".join(lines_of_example))
        return "\n".join(lines) + "\n"

    def _by_heading(self) -> dict[str, list[Option]]:
        """Return the options of the help by headings; options without a heading come first."""
        groups = _groups(self._settings)
        listed = {name for names in groups.values() for name in names}
        hidden = {
            *getattr(self._settings, "unused", {}),
            *getattr(self._settings, "repeated", {}).values(),
        }
        groups = {
            "Options": [option.field for option in self._options if option.field not in listed],
            **groups,
        }
        by_heading = {}
        for heading, names in groups.items():
            options = [self._by_name[name] for name in names if name not in hidden]
            if options:
                by_heading[heading] = options
        return by_heading


def _options(settings: type) -> Iterator[Option]:
    """Yield the fields of settings as options."""
    kinds = get_type_hints(settings)
    texts = _texts(settings)
    names: Mapping[str, str] = getattr(settings, "option_names", {})
    metavars: Mapping[str, str] = getattr(settings, "metavars", {})
    for entry in dataclasses.fields(settings):
        default = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        yield Option(
            field=entry.name,
            name=names.get(entry.name, entry.name),
            kind=kinds[entry.name],
            default=default,
            text=texts.get(entry.name, ""),
            metavar=metavars.get(entry.name) or _metavar(kinds[entry.name], default),
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


def _groups(settings: type) -> dict[str, list[str]]:
    """Return the fields by heading; the fields of a class precede the fields of its bases.

    New headings of a class are placed before the last three headings of its bases.
    """
    groups: dict[str, list[str]] = {}
    for cls in reversed(settings.__mro__):
        added: Mapping[str, Sequence[str]] = cls.__dict__.get("groups", {})
        moved = {name for names in added.values() for name in names}
        inherited = {
            heading: [name for name in names if name not in moved]
            for heading, names in groups.items()
        }
        headings = list(inherited)
        headings[-3:-3] = [heading for heading in added if heading not in inherited]
        groups = {
            heading: [*added.get(heading, ()), *inherited.get(heading, ())] for heading in headings
        }
    return groups


def _entry(option: Option, width: int) -> list[str]:
    """Return the lines of an option in the help."""
    separator = "" if option.metavar.startswith(".") or not option.metavar else " "
    text = option.text
    if option.default is dataclasses.MISSING:
        text += " Required."
    elif isinstance(option.default, bool):
        text += " Default: true." if option.default else ""
    elif isinstance(option.default, str | int | float | Path) and option.default != "":
        text += f" Default: {option.default}."
    return _lines(f"--{option.name}{separator}{option.metavar}", text, width)


def _lines(form: str, text: str, width: int) -> list[str]:
    indent = " " * _COLUMN
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(form) + 4 <= _COLUMN and lines:
        lines[0] = f"  {form}".ljust(_COLUMN) + lines[0][_COLUMN:]
        return lines
    return [f"  {form}", *lines]


def _metavar(kind: Any, default: Any = None) -> str:
    """Return the placeholder of a value in the help; empty for a flag that is off by default."""
    if kind is bool and default is False:
        return ""
    (first, *_) = [member for member in members(kind) if member is not NoneType]
    origin = get_origin(first) or first
    if origin is Literal:
        return "|".join(map(str, get_args(first)))
    if origin is dict:
        return ".KEY=VALUE"
    if origin in (tuple, list):
        metavar = _metavar(get_args(first)[0])
        return f"{metavar},…" if origin is tuple else metavar
    return _METAVARS[first]
