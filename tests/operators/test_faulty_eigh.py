"""The seam for failing eigendecompositions hits what it should, as often as it says."""

import pytest
import torch
from faulty_eigh import FaultyEigh, is_hit


def called_from(module, eigh):
    """Return a function that calls `eigh` from a module of this name."""
    return eval("lambda A: eigh(A)", {"__name__": module, "eigh": eigh})


def test_one_matrix_in_ten_of_the_package_has_no_eigenvectors():
    A = torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(0))
    matrices = [*(A + A.mT)]
    for module, expected in (
        ("laplace_debias.operators.eigh", is_hit),
        ("oracle", lambda _: False),
    ):
        eigh = called_from(module, FaultyEigh("nan"))
        failed = [bool(eigh(A).eigenvectors.isnan().all()) for A in matrices]
        assert failed == [expected(A) for A in matrices]
    hit = [A for A in matrices if is_hit(A)]
    # 20 of 200, four standard deviations of a binomial count to either side.
    assert 20 - 17 <= len(hit) <= 20 + 17
    with pytest.raises(torch.linalg.LinAlgError):
        called_from("laplace_debias", FaultyEigh("raise"))(hit[0])
