"""Not enough memory for a chunk: its halves give the same curvature, and nothing is added twice."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.fits import sums
from laplace_debias.curvature.fits.out_of_memory import is_out_of_memory
from laplace_debias.curvature.layers.tap import Tap

MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"),
]


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    batches = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (13, 8)]
    return model, batches


def fits_up_to(monkeypatch, limit, error):
    """Backward passes of more examples than `limit` run out of memory; which ones are tried."""
    tried = []
    original = Tap._gradients

    def gradients(tap, outputs, *arguments):
        tried.append(len(outputs))
        if len(outputs) > limit:
            raise error
        return original(tap, outputs, *arguments)

    monkeypatch.setattr(Tap, "_gradients", gradients)
    return tried


@pytest.mark.parametrize("error", MESSAGES, ids=["gpu", "cpu"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_halves_give_the_same_curvature(case, curvature, error, monkeypatch):
    model, batches = case
    options = {"curvature": curvature, "backend": "hooks"}
    expected = Laplace(model, **options).fit(batches)
    tried = fits_up_to(monkeypatch, 4, error)
    la = Laplace(model, **options).fit(batches)
    assert max(tried) == 13
    assert sum(n for n in tried if n <= 4) % 21 == 0  # every example as often as another
    grid = [la.posterior.curvature.to_dense(), expected.posterior.curvature.to_dense()]
    torch.testing.assert_close(*grid, rtol=1e-10, atol=1e-14)
    assert la.log_marginal_likelihood() == pytest.approx(float(expected.log_marginal_likelihood()))


def test_one_example_that_does_not_fit_is_refused_with_remedies(case, monkeypatch):
    model, batches = case
    fits_up_to(monkeypatch, 0, MESSAGES[0])
    with pytest.raises(RuntimeError, match=r'1 example.*memory_bound=.*fisher="mc"'):
        Laplace(model, backend="hooks").fit(batches)


def test_a_chunk_that_is_partly_added_is_not_run_again(case, monkeypatch):
    model, batches = case
    original, calls = sums.gradient_factor, []

    def gradient_factor(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MESSAGES[0]
        return original(*arguments)

    monkeypatch.setattr(sums, "gradient_factor", gradient_factor)
    la = Laplace(model, backend="hooks")
    with pytest.raises(RuntimeError, match=r"13 example.*Nothing was fitted"):
        la.fit(batches)
    assert la._fitted is None


def test_other_errors_are_not_taken_for_it():
    assert all(map(is_out_of_memory, MESSAGES))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("not enough memory"))
