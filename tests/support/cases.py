"""Combinations of cases, most of them for the long run only."""

import itertools

import pytest


def one_axis_at_a_time(*axes):
    """Every combination, for `parametrize`; what differs from the first in two axes is slow.

    For cases that do not act on each other: every value of every axis is tested each day, and
    every combination by `make test-all`.

    Args:
        axes: Lists of values or of `pytest.param` of one value, the most usual first.
    """
    parts = [[_as_param(value) for value in axis] for axis in axes]
    combinations = []
    for chosen in itertools.product(*(enumerate(axis) for axis in parts)):
        is_daily = sum(place > 0 for place, _ in chosen) <= 1
        combinations.append(
            pytest.param(
                *(value for _, part in chosen for value in part.values),
                id="-".join(part.id for _, part in chosen),
                marks=() if is_daily else pytest.mark.slow,
            )
        )
    return combinations


def others_slow(cases, *daily):
    """All cases, for `parametrize`; those that are not named are slow.

    Args:
        cases: Names of cases, or a mapping of them.
        daily: Those that are tested each day: where they differ in what is tested, not in data.
    """
    missing = set(daily) - set(cases)
    assert not missing, f"no cases {missing}"
    return [pytest.param(case, marks=() if case in daily else pytest.mark.slow) for case in cases]


def _as_param(value):
    if hasattr(value, "values") and hasattr(value, "marks"):
        return value
    return pytest.param(value, id=getattr(value, "__name__", str(value)))
