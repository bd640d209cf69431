"""Combinations of cases, most of them for the long run only."""

import itertools

import pytest


def one_axis_at_a_time(*axes):
    """Return cases that contain every pair of values of two axes, for `parametrize`.

    The cases that differ from the first one in at most one axis are tested each day. Together they
    contain every value of every axis. The other cases are slow. There are as few of them as are
    needed for every pair of values.

    Args:
        axes: Lists of values or of `pytest.param` of one value, the most usual first.
    """
    params = [[_as_param(value) for value in axis] for axis in axes]
    # A combination has one index per axis.
    combinations = list(itertools.product(*(range(len(axis)) for axis in params)))
    daily = [indices for indices in combinations if sum(index > 0 for index in indices) <= 1]
    selected = list(daily)
    covered_pairs = set().union(*map(_pairs, daily))
    all_pairs = set().union(*map(_pairs, combinations))
    while all_pairs - covered_pairs:
        best = max(combinations, key=lambda indices: len(_pairs(indices) - covered_pairs))
        selected.append(best)
        covered_pairs |= _pairs(best)
    cases = []
    for indices in sorted(selected):
        case = [axis[index] for axis, index in zip(params, indices, strict=True)]
        cases.append(
            pytest.param(
                *(value for param in case for value in param.values),
                id="-".join(param.id for param in case),
                marks=() if indices in daily else pytest.mark.slow,
            )
        )
    return cases


def _pairs(indices):
    """Return the pairs of values in a combination; a value is an axis and an index."""
    return set(itertools.combinations(enumerate(indices), 2))


def others_slow(cases, *daily):
    """Return all cases, for `parametrize`; the cases that are not named are slow.

    Args:
        cases: Names of cases, or a mapping with these names.
        daily: The names of the cases that are tested each day, because they test different code.
            The other cases only have different data.
    """
    missing = set(daily) - set(cases)
    assert not missing, f"no cases {missing}"
    return [pytest.param(case, marks=() if case in daily else pytest.mark.slow) for case in cases]


def _as_param(value):
    if hasattr(value, "values") and hasattr(value, "marks"):
        return value
    return pytest.param(value, id=getattr(value, "__name__", str(value)))
