"""Some of the mutations of `fuzz_posterior_files`, which makes any number of them."""

import tempfile
from pathlib import Path

import fuzz_posterior_files
import pytest
from fuzz_posterior_files import (
    CRASHED,
    DIFFERENT,
    OTHER,
    REFUSED,
    SAME,
    Report,
    fuzz,
    outcome_of,
    resealed,
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


def test_mutations_reach_behind_the_checksum(report):
    """Or the fuzzer would test the checksum alone."""
    assert report.total(REFUSED) > 1500
    assert report.total(OTHER) > 50
    assert len(report.counts) > 20


def test_no_damage_is_accepted(report):
    damaged = {kind: counts for kind, counts in report.counts.items() if kind.startswith("damaged")}
    assert damaged
    assert all(counts[SAME] == counts[OTHER] == 0 for counts in damaged.values())


def test_the_fuzzer_notices_what_it_looks_for(subjects, tmp_path, monkeypatch):
    """A loader without checksum, and one that raises something else."""
    classification, binary = subjects[:2]
    path = tmp_path / "file"
    assert outcome_of(binary.raw, classification, path, is_damaged=False)[0] == REFUSED
    edited = resealed(classification.raw.replace(b'num_data\\": 50', b'num_data\\": 51'))
    assert outcome_of(edited, classification, path, is_damaged=False)[0] == OTHER
    assert outcome_of(edited, classification, path, is_damaged=True)[0] == DIFFERENT
    monkeypatch.setattr(fuzz_posterior_files.Laplace, "load", lambda *_: {}["key"])
    assert outcome_of(edited, classification, path, is_damaged=True)[0] == CRASHED
