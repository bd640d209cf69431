"""Many fits and predictions in one process; `tests/support/soak.py` takes thousands of them."""

import sys

import pytest
import torch
from soak import soak, subjects

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("curvature", ["kfac", pytest.param("lowrank", marks=pytest.mark.slow)])
def test_memory_is_flat_and_the_answers_are_the_same(curvature):
    fit, predict = subjects()[curvature]
    for answer, repetitions in ((fit, 20), (predict, 60)):
        found = soak(answer, repetitions)
        assert found.num_different == 0
        assert found.growth < 0.01


def test_it_notices_what_is_kept_and_what_differs():
    kept = []

    def answer():
        kept.append(torch.ones(2**20))
        return torch.tensor(len(kept) // 25)

    found = soak(answer, 40)
    assert found.num_different == 17
    assert found.growth > 0.03
