"""Options that have no effect on a command."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from laplace_debias.system.shown import Lines


def unused_options(options: Any, given: Collection[str]) -> dict[str, list[str]]:
    """Options of a file that have no effect, in lists by the reason."""
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
    return reasons


def print_unused(unused: Mapping[str, Sequence[str]]) -> None:
    """Print a line for each reason."""
    for why, names in unused.items():
        Lines().print(f"Not used: {', '.join(names)} ({why}).")
