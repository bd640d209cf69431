"""Extreme eigenpairs against the prescribed spectra, and the spectral norm."""

import pytest
import torch
from scipy.sparse.linalg import eigsh as scipy_eigsh
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import eigsh, spectral_norm
from laplace_debias.linalg.eigen import lanczos
from laplace_debias.operators import Diagonal, Identity

SIZE = 150
SPECTRA = {
    "separated": 0.7 ** torch.arange(SIZE, dtype=torch.float64),
    "clustered": torch.cat(
        [torch.tensor([5, 5 - 1e-5, 5 - 2e-5, 4, 4 - 1e-7]).double(), uniform(SIZE - 5)]
    ),
    "degenerate": torch.cat(
        [torch.tensor([5.0] * 4 + [4.0] * 2 + [3.0] * 3).double(), uniform(SIZE - 9)]
    ),
    "indefinite": torch.linspace(-1.5, 1, SIZE, dtype=torch.float64) ** 3,
    "low rank": torch.cat([torch.tensor([3.0, 2.0, -2.0]), torch.zeros(SIZE - 3)]).double(),
    "identity": torch.ones(SIZE, dtype=torch.float64),
    "zero": torch.zeros(SIZE, dtype=torch.float64),
}
METHODS = ["lanczos", "arpack", "power"]


def expected_eigenvalues(values, k, which):
    key = {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]
    return values[key.argsort(descending=True)[:k]].sort(descending=True).values


def check(A, values, result, k, which):
    expected = expected_eigenvalues(values, k, which)
    if which == "magnitude":
        # If both λ and −λ are candidates for the last place, either may be returned.
        torch.testing.assert_close(
            result.values.abs().sort().values, expected.abs().sort().values, rtol=0, atol=1e-6
        )
    else:
        torch.testing.assert_close(result.values, expected, rtol=0, atol=1e-6)
    scale = max(float(values.abs().max()), 1e-300)
    vectors = result.vectors
    torch.testing.assert_close(
        vectors.T @ vectors, torch.eye(k, dtype=vectors.dtype), rtol=0, atol=1e-10
    )
    true_residuals = (A.matrix @ vectors - vectors * result.values).norm(dim=0)
    assert true_residuals.max() <= 1.1e-6 * scale
    assert (true_residuals <= result.residuals + 1e-12 * scale).all()
    assert result.converged
    assert result.values.equal(result.values.sort(descending=True).values)


@pytest.mark.usefixtures("unchecked")  # many products, of which the checks would take most time
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_extreme_eigenpairs_come_with_their_multiplicity(spectrum, which, method):
    if method == "arpack" and spectrum == "degenerate":
        pytest.skip("ARPACK may miss copies, and says so.")
    values = SPECTRA[spectrum]
    dense_below = ("separated", "clustered", "degenerate")
    if method == "power" and which == "smallest" and spectrum in dense_below:
        values = -values  # the lower end is too dense for subspace iteration to resolve
    for k in (1, 7):
        A = symmetric(values)
        result = eigsh(A, k, method, which, generator=generator(), max_matvecs=20_000)
        check(A, values, result, k, which)
        assert result.num_matvecs == A.columns


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_lanczos_finds_every_copy_of_a_hidden_multiple_eigenvalue(seed):
    values = torch.cat([torch.full((6,), 2.0).double(), torch.linspace(0, 1.9, 144).double()])
    A = symmetric(values, seed=seed)
    result = eigsh(A, 7, generator=generator(seed))
    torch.testing.assert_close(
        result.values, expected_eigenvalues(values, 7, "largest"), rtol=0, atol=1e-8
    )


class Opaque(Matrix):
    """A diagonal matrix without a declared structure, so that no n × n matrix is needed."""

    @property
    def shape(self):
        return len(self.matrix), len(self.matrix)

    def _matmat(self, matrix):
        self.columns += matrix.shape[1]
        return self.matrix[:, None] * matrix


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(2))
def test_a_random_start_of_small_residual_does_not_pass_for_a_verified_one(seed, dtype):
    # In 200,000 dimensions, a random vector has tiny components along the copies of 1 that the
    # first Krylov sequence missed, so its residual is below the tolerance from the start.
    values = torch.zeros(200_000, dtype=dtype)
    values[:4] = torch.tensor([1.0, 1.0, 1.0, 0.5])
    result = eigsh(Opaque(values), 3, tol=1e-2, generator=generator(seed))
    assert result.status == "converged"
    torch.testing.assert_close(result.values, torch.ones(3, dtype=dtype), rtol=0, atol=1e-2)


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_a_loose_tolerance_keeps_the_order_of_the_eigenvalues(power):
    values = torch.arange(1, 1501, dtype=torch.float64) ** -power
    result = eigsh(Opaque(values), 50, tol=1e-3, generator=generator())
    assert result.status == "converged"
    assert result.num_matvecs < 150  # without going back and forth between search and check
    # The 50 largest are found, although the last residuals are as large as their eigenvalues.
    torch.testing.assert_close(result.values, values[:50], rtol=0, atol=2e-3)


def test_a_search_that_ends_early_says_what_is_not_verified():
    values = torch.arange(1, 1501, dtype=torch.float64) ** -1.5
    result = eigsh(Opaque(values), 5, tol=1e-2, max_matvecs=13, generator=generator())
    assert result.converged
    assert result.num_matvecs == 13
    assert "further out than the last of these pairs, may be missing" in result.message
    assert "may be missing" in result.message
    assert result.status == "unverified"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_all_eigenpairs_of_small_operators(method, n):
    values = torch.linspace(-1, 2, n, dtype=torch.float64)
    A = symmetric(values)
    for k in {1, n // 2 + 1, n}:
        check(A, values, eigsh(A, k, method, generator=generator()), k, "largest")
    A = symmetric(values)
    assert eigsh(A, n, method).num_matvecs == A.columns == n


def test_restarts_bound_the_number_of_vectors_and_reach_the_same_eigenvalues(monkeypatch):
    values = torch.linspace(0, 1, 600, dtype=torch.float64) ** 0.5
    A = symmetric(values)
    monkeypatch.setattr(lanczos, "_BASIS_BYTES", 40 * 600 * 8)  # 40 vectors
    make_room = lanczos._make_room
    restarts = []

    def record_restart(basis, end, k, completeness):
        restarts.append("search" if completeness is None else "check")
        make_room(basis, end, k, completeness)

    monkeypatch.setattr(lanczos, "_make_room", record_restart)
    result = eigsh(A, 5, generator=generator())
    assert set(restarts) == {"search", "check"}
    check(A, values, result, 5, "largest")


def test_crowded_ends_of_small_operators_take_no_more_than_twice_their_columns():
    values = SPECTRA["separated"]
    A = symmetric(values)
    result = eigsh(A, 7, "lanczos", "smallest", generator=generator())
    check(A, values, result, 7, "smallest")
    assert result.status == "converged"
    assert A.columns <= 2 * SIZE


def test_pairs_unpack():
    A = symmetric(SPECTRA["separated"])
    values, vectors = eigsh(A, 3, generator=generator())
    torch.testing.assert_close(values, expected_eigenvalues(SPECTRA["separated"], 3, "largest"))
    assert vectors.shape == (SIZE, 3)


def test_names_of_scipy_without_an_equivalent_are_explained():
    with pytest.raises(ValueError, match=r"`which` is 'BE'\. Call `eigsh` twice"):
        eigsh(Identity(3), 1, which="BE")
    with pytest.raises(ValueError, match=r"`which` is 'SM'\..*use 'smallest' with `A @ A`"):
        eigsh(Identity(3), 1, which="SM")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_names_of_scipy_choose_the_pairs_that_scipy_chooses(which, method):
    A = symmetric(torch.linspace(-3, 2, 50, dtype=torch.float64))
    expected = scipy_eigsh(A.matrix.numpy(), 3, which=which, return_eigenvectors=False)
    result = eigsh(A, 3, method, which, generator=generator())
    torch.testing.assert_close(result.values, torch.from_numpy(expected).sort(descending=True)[0])


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_structured_operators_have_exact_eigenpairs(which):
    values = torch.tensor([3.0, -5.0, 1.0, 2.0])
    result = eigsh(Diagonal(values), 2, which=which)
    torch.testing.assert_close(result.values, expected_eigenvalues(values, 2, which))
    torch.testing.assert_close(values[:, None] * result.vectors, result.vectors * result.values)
    assert result.num_matvecs == 0


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-12])
@pytest.mark.parametrize("method", METHODS)
def test_single_precision_stays_single_and_is_as_precise_as_it_can_be(method, tol):
    values = SPECTRA["degenerate"]
    A = Matrix(symmetric(values).matrix.float())
    result = eigsh(A, 5, method, tol=tol, generator=generator())
    assert result.converged
    assert result.values.dtype == result.vectors.dtype == torch.float32
    expected = expected_eigenvalues(values, 5, "largest").float()
    torch.testing.assert_close(result.values, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_too_few_products_are_told_with_a_remedy(method):
    values = torch.linspace(0, 1, 400, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="Raise `max_matvecs`"):
        result = eigsh(symmetric(values), 4, method, max_matvecs=100, generator=generator())
    assert not result.converged
    assert result.status == "max_iter"
    assert "of 4 eigenpairs converged" in result.message
    assert result.num_matvecs <= 100 + 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [20, 100])
def test_operators_that_are_not_symmetric_are_noticed(method, n):
    A = Matrix(torch.randn(n, n, dtype=torch.float64, generator=generator()))
    with pytest.raises(ValueError, match="not symmetric"):
        eigsh(A, 3, method, generator=generator())


@pytest.mark.parametrize("shape", [(60, 60), (80, 40), (40, 80)])
def test_spectral_norm_of_any_shape_is_within_its_bound(shape):
    A = Matrix(torch.randn(shape, dtype=torch.float64, generator=generator(2)))
    truth = torch.linalg.matrix_norm(A.matrix, 2)
    for tol in (1e-2, 1e-4, 1e-6):
        A.columns = 0
        estimate = spectral_norm(A, tol=tol, generator=generator())
        assert abs(estimate.value - truth) <= estimate.standard_error + 1e-12
        assert estimate.standard_error <= tol * estimate.value
        assert estimate.num_matvecs == A.columns


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e20])
def test_eigenpairs_in_single_precision_at_every_scale(scale, method):
    values = SPECTRA["separated"] * scale
    A = Matrix(symmetric(values).matrix.float())
    result = eigsh(A, 5, method, generator=generator())
    assert result.converged
    torch.testing.assert_close(result.values.double(), values[:5], rtol=0, atol=1e-5 * scale)
    vectors = result.vectors.double()
    true_residuals = (A.matrix.double() @ vectors - vectors * result.values).norm(dim=0)
    assert true_residuals.max() <= 1e-5 * scale


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("scale", [1e-28, 1e-18, 1e-12, 1e12, 1e18, 1e28])
def test_spectral_norm_in_single_precision_does_not_depend_on_the_scale(scale, is_symmetric):
    values = SPECTRA["separated"] * scale
    matrix = symmetric(values).matrix.float()
    estimate = spectral_norm(Matrix(matrix, is_symmetric), tol=1e-3, generator=generator())
    truth = torch.linalg.matrix_norm(matrix.double(), 2)
    assert abs(estimate.value.double() - truth) <= estimate.standard_error + 1e-6 * truth
    assert 0 < estimate.standard_error <= 1e-3 * truth


def test_spectral_norm_of_a_symmetric_operator_takes_half_the_products():
    values = SPECTRA["indefinite"]
    claimed = spectral_norm(symmetric(values, is_symmetric=True), tol=1e-6, generator=generator())
    plain = spectral_norm(symmetric(values), tol=1e-6, generator=generator())
    torch.testing.assert_close(claimed.value, values.abs().max())
    torch.testing.assert_close(plain.value, values.abs().max())
    assert claimed.num_matvecs < plain.num_matvecs


def test_spectral_norm_of_structured_and_zero_operators():
    assert spectral_norm(Diagonal(torch.tensor([1.0, -3.0]))).num_matvecs == 0
    assert float(spectral_norm(Diagonal(torch.tensor([1.0, -3.0])))) == 3
    assert float(spectral_norm(Matrix(torch.zeros(40, 50)))) == 0


def test_spectral_norm_tells_a_missed_tolerance():
    A = symmetric(torch.linspace(0, 1, 300), is_symmetric=True)
    with pytest.warns(RuntimeWarning, match="Raise `max_matvecs`"):
        assert not spectral_norm(A, tol=1e-8, max_matvecs=10, generator=generator()).converged


@pytest.mark.parametrize("max_matvecs", [3, 4, 9, 10])
def test_the_spectral_norm_takes_at_most_the_given_number_of_products(max_matvecs):
    A = Matrix(torch.randn(60, 50, generator=generator()))
    with pytest.warns(RuntimeWarning, match="Raise `max_matvecs`"):
        norm = spectral_norm(A, tol=1e-9, max_matvecs=max_matvecs, generator=generator())
    assert norm.num_matvecs == A.columns <= max_matvecs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_eigenpairs_stay_on_the_gpu(method):
    A = Matrix(symmetric(SPECTRA["separated"]).matrix.cuda())
    result = eigsh(A, 5, method, generator=torch.Generator("cuda").manual_seed(0))
    assert result.values.device.type == result.vectors.device.type == "cuda"
    expected = expected_eigenvalues(SPECTRA["separated"], 5, "largest")
    torch.testing.assert_close(result.values.cpu(), expected, rtol=0, atol=1e-6)
