"""Estimators and inverses have the numbers of curvlinops with the same probes."""

import sys

import pytest
import torch
from spectra import Matrix, generator, symmetric
from torch import nn

from laplace_debias.curvature import KFAC, Hessian
from laplace_debias.linalg import diagonal, frobenius_norm, inverse, trace
from laplace_debias.linalg.probes import draw
from laplace_debias.operators import Identity

curvlinops = pytest.importorskip("curvlinops", reason="compares with curvlinops")

SIZE = 40
SYMMETRIC = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator(9))
MATRICES = {"general": SYMMETRIC, "symmetric": SYMMETRIC + SYMMETRIC.T}


def operator(name):
    return Matrix(MATRICES[name], is_symmetric=name == "symmetric")


def with_probes(function, probes, monkeypatch, num_matvecs):
    """A peer's estimate of the same matrix, whose draws are replaced by these probes."""
    columns = iter(probes.T)
    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, "random_vector", lambda *_: next(columns))
    return lambda matrix: function(matrix, num_matvecs)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(
    ("peer", "estimator", "method", "num_probes"),
    [
        ("hutchinson_trace", trace, "hutchinson", [12]),
        ("hutchpp_trace", trace, "hutch++", [4, 4]),
        ("hutchinson_diag", diagonal, "hutchinson", [12]),
        ("xdiag", diagonal, "xdiag", [6]),
    ],
)
def test_estimates_of_the_same_probes(name, peer, estimator, method, num_probes, monkeypatch):
    A = operator(name)
    g = generator(4)
    draws = [draw(A, size, "rademacher", g) for size in num_probes]
    theirs = with_probes(getattr(curvlinops, peer), torch.cat(draws, 1), monkeypatch, 12)
    estimate = estimator(A, method, num_matvecs=12, generator=generator(4))
    torch.testing.assert_close(estimate.value, theirs(A.matrix))


def test_the_frobenius_norm_of_the_same_probes(monkeypatch):
    A = operator("general")
    probes = draw(A, 12, "spherical", generator(4))
    theirs = with_probes(curvlinops.hutchinson_squared_fro, probes, monkeypatch, 12)
    estimate = frobenius_norm(A, num_matvecs=12, generator=generator(4))
    torch.testing.assert_close(estimate.value.square(), theirs(A.matrix))


def test_xtrace_is_at_least_as_precise():
    """The peer's XTrace leaves out the factor of each probe's length, so the values differ."""
    A = symmetric(0.8 ** torch.arange(SIZE, dtype=torch.float64))
    exact = A.matrix.trace()
    torch.manual_seed(0)
    theirs = torch.stack([curvlinops.xtrace(A.matrix, 12) for _ in range(60)]) - exact
    estimates = [trace(A, "xtrace", 12, generator=generator(seed)).value for seed in range(60)]
    ours = torch.stack(estimates) - exact
    for errors in (ours, theirs):
        assert errors.mean().abs() < 4 * errors.std() / 60**0.5
    assert ours.square().mean() < theirs.square().mean()


@pytest.fixture
def indefinite():
    """The same Hessian with negative eigenvalues, from both libraries, and a right-hand side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(20, 3).double(), torch.randn(20, 2).double())]
    ours = Hessian(model, nn.MSELoss(), data)
    theirs = curvlinops.HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    return ours, theirs, torch.randn(ours.shape[0], 2, dtype=torch.float64)


def test_lsmr_of_an_indefinite_hessian(indefinite):
    ours, theirs, B = indefinite
    eigenvalues = torch.linalg.eigvalsh(ours.to_dense())
    assert eigenvalues[0] < 0 < eigenvalues[-1]
    options = {"atol": 1e-14, "btol": 1e-14, "conlim": 0, "maxiter": 2000}
    expected = curvlinops.LSMRInverseLinearOperator(theirs, **options) @ B
    actual = inverse(ours, "lsmr", tol=1e-14, max_iter=2000) @ B
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.to_dense() @ actual, B, rtol=0, atol=1e-9)


def test_the_damped_inverse_of_kfac_is_the_one_with_exact_damping():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(20, 3).double(), torch.randint(2, (20,)))]
    loss = nn.CrossEntropyLoss()
    ours = KFAC(model, loss, data)
    theirs = curvlinops.KFACLinearOperator(
        model, loss, list(model.parameters()), data, fisher_type=curvlinops.FisherType.TYPE2
    )
    b = torch.randn(ours.shape[0], dtype=torch.float64)
    actual = inverse(ours + 0.1 * Identity(len(b))) @ b
    exact, default = (
        curvlinops.KFACInverseLinearOperator(theirs, damping=0.1, use_exact_damping=is_exact) @ b
        for is_exact in (True, False)
    )
    torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-12)
    assert (actual - default).norm() > 0.1 * actual.norm()
