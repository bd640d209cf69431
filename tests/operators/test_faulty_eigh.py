"""The seam for failing eigendecompositions hits what it should, as often as it says."""

import pytest
import torch
from faulty_eigh import ONE_IN, FaultyEigh, is_hit


def called_from(module, eigh):
    """`eigh`, called by a module of that name."""
    return eval("lambda A: eigh(A)", {"__name__": module, "eigh": eigh})


def symmetric(dtype, number=200):
    A = torch.randn(number, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [*(A + A.mT)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_matrix_in_ten_of_the_package_has_no_eigenvectors(dtype):
    matrices = symmetric(dtype)
    of_package = called_from("laplace_debias.operators.eigh", FaultyEigh("nan"))
    found = [of_package(A) for A in matrices]
    failed = [bool(pair.eigenvectors.isnan().all()) for pair in found]
    # 20 of 200, four standard deviations of a binomial count to either side.
    assert 20 - 17 <= sum(failed) <= 20 + 17
    assert failed == [is_hit(A) for A in matrices]
    for A, pair, has_failed in zip(matrices, found, failed, strict=True):
        values, vectors = pair
        assert values.isfinite().all()
        if not has_failed:
            torch.testing.assert_close(vectors * values @ vectors.T, A)


def test_the_same_matrix_fails_again_in_a_whole_other_place():
    matrices = symmetric(torch.float32)
    assert [is_hit(A) for A in matrices] == [is_hit(A.T.clone().T) for A in matrices]
    assert not is_hit(torch.empty(0, 0))


def hit():
    return next(A for A in symmetric(torch.float64, 50 * ONE_IN) if is_hit(A))


def test_it_raises_what_torch_raises():
    with pytest.raises(torch.linalg.LinAlgError):
        called_from("laplace_debias", FaultyEigh("raise"))(hit())


@pytest.mark.parametrize("module", ["test_laplace", "oracle", "laplace_debias_peer", "scipy"])
def test_nobody_elses_calls_fail(module):
    eigh = FaultyEigh("nan")
    assert called_from(module, eigh)(hit()).eigenvectors.isfinite().all()
    assert called_from("laplace_debias.linalg", eigh)(hit()).eigenvectors.isnan().all()


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        FaultyEigh("inf")
