"""Some of the mutations of `fuzz_posterior_files`, which makes any number of them."""

import fuzz_posterior_files
import pytest
from fuzz_posterior_files import KINDS, REFUSED, UNCHANGED, fuzz

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def subjects():
    return fuzz_posterior_files.subjects()


def test_mutated_files_are_refused(subjects):
    counts, failures = fuzz(2000, seed=1, originals=subjects)
    assert not failures
    assert {kind for kind, _ in counts} == set(KINDS)
    assert {outcome for _, outcome in counts} <= {REFUSED, UNCHANGED}
