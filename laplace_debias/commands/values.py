"""Convert strings from the command line and values from settings files to the types of fields.

This module does not import torch, so that errors are printed quickly.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
_BOOLEANS = {"true": True, "false": False}


class UnexpectedValueError(ValueError):
    """Raised for a value of the wrong type; its message describes the expected form."""


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself if it is not a union."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def convert(value: Any, kind: Any) -> Any:
    """Convert a string from the command line, or a value from a file, to a type.

    Raises:
        UnexpectedValueError: If the value cannot be converted. The message states what was
            expected.
    """
    alternatives = members(kind)
    if len(alternatives) > 1:
        return _as_member(value, alternatives)
    origin = get_origin(kind)
    if origin is Literal:
        if value not in get_args(kind):
            raise UnexpectedValueError(f"one of {', '.join(map(repr, get_args(kind)))}")
        return value
    if origin in (tuple, list):
        return origin(_as_sequence(value, kind))
    if origin is dict:
        _, kind_of_values = get_args(kind)
        return {
            str(key): convert(entry, kind_of_values) for key, entry in _as_mapping(value).items()
        }
    if dataclasses.is_dataclass(kind):
        return _as_dataclass(value, kind)
    return _as_scalar(value, kind)


def _as_member(value: Any, kinds: Sequence[Any]) -> Any:
    """Convert a value to the first type of a union that accepts it.

    Raises:
        UnexpectedValueError: If no type accepts it. The message lists what each type expects.
    """
    if NoneType in kinds and value in (None, "null"):
        return None
    expected = []
    for kind in kinds:
        if kind is NoneType:
            continue
        try:
            return convert(value, kind)
        except UnexpectedValueError as error:
            expected.append(str(error))
    raise UnexpectedValueError(" or ".join(dict.fromkeys(expected)))


def _as_sequence(value: Any, kind: Any) -> list[Any]:
    """Return the entries of a list, which is given as `1,2`, as `[1, 2]` or as a list in a file."""
    entries: Sequence[Any]
    if not isinstance(value, Sequence):
        entries = [value]
    elif not isinstance(value, str):
        entries = value
    elif value.lstrip().startswith("["):
        entries = parsed_yaml(value)
    else:
        entries = value.split(",")
    kinds = get_args(kind)
    if Ellipsis in kinds or len(kinds) == 1:
        return [convert(entry, kinds[0]) for entry in entries]
    if len(entries) != len(kinds):
        raise UnexpectedValueError(f"{len(kinds)} values")
    return [convert(entry, each) for entry, each in zip(entries, kinds, strict=True)]


def _as_mapping(value: Any) -> Mapping[Any, Any]:
    content = parsed_yaml(value) if isinstance(value, str) else value
    if not isinstance(content, Mapping):
        raise UnexpectedValueError("a mapping, such as {key: value}")
    return content


def _as_dataclass(value: Any, kind: Any) -> Any:
    """Convert a mapping to a dataclass, and each entry to the type of its field."""
    content = _as_mapping(value)
    kinds = get_type_hints(kind)
    unknown = [str(name) for name in content if name not in kinds]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], kinds, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise UnexpectedValueError(
            f"only the keys {', '.join(kinds)} ({unknown[0]} is not one of them){hint}"
        )
    values = {}
    for name, entry in content.items():
        try:
            values[name] = convert(entry, kinds[name])
        except UnexpectedValueError as error:
            raise UnexpectedValueError(f"{error} for {name}") from error
    return kind(**values)


def _as_scalar(value: Any, kind: Any) -> Any:
    """Convert a value to a string, number, path or bool."""
    if kind is Any:
        return _number_or_value(parsed_yaml(value) if isinstance(value, str) else value)
    if kind is bool:
        value = _BOOLEANS.get(str(value).lower())
        if value is None:
            raise UnexpectedValueError(_WORDS[bool])
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str | Path) or (is_number and kind in (str, int, float))
    if not is_text or (kind is int and isinstance(value, float)):
        raise UnexpectedValueError(_WORDS[kind])
    try:
        return kind(value)
    except ValueError as error:
        raise UnexpectedValueError(_WORDS[kind]) from error


def _number_or_value(value: Any) -> Any:
    """Convert strings such as 1e-3 to numbers, because YAML reads them as strings."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_number_or_value(entry) for entry in value]
    return value


def parsed_yaml(text: str, path: str | None = None) -> Any:
    """Parse YAML, which includes JSON."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        if path is None:
            raise UnexpectedValueError(f"YAML or JSON ({reason})") from error
        raise ValueError(
            f"{path} is not a valid YAML file ({reason}). Correct the file."
        ) from error


def plain(value: Any) -> Any:
    """Convert the value of a setting to plain YAML data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
