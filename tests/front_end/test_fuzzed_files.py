"""Some of the mutations of `fuzz_posterior_files`, which makes any number of them."""

import tempfile
from pathlib import Path

import fuzz_posterior_files
import pytest
from fuzz_posterior_files import (
    CRASHED,
    DIFFERENT,
    REFUSED,
    SAME,
    Report,
    fuzz,
    outcome_of,
)
from jaxtyping import config


@pytest.fixture(scope="module")
def subjects():
    return fuzz_posterior_files.subjects()


@pytest.fixture(scope="module", autouse=True)
def _unchecked():
    """As for a user, whose annotations nobody checks: errors are the package's own."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def report(subjects) -> Report:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return fuzz(2000, seed=1, folder=Path(folder), originals=subjects)


def test_mutated_files_are_refused_or_answer_as_the_original(report):
    assert not report.failures, str(report)


def test_no_damage_is_accepted(report):
    assert report.total(REFUSED) > 1900
    assert len(report.counts) == len(set(fuzz_posterior_files.BYTES))
    assert not any(counts[SAME] for counts in report.counts.values())


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
