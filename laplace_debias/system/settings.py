"""Settings of commands: how they are declared as command-line options, and checks of their values.

This module does not import torch, so that the command line starts quickly.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class CommandSettings:
    """Base class for a command's settings, a dataclass with one field per option.

    An option has the type and the default of its field. Its help text is the field's entry under
    `Attributes` in the docstring. All other properties are declared with `option`.
    """

    heading: ClassVar[str] = "Options"
    """The heading of the help under which the fields of a class are listed."""

    usage: ClassVar[tuple[str, ...]] = ()
    """Examples at the end of the help."""

    needed_by_most: ClassVar[tuple[str, ...]] = ()
    """Optional fields that most calls need."""

    unused: ClassVar[Mapping[str, str]] = {}
    """Fields that the command does not use, each with the reason. The help omits them."""

    resumes: ClassVar[bool] = False
    """Whether running the same command again resumes an interrupted run."""

    json: bool = False
    """Whether to print only a JSON object. A command with the option `--json` has this field."""

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect with these settings, each with the reason.

        A settings file may contain such options, because several commands may share the file. On
        the command line, they raise an error. Options that never affect a command are listed in its
        `unused`.
        """
        return {}


def option(
    *,
    heading: str | None = None,
    metavar: str | None = None,
    name: str | None = None,
    is_input: bool = False,
    repeats: str | None = None,
) -> dict[str, Any]:
    """Return a field's metadata for the command line: `field(metadata=option(metavar="PATH"))`.

    Args:
        heading: The heading of the help under which the option is listed. By default, it is the
            heading of the class.
        metavar: The placeholder for its value in the help. By default, it depends on the type.
        name: The name on the command line, if it differs from the field.
        is_input: Whether the value names a file, folder or module that must exist.
        repeats: The field of another option. If that option is repeated, its values after the first
            one are collected in this field, which must be a list.
    """
    return {
        "heading": heading,
        "metavar": metavar,
        "name": name,
        "is_input": is_input,
        "repeats": repeats,
    }


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Raise an error unless each named setting is None or at least `least`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}. Pass at least {least}.")
