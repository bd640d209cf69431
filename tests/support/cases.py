"""Combinations of cases, most of them for the long run only."""

import itertools

import pytest


def one_axis_at_a_time(*axes):
    """Cases with every pair of values of two axes, for `parametrize`.

    Those that differ from the first in one axis at most are tested each day: every value of every
    axis. The others are slow: as few as have, with the first ones, every pair of values.

    Args:
        axes: Lists of values or of `pytest.param` of one value, the most usual first.
    """
    parts = [[_as_param(value) for value in axis] for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in parts)))
    daily = [place for place in places if sum(value > 0 for value in place) <= 1]
    chosen, pairs = list(daily), set().union(*map(_pairs, daily))
    while set().union(*map(_pairs, places)) - pairs:
        chosen.append(max(places, key=lambda place: len(_pairs(place) - pairs)))
        pairs |= _pairs(chosen[-1])
    return [
        pytest.param(
            *(value for axis, at in zip(parts, place, strict=True) for value in axis[at].values),
            id="-".join(axis[at].id for axis, at in zip(parts, place, strict=True)),
            marks=() if place in daily else pytest.mark.slow,
        )
        for place in sorted(chosen)
    ]


def _pairs(place):
    return set(itertools.combinations(enumerate(place), 2))


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
