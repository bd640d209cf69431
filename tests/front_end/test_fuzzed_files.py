"""Some of the mutations of `fuzz_posterior_files`, which makes any number of them."""

import fuzz_posterior_files
import pytest
from fuzz_posterior_files import CRASHED, DIFFERENT, KINDS, REFUSED, UNCHANGED, fuzz, outcome_of

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def subjects():
    return fuzz_posterior_files.subjects()


def test_mutated_files_are_refused(subjects):
    counts, failures = fuzz(2000, seed=1, originals=subjects)
    assert not failures
    assert {kind for kind, _ in counts} == set(KINDS)
    assert {outcome for _, outcome in counts} <= {REFUSED, UNCHANGED}


def test_the_fuzzer_notices_what_it_looks_for(subjects, tmp_path, monkeypatch):
    """A loader without checksum, and one that raises something else."""
    classification, binary = subjects[:2]
    path = tmp_path / "file"
    assert outcome_of(binary.raw, classification, path)[0] == CRASHED
    path.write_bytes(classification.raw)
    la = fuzz_posterior_files.Laplace.load(path, classification.model)
    la.prior_precision = 3.0
    monkeypatch.setattr(fuzz_posterior_files.Laplace, "load", lambda *_: la)
    assert outcome_of(binary.raw, classification, path)[0] == DIFFERENT
    monkeypatch.setattr(fuzz_posterior_files.Laplace, "load", lambda *_: {}["key"])
    assert outcome_of(binary.raw, classification, path)[0] == CRASHED
