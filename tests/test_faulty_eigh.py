"""The seam for failing eigendecompositions hits what it should, as often as it says."""

import pytest
import torch
from faulty_eigh import EVERY, FaultyEigh


def called_from(module, eigh):
    """`eigh`, called by a module of that name."""
    return eval("lambda A: eigh(A)", {"__name__": module, "eigh": eigh})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_tenth_call_from_the_package_has_no_eigenvectors(dtype):
    A = torch.randn(4, 4).to(dtype)
    A = A + A.T
    of_package = called_from("laplace_debias.operators.eigh", FaultyEigh("nan"))
    found = [of_package(A) for _ in range(3 * EVERY)]
    failed = [bool(pair.eigenvectors.isnan().all()) for pair in found]
    assert failed == ([False] * (EVERY - 1) + [True]) * 3
    for values, vectors in found[: EVERY - 1]:
        torch.testing.assert_close(vectors * values @ vectors.T, A)
    assert all(pair.eigenvalues.isfinite().all() for pair in found)


def test_it_raises_what_torch_raises():
    of_package = called_from("laplace_debias", FaultyEigh("raise"))
    for _ in range(EVERY - 1):
        of_package(torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError):
        of_package(torch.eye(3))


@pytest.mark.parametrize("module", ["test_laplace", "oracle", "laplace_debias_peer", "scipy"])
def test_nobody_elses_calls_fail_or_count(module):
    eigh = FaultyEigh("nan")
    other, of_package = called_from(module, eigh), called_from("laplace_debias.linalg", eigh)
    for _ in range(EVERY - 1):
        assert of_package(torch.eye(3)).eigenvectors.isfinite().all()
    for _ in range(2 * EVERY):
        assert other(torch.eye(3)).eigenvectors.isfinite().all()
    assert of_package(torch.eye(3)).eigenvectors.isnan().all()


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        FaultyEigh("inf")
