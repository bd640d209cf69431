"""Square roots and samples against dense float64 ones."""

import numpy as np
import pytest
import torch
from matrices import randn
from spectra import Matrix, generator, orthogonal, symmetric, uniform
from torch import nn

from laplace_debias.curvature import GGN, KFAC
from laplace_debias.linalg import inverse_sqrt, sample_gaussian
from laplace_debias.operators import Dense, Diagonal, EigenKronecker, Identity

SIZE = 60
B = torch.randn(SIZE, 3, dtype=torch.float64, generator=generator(2))
SPECTRA = {
    "positive": 0.5 + uniform(SIZE),
    "decades": 10 ** torch.linspace(-6, 2, SIZE, dtype=torch.float64),
    "low rank": torch.cat([uniform(5), torch.zeros(SIZE - 5)]),
    "clustered": torch.tensor([1.0, 2.0, 3.0]).double().repeat(SIZE // 3),
    "zero": torch.zeros(SIZE).double(),
}


def inverse_root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.rsqrt() @ vectors.T


def test_the_tolerance_bounds_the_error_and_saves_products():
    values = torch.linspace(1e-3, 1, 500, dtype=torch.float64)
    expected = inverse_root(symmetric(values).matrix) @ torch.ones(500, dtype=torch.float64)
    spent = []
    for tol in (1e-1, 1e-2, 1e-4, 1e-6):
        A = symmetric(values)
        product = inverse_sqrt(A, tol=tol) @ torch.ones(500, dtype=torch.float64)
        assert (product - expected).norm() <= tol * expected.norm()
        spent.append(A.columns)
    assert spent == sorted(set(spent))
    assert spent[-1] < 200


def test_an_end_before_the_tolerance_is_told_with_a_remedy():
    A = symmetric(10 ** torch.linspace(-8, 0, 300, dtype=torch.float64))
    with pytest.warns(RuntimeWarning, match="after 7 Lanczos steps.*Raise `max_iter`"):
        inverse_sqrt(A, tol=1e-8, max_iter=7) @ torch.ones(300, dtype=torch.float64)
    assert A.columns == 7


def test_single_precision_stays_single():
    A = Matrix(symmetric(SPECTRA["positive"]).matrix.float(), is_positive_semidefinite=True)
    product = inverse_sqrt(A, tol=1e-5) @ B.float()
    assert product.dtype == torch.float32
    expected = (inverse_root(A.matrix.double()) @ B).float()
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1e-25, 1e-22, 1e20])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_single_precision_at_every_scale(scale, size):
    matrix = (scale * symmetric(SPECTRA["positive"]).matrix).float()
    vectors = (size * B).float()
    product = inverse_sqrt(Matrix(matrix, is_positive_semidefinite=True), tol=1e-5) @ vectors
    expected = inverse_root(matrix.double()) @ vectors.double()
    assert (product.double() - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", ["positive", "decades", "clustered"])
def test_inverse_roots_equal_dense_ones(name):
    A = symmetric(SPECTRA[name] + 1e-3)
    R = inverse_sqrt(A, tol=1e-10)
    expected = inverse_root(A.matrix)
    torch.testing.assert_close(R @ B, expected @ B, rtol=0, atol=1e-6)
    torch.testing.assert_close(R.T @ B[:, 0], expected @ B[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(R @ (A @ (R @ B)), B, rtol=0, atol=1e-6)
    assert R.is_symmetric
    assert R.is_positive_semidefinite
    assert not (R @ torch.zeros_like(B)).any()
    np.testing.assert_allclose(R.to_scipy() @ B.numpy(), expected @ B, rtol=0, atol=1e-6)


@pytest.mark.parametrize("damping", ["identity", "diagonal"])
@pytest.mark.parametrize("spectrum", ["decades", "low rank", "linear"])
def test_the_bound_of_inverse_roots_holds_from_the_first_step_on(spectrum, damping):
    n, c = 300, 1e-3
    values = {
        "decades": 10 ** torch.linspace(-4, 0, n, dtype=torch.float64),
        "low rank": torch.cat([uniform(30), torch.zeros(n - 30)]),
        "linear": torch.linspace(0, 1, n, dtype=torch.float64),
    }[spectrum]
    inner = symmetric(values, is_positive_semidefinite=True)
    added = c * (1 + uniform(n)) if damping == "diagonal" else torch.full((n,), c).double()
    A = inner + (Diagonal(added) if damping == "diagonal" else c * Identity(n))
    b = torch.ones(n, dtype=torch.float64)
    expected = inverse_root(inner.matrix + added.diag()) @ b
    spent = []
    for tol in (0.5, 1e-1, 1e-2, 1e-4, 1e-6):
        inner.columns = 0
        product = inverse_sqrt(A, tol=tol, max_iter=n) @ b
        error = (product - expected).norm()
        norm = product.norm()
        assert error <= tol * norm
        spent.append(inner.columns)
    assert spent == sorted(spent)
    assert spent[0] < spent[-1] < n
    # The reported bound is no less than the error, whenever the iteration stops.
    for steps in (1, 3, 10):
        with pytest.warns(RuntimeWarning, match="inverse_sqrt: after .* `max_iter`") as caught:
            product = inverse_sqrt(A, tol=1e-12, max_iter=steps) @ b
        bound = float(str(caught[0].message).split("is about ")[1].split(",")[0])
        # The message has two digits.
        assert (product - expected).norm() <= 1.06 * bound * product.norm()


def test_operators_that_are_not_positive_definite_have_no_inverse_root():
    with pytest.raises(ValueError, match=r"Ritz value -.*positive definite.*Identity"):
        inverse_sqrt(symmetric(torch.linspace(-0.5, 1, SIZE))) @ B
    with pytest.raises(ValueError, match=r"Ritz value .*positive definite.*Identity"):
        inverse_sqrt(symmetric(SPECTRA["zero"])) @ B
    wrong = symmetric(torch.linspace(-0.5, 1, SIZE), is_positive_semidefinite=True)
    with pytest.raises(
        ValueError,
        match=r"no eigenvalue can be below 1 if its parts.*So at least one of these",
    ):
        inverse_sqrt(wrong + Identity(SIZE)) @ B
    with pytest.raises(ValueError, match="singular"):
        inverse_sqrt(Diagonal(torch.tensor([1.0, 0.0])))
    with pytest.raises(ValueError, match="has the eigenvalue -1"):
        inverse_sqrt(Diagonal(torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match="not symmetric"):
        inverse_sqrt(Matrix(randn(SIZE, SIZE))) @ B
    with pytest.raises(ValueError, match="max_iter must be at least 1"):
        inverse_sqrt(symmetric(SPECTRA["positive"]), max_iter=0)
    with pytest.raises(ValueError, match="`tol` is -1"):
        inverse_sqrt(symmetric(SPECTRA["positive"]), tol=-1.0)
    with pytest.raises(ValueError, match="square operator"):
        inverse_sqrt(Matrix(torch.ones(3, 2)))


def test_structured_operators_have_structured_inverse_roots():
    A = EigenKronecker(orthogonal(6), orthogonal(10), uniform(SIZE).reshape(6, 10))
    dense = symmetric(0.1 + uniform(SIZE)).matrix
    for operator, kind in ((A + 0.1 * Identity(SIZE), EigenKronecker), (Dense(dense), Dense)):
        R = inverse_sqrt(operator)
        assert isinstance(R, kind)
        torch.testing.assert_close(R @ (operator @ (R @ B)), B)


def posterior_precision(curvature):
    """A small network's parameters, its posterior precision, and the same as a dense matrix."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(8, 3).double(), torch.randint(2, (8,))) for _ in range(2)]
    G = curvature(model, nn.CrossEntropyLoss(), data)
    mean = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return mean, 16 * G + 0.5 * Identity(len(mean)), 16 * G.to_dense() + 0.5 * torch.eye(len(mean))


@pytest.mark.parametrize("curvature", [GGN, KFAC])
def test_samples_have_the_moments_of_the_posterior(curvature):
    mean, precision, dense = posterior_precision(curvature)
    # Samples are μ + R z: their covariance is R Rᵀ, exactly.
    R = inverse_sqrt(precision, tol=1e-9).to_dense()
    torch.testing.assert_close(R @ R.T, dense.inverse(), rtol=0, atol=1e-7)
    samples = sample_gaussian(mean, precision, 5, tol=1e-9, generator=generator(3))
    noise = torch.randn(len(mean), dtype=mean.dtype, generator=generator(3))
    torch.testing.assert_close(samples[0], mean + R @ noise, rtol=0, atol=1e-6)
    few = sample_gaussian(mean, precision, 2, tol=1e-9, generator=generator(3))
    torch.testing.assert_close(few, samples[:2])


def test_samples_are_within_the_tolerance_of_exact_ones():
    mean, precision, dense = posterior_precision(GGN)
    exact = sample_gaussian(mean, Dense((dense + dense.T) / 2), 20, generator=generator(4))
    for tol in (0.3, 1e-2, 1e-4):
        samples = sample_gaussian(mean, precision, 20, tol=tol, generator=generator(4))
        assert ((samples - exact).norm(dim=1) <= tol * (samples - mean).norm(dim=1)).all()


def test_what_cannot_be_sampled_is_refused(unchecked):
    mean, precision, _ = posterior_precision(GGN)
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        sample_gaussian(mean, precision, 0)
    for wrong in (mean[:3], mean.float(), mean * torch.nan, mean[:, None]):
        with pytest.raises(ValueError, match="`mean`"):
            sample_gaussian(wrong, precision)
    with pytest.raises(TypeError, match="Expected a LinearOperator"):
        sample_gaussian(mean, torch.eye(len(mean)))
    with pytest.raises(ValueError, match="square operator"):
        sample_gaussian(mean, precision[:3])
