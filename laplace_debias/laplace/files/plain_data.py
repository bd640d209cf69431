"""Plain data from files of unknown origin: strict JSON, and what a field may hold."""

import json
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_EXACT = 2**53
"""The largest whole number up to which float64 holds all of them."""

_LONGEST = 500
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Attributes:
        told: What is expected, for a message.
        accepts: Whether some plain data is that; it must not raise.
    """

    told: str
    accepts: Callable[[Any], bool]


def one_of(values: Collection[str]) -> Kind:
    """One of some texts."""
    return Kind(
        f"one of {', '.join(map(repr, values))}", lambda v: isinstance(v, str) and v in values
    )


def whole_number(low: int, high: int = _LARGEST_EXACT) -> Kind:
    """A whole number of a range, ends included; true and false do not count as numbers."""
    return Kind(
        f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high
    )


def list_of(kind: Kind, *, distinct: bool = False) -> Kind:
    """A list that is not empty."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, list) or not value or not all(map(kind.accepts, value)):
            return False
        return not distinct or len(set(value)) == len(value)

    return Kind(f"a list, each entry {kind.told}{', no two the same' if distinct else ''}", accepts)


def mapping_to(kind: Kind) -> Kind:
    """A mapping from texts, perhaps empty."""
    return Kind(
        f"a mapping from texts, each value {kind.told}",
        lambda v: isinstance(v, dict) and all(map(kind.accepts, v.values())),
    )


def record_of(kinds: Mapping[str, Kind]) -> Kind:
    """A mapping with certain fields and no others, each of its kind."""

    def accepts(value: Any) -> bool:
        is_record = isinstance(value, dict) and value.keys() == kinds.keys()
        return is_record and all(kind.accepts(value[name]) for name, kind in kinds.items())

    told = ", ".join(f"{name} {kind.told}" for name, kind in kinds.items())
    return Kind(f"a mapping with {told}", accepts)


def either(*kinds: Kind) -> Kind:
    """One of several kinds."""
    return Kind(
        ", or ".join(kind.told for kind in kinds),
        lambda v: any(kind.accepts(v) for kind in kinds),
    )


# NaN compares false; whole numbers of any size compare without overflow.
FINITE = Kind(
    "a finite number",
    lambda v: type(v) in (int, float) and abs(v) <= sys.float_info.max,
)
POSITIVE = Kind("a positive finite number", lambda v: FINITE.accepts(v) and v > 0)
TEXT = Kind("a text", lambda v: isinstance(v, str))
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
NOTHING = Kind("null", lambda v: v is None)
MAPPING = Kind("a mapping", lambda v: isinstance(v, dict))


def check_fields(data: Any, kinds: Mapping[str, Kind], where: str) -> None:
    """Require a mapping with certain fields and no others, each of its kind.

    Args:
        data: Plain data.
        kinds: What each field holds.
        where: What the data is, the subject of the message.

    Raises:
        ValueError: Naming the field, what it holds and what was expected.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {shown(data)}, expected a mapping.")
    if missing := [name for name in kinds if name not in data]:
        raise ValueError(f"{where} lacks {', '.join(missing)}.")
    if unknown := [name for name in data if name not in kinds]:
        raise ValueError(f"{where} has {shown(unknown)}, expected {', '.join(kinds)} alone.")
    for name, value in data.items():
        if not kinds[name].accepts(value):
            raise ValueError(f"{where} has {name} = {shown(value)}, expected {kinds[name].told}.")


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON without Python's extensions: no NaN or Infinity, no name twice in an object.

    Raises:
        ValueError: If it is none, or nested too deeply.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def shown(value: Any) -> str:
    """A value for a message, cut off where it is long or deep."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its JSON names {shown(name)} twice")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"its JSON holds {name}, which is not a number")
