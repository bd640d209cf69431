"""What the other tests rely on."""

import itertools

import jaxtyping
import pytest
import torch
from cases import one_axis_at_a_time, others_slow

from laplace_debias import metrics


def test_annotations_of_the_package_are_checked(pytestconfig):
    if not pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("annotations are checked by `make test-all`")
    with pytest.raises(jaxtyping.TypeCheckError):
        metrics.nll(torch.ones(2, 3, 4), torch.ones(2))


def test_one_axis_at_a_time_has_every_combination_and_marks_the_others():
    axes = ["abc", [torch.float32, torch.float64], [pytest.param(1, id="one"), 2]]
    found = one_axis_at_a_time(*axes)
    expected = itertools.product("abc", axes[1], [1, 2])
    assert [param.values for param in found] == list(expected)
    assert found[0].id == "a-torch.float32-one"
    daily = {param.id for param in found if not param.marks}
    assert daily == {
        *("a-torch.float32-one", "b-torch.float32-one", "c-torch.float32-one"),
        *("a-torch.float64-one", "a-torch.float32-2"),
    }


def test_others_slow_keeps_every_case_and_refuses_unknown_names():
    found = others_slow({"one": 1, "two": 2, "three": 3}, "two")
    assert [param.values for param in found] == [("one",), ("two",), ("three",)]
    assert [param.values for param in found if not param.marks] == [("two",)]
    with pytest.raises(AssertionError, match=r"no cases.*four"):
        others_slow(["one"], "four")
