"""Whether work that was broken off is the work that is asked for now."""

from collections.abc import Mapping
from typing import Any

_MOST = 5


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Settings that differ, as `seed was 0, is 1; ...`; empty if none does.

    Args:
        before: Settings that the work was begun with, as JSON gives it back.
        now: Settings of the new call, likewise.
    """
    there, here = _leaves(before), _leaves(now)
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    told = [
        f"{key} was {_short(there.get(key))}, is {_short(here.get(key))}"
        for key in differing[:_MOST]
    ]
    more = [f"and {len(differing) - _MOST} more"] if len(differing) > _MOST else []
    return "; ".join([*told, *more])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    """Settings within settings by their names, e.g. `methods.laplace.examples`."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}.{key}" if prefix else key)
    return found
