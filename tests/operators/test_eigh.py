"""The one place for eigendecompositions: wrong results of LAPACK are detected and recomputed."""

from collections import Counter
from pathlib import Path

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import laplace_debias
from laplace_debias import Laplace
from laplace_debias.operators.eigh import eigh

TRUE_EIGH = torch.linalg.eigh


def symmetric(d, dtype=torch.float64, seed=0):
    rows = torch.randn(3 * d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (rows.T @ rows / len(rows)).to(dtype)


def nan_vectors(values, vectors):
    return values, torch.where(torch.arange(vectors.shape[-1]) == 1, torch.nan, vectors)


def one_entry_nan(values, vectors):
    vectors = vectors.clone()
    vectors[..., -1, 0] = torch.nan
    return values, vectors


def nan_values(values, vectors):
    return values * torch.nan, vectors


def not_converged(values, vectors):
    raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")


def swapped(values, vectors):
    return values, vectors.flip(-1)


def off_by_little(values, vectors):
    return values * (1 + 1e-3), vectors


def not_orthonormal(values, vectors):
    return values, vectors * 1.01


def one_wrong_column(values, vectors):
    vectors = vectors.clone()
    vectors[..., 0] = vectors[..., 1]
    return values, vectors


FAULTS = [
    nan_vectors,
    one_entry_nan,
    nan_values,
    not_converged,
    swapped,
    off_by_little,
    not_orthonormal,
    one_wrong_column,
]


def faulty(fault, dtypes, calls):
    def eigh(matrix):
        calls.append(matrix.dtype)
        pair = TRUE_EIGH(matrix)
        return fault(*pair) if matrix.dtype in dtypes else pair

    return eigh


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_decomposition_in_single_precision_is_made_again_in_double(monkeypatch, fault):
    calls = []
    monkeypatch.setattr(torch.linalg, "eigh", faulty(fault, [torch.float32], calls))
    matrix = symmetric(40, torch.float32)
    values, vectors = eigh(matrix)
    assert calls == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    expected = scipy.linalg.eigh(matrix.double().numpy(), eigvals_only=True)
    torch.testing.assert_close(values.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", [(40, 40), (3, 7, 7)])
def test_what_fails_in_double_precision_too_is_made_by_another_algorithm(monkeypatch, fault, shape):
    matrix = torch.stack([symmetric(shape[-1], seed=seed) for seed in range(3)])
    matrix = matrix if len(shape) == 3 else matrix[0]
    dtypes = [torch.float32, torch.float64]
    monkeypatch.setattr(torch.linalg, "eigh", faulty(fault, dtypes, []))
    values, vectors = eigh(matrix)
    rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.mT
    torch.testing.assert_close(rebuilt, matrix, rtol=1e-10, atol=1e-10)
    assert vectors.stride() == TRUE_EIGH(matrix)[1].stride()
    assert (values[..., 1:] >= values[..., :-1]).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 1, 1)])
def test_a_matrix_of_one_entry_is_its_eigenvalue(monkeypatch, shape):
    monkeypatch.setattr(torch.linalg, "eigh", None)
    matrix = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    values, vectors = eigh(matrix)
    assert torch.equal(values, matrix.squeeze(-1))
    assert torch.equal(vectors, torch.ones(shape, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(values.sum(), matrix)
    assert torch.equal(gradient, torch.ones(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="contains NaN or Inf"):
        eigh(torch.full(shape, torch.nan))


def test_samples_do_not_depend_on_the_signs_that_lapack_chose(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.randn(40, 2, generator=torch.Generator().manual_seed(1)).double()

    def drawn():
        la = Laplace(model, likelihood="regression").fit_batches([(x, y)])
        return la.sample(3, generator=torch.Generator().manual_seed(0))

    expected = drawn()
    every_second = faulty(
        lambda values, vectors: (values, vectors * (-1.0) ** torch.arange(values.shape[-1])),
        [torch.float64],
        [],
    )
    monkeypatch.setattr(torch.linalg, "eigh", every_second)
    torch.testing.assert_close(drawn(), expected, rtol=1e-9, atol=1e-9)


def test_a_factor_that_nothing_decomposes_is_refused_by_the_name_of_its_block(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", faulty(nan_vectors, [torch.float64], []))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    monkeypatch.setattr(scipy.linalg, "eigh", _no_convergence)
    la = Laplace(model)
    with pytest.raises(torch.linalg.LinAlgError, match=r"factor G of (0|2)\.(weight|bias)"):
        la.fit_batches([(torch.randn(8, 3), torch.randint(2, (8,)))])
    with pytest.raises(RuntimeError, match="not fitted"):
        la.posterior


def _no_convergence(*_, **__):
    raise scipy.linalg.LinAlgError("no convergence")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_refused(bad):
    matrix = symmetric(5)
    matrix[3, 1] = bad
    with pytest.raises(ValueError, match=r"factor A of conv1 .*contains NaN or Inf"):
        eigh(matrix, "factor A of conv1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-0.99, -0.5, 0.5, 0.99])
def test_matrices_near_the_ends_of_the_numbers_are_decomposed(dtype, exponent):
    info = torch.finfo(dtype)
    scale = info.max**exponent if exponent > 0 else info.tiny**-exponent
    matrix = symmetric(30, dtype) / 30
    values, vectors = eigh(matrix * scale)
    expected = torch.from_numpy(scipy.linalg.eigh(matrix.double().numpy(), eigvals_only=True))
    tolerance = 100 * info.eps
    largest = float(expected[-1])
    torch.testing.assert_close(
        values.double() / scale, expected, rtol=tolerance, atol=tolerance * largest
    )
    identity = torch.eye(30, dtype=dtype)
    torch.testing.assert_close(vectors.T @ vectors, identity, rtol=0, atol=tolerance)


@pytest.mark.parametrize("d", [1, 2, 3, 64, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["zero", "one", "rank one", "identity", "indefinite", "graded"])
def test_right_decompositions_are_not_made_again(monkeypatch, d, dtype, kind):
    rows = torch.randn(d, d, dtype=dtype)
    matrix = {
        "zero": torch.zeros(d, d, dtype=dtype),
        "one": torch.ones(d, d, dtype=dtype),
        "rank one": torch.outer(rows[0], rows[0]),
        "identity": torch.eye(d, dtype=dtype),
        "indefinite": rows + rows.T,
        "graded": torch.logspace(0, -30, d, dtype=dtype).diag() + 1e-3,
    }[kind]
    calls = []
    monkeypatch.setattr(torch.linalg, "eigh", faulty(swapped, [], calls))
    values, vectors = eigh(matrix)
    # LAPACK's own single precision may fail; double precision is right at once. A matrix of one
    # entry needs no decomposition.
    assert calls in ([[dtype], [torch.float32, torch.float64]] if d > 1 else [[]])
    rebuilt = (vectors * values) @ vectors.T
    scale = float(torch.linalg.matrix_norm(matrix, 2))
    rounding = torch.finfo(dtype).eps * d**0.5
    torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=6 * rounding * scale)


def test_a_decomposition_can_be_differentiated():
    matrix = symmetric(6).requires_grad_()
    eigh(matrix)[0][-1].backward()
    u = TRUE_EIGH(matrix.detach())[1][:, -1]
    # The gradient of the largest eigenvalue is u uᵀ, and only the lower triangle is read.
    lower = torch.outer(u, u)
    torch.testing.assert_close(matrix.grad.tril(-1) + matrix.grad.triu(1).T, 2 * lower.tril(-1))
    torch.testing.assert_close(matrix.grad.diagonal(), lower.diagonal())


def test_no_other_place_in_the_package_decomposes():
    package = Path(laplace_debias.__file__).parent
    decomposing_files = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if "linalg.eigh(" in path.read_text() or "linalg.eigvalsh(" in path.read_text()
    ]
    assert decomposing_files == ["operators/eigh.py"]


class NumbersMade(TorchDispatchMode):
    """Counts the entries of the results of each operation that is not a view."""

    def __init__(self):
        super().__init__()
        self.by_operation = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count its results."""
        results = func(*args, **(kwargs or {}))
        is_new = not func.is_view and not func.__name__.endswith("_.Tensor")
        for result in results if isinstance(results, tuple) else (results,):
            if is_new and isinstance(result, torch.Tensor):
                self.by_operation[func.__name__] += result.numel()
        return results


def test_a_matrix_of_usual_size_is_copied_only_once_for_its_checks():
    d = 50
    matrix = symmetric(d)
    with NumbersMade() as numbers_made:
        eigh(matrix)
    copies = {name: number for name, number in numbers_made.by_operation.items() if number >= d * d}
    assert copies.keys() == {"_linalg_eigh.default", "tril.default"}
    assert copies["tril.default"] == d * d


def test_rounding_in_the_upper_triangle_has_no_effect():
    matrix = symmetric(10)
    rounded = matrix + 1e-8 * torch.randn(10, 10, dtype=torch.float64).triu(1)
    assert torch.equal(eigh(rounded)[0], eigh(matrix)[0])
    assert torch.equal(eigh(rounded)[1], eigh(matrix)[1])
