"""What the package computes is what was written down; see `same_numbers.py`.

`LAPLACE_DEBIAS_SAME_MACHINE=1` compares to the last bit, on the machine and with the versions that
wrote the file. Elsewhere the numbers that no choice of a basis enters agree to rounding.
"""

import json
import os

import pytest
import same_numbers

from laplace_debias import Laplace

IS_SAME_MACHINE = os.environ.get("LAPLACE_DEBIAS_SAME_MACHINE") == "1"
WRITTEN = json.loads(same_numbers.PATH.read_text(encoding="utf-8"))
DAILY = {f"{curvature} full classification" for curvature in same_numbers.CURVATURES}


def test_every_case_is_written_down():
    assert list(WRITTEN) == list(same_numbers.records())


@pytest.mark.parametrize(
    "name",
    [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in WRITTEN],
)
def test_the_numbers_are_those_that_were_written_down(name):
    expected, found = WRITTEN[name], same_numbers.compute(name)
    assert list(found) == list(expected)
    if IS_SAME_MACHINE:
        assert {key: digest for key, (digest, _) in found.items()} == {
            key: digest for key, (digest, _) in expected.items()
        }
    for key, (_, projected) in expected.items():
        if projected is not None:
            # A factor in single precision is rounded by more.
            rel = 1e-5 if name.endswith("single") else 1e-8
            assert found[key][1] == pytest.approx(projected, rel=rel, abs=1e-9), key


def test_a_posterior_that_was_saved_long_ago_is_read():
    model = same_numbers.with_parameters(same_numbers.convolutional(3))
    la = Laplace.load(same_numbers.POSTERIOR, model)
    x = same_numbers.images()[2][0][:4]
    record = same_numbers.Record()
    record.note("covariance", la.functional(x)[1])
    expected = WRITTEN["kfac full classification"]["covariance"][1]
    assert record["covariance"][1] == pytest.approx(expected, rel=1e-8)
