"""Spectral densities, traces of functions and log-determinants by Lanczos quadrature."""

import math
import re

import pytest
import torch
from matplotlib.figure import Figure
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import logdet, matrix_function_trace, spectral_density
from laplace_debias.linalg.estimators import quadrature
from laplace_debias.operators import Dense, Diagonal, Identity
from laplace_debias.report.spectrum_plot import plot_spectral_density

SIZE = 200
VALUES = 0.5 + 2 * uniform(SIZE)
DECADES = torch.cat([10 ** (-4 + 5 * uniform(SIZE - 60)), torch.zeros(50), -uniform(10)])


def smoothed(values, density):
    """The density of known eigenvalues, by its definition."""
    grid = density.grid if density.scale == "linear" else density.grid.log10()
    gaussian = torch.distributions.Normal(values, density.width)
    return gaussian.log_prob(grid[:, None]).exp().mean(dim=1)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_density_of_all_eigenvalues_equals_its_definition(scale):
    density = spectral_density(symmetric(VALUES), scale=scale, num_probes=10, num_steps=20)
    values = VALUES if scale == "linear" else VALUES.log10()
    torch.testing.assert_close(density.density, smoothed(values, density))
    assert density.num_matvecs == SIZE
    assert density.standard_error.max() == 0


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_density_integrates_to_one(scale):
    density = spectral_density(
        symmetric(VALUES), scale=scale, num_probes=4, num_steps=30, generator=generator()
    )
    grid = density.grid if scale == "linear" else density.grid.log10()
    assert torch.trapezoid(density.density, grid) == pytest.approx(1, abs=1e-6)


def test_moments_of_nodes_and_weights_are_those_of_the_probes():
    A = symmetric(VALUES)
    density = spectral_density(A, num_probes=3, num_steps=12, generator=generator(4))
    torch.testing.assert_close(density.weights.sum(dim=1), torch.ones(3, dtype=torch.float64))
    source = generator(4)
    for nodes, weights in zip(density.nodes, density.weights, strict=True):
        probe = power = torch.empty(SIZE).double().bernoulli_(generator=source) * 2 - 1
        for degree in range(24):
            expected = probe @ power / SIZE
            torch.testing.assert_close((weights * nodes**degree).sum(), expected, rtol=1e-9, atol=0)
            power = A.matrix @ power


def test_averaged_rules_have_the_moments_of_the_probes():
    A = symmetric(VALUES)
    num_steps = 8
    rule = quadrature.lanczos_quadrature(A, 3, num_steps, generator=generator(4))
    nodes, weights = rule.averaged_rule(num_steps)
    source = generator(4)
    for probe_nodes, probe_weights in zip(nodes, weights, strict=True):
        probe = power = torch.empty(SIZE).double().bernoulli_(generator=source) * 2 - 1
        for degree in range(2 * num_steps):
            moment = (probe_weights * probe_nodes**degree).sum()
            torch.testing.assert_close(moment, probe @ power / SIZE, rtol=1e-9, atol=0)
            power = A.matrix @ power


def test_exhausted_krylov_spaces_keep_exact_moments():
    values = torch.tensor([0.0, 1.0, 3.0]).repeat(40)
    density = spectral_density(
        symmetric(values), num_probes=2, num_steps=20, width=0.1, generator=generator()
    )
    counting = density.nodes[density.weights > 1e-12]
    assert (counting[:, None] - values[:3]).abs().min(dim=1).values.max() < 1e-10
    assert torch.trapezoid(density.density, density.grid) == pytest.approx(1, abs=1e-6)


def test_logarithmic_scale_reports_zero_and_negative_eigenvalues():
    A = symmetric(DECADES)
    density = spectral_density(A, scale="log", num_probes=20, num_steps=10, floor=1e-8)
    assert density.null_fraction == pytest.approx(50 / SIZE)
    assert density.negative_fraction == pytest.approx(10 / SIZE)
    total = torch.trapezoid(density.density, density.grid.log10())
    assert total == pytest.approx(1 - density.null_fraction, abs=1e-6)
    places = DECADES[DECADES != 0].abs().log10()
    torch.testing.assert_close(density.density, smoothed(places, density) * len(places) / SIZE)


def test_structured_operators_have_an_exact_density():
    density = spectral_density(Diagonal(VALUES))
    assert density.num_matvecs == 0
    torch.testing.assert_close(density.density, smoothed(VALUES, density))


def test_width_is_respected_and_must_be_resolved():
    A = symmetric(VALUES)
    assert spectral_density(A, width=0.2, num_steps=20).width == 0.2
    with pytest.raises(ValueError, match=r"Set `num_points` to \d+ or more") as error:
        spectral_density(A, 20, width=0.01)
    least = int(re.search(r"to (\d+) or more", str(error.value))[1])
    assert spectral_density(A, least, width=0.01).width == 0.01
    with pytest.raises(ValueError, match=f"to {least} or more"):
        spectral_density(A, least - 1, width=0.01)


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize(("level", "extent"), [(1.0, 1e-6), (1.0, 1e-5), (1e3, 0.01)])
def test_a_spectrum_as_narrow_as_the_rounding_has_no_extent(scale, level, extent):
    """In single precision, the points of a grid within this extent would coincide."""
    values = level + extent * torch.linspace(0, 1, 60, dtype=torch.float64)
    A = Dense(symmetric(values).matrix.float())
    density = spectral_density(A, scale=scale)
    grid = density.grid if scale == "linear" else density.grid.log10()
    assert torch.trapezoid(density.density, grid) == pytest.approx(1, abs=1e-4)
    assert len(grid.unique()) == len(grid)


def test_a_width_that_is_lost_to_rounding_is_refused():
    A = Diagonal(1 + 1e-4 * uniform(60).float())
    with pytest.raises(ValueError, match=r"lost to the rounding of torch\.float32"):
        spectral_density(A, width=1e-8, num_points=100_000)
    assert spectral_density(A, width=1e-5).width == 1e-5


def test_logdet_is_exact_where_there_are_products_enough_or_a_structure():
    A = symmetric(VALUES)
    estimate = logdet(A, 10, 20)
    torch.testing.assert_close(estimate.value, torch.linalg.slogdet(A.matrix).logabsdet)
    assert estimate.num_matvecs == A.columns == SIZE
    assert estimate.standard_error == 0
    structured = logdet(Diagonal(VALUES) + 0.1 * Identity(SIZE, dtype=torch.float64))
    torch.testing.assert_close(structured.value, (VALUES + 0.1).log().sum())
    assert structured.num_matvecs == 0


def test_large_operators_are_not_multiplied_out(monkeypatch):
    A = symmetric(1 + uniform(60))
    monkeypatch.setattr(quadrature, "_BASIS_ELEMENTS", 60**2)
    assert logdet(A, 10, 10).num_matvecs == 60
    monkeypatch.setattr(quadrature, "_BASIS_ELEMENTS", 60**2 - 1)
    assert logdet(A, 10, 10).num_matvecs == 100


def test_logdet_of_an_indefinite_operator_is_refused():
    for num_steps in (5, 50):
        with pytest.raises(ValueError, match="Add damping"):
            logdet(symmetric(VALUES - 1), 10, num_steps, generator=generator())


def test_the_trace_of_an_operator_without_columns_is_zero():
    for A in (Diagonal(VALUES[:0]), Dense(torch.empty(0, 0))):
        assert matrix_function_trace(A, torch.exp).value == 0


def test_functions_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite at the Ritz value"):
        matrix_function_trace(symmetric(VALUES - 1), torch.log, 4, 5)


def test_asymmetry_is_noticed():
    A = Matrix(torch.randn(100, 100, dtype=torch.float64, generator=generator()))
    for num_steps in (5, 100):
        with pytest.raises(ValueError, match="not symmetric"):
            spectral_density(A, num_steps=num_steps)


def test_single_precision_is_kept():
    A = Matrix(symmetric(VALUES).matrix.float())
    density = spectral_density(A, num_steps=10, generator=generator())
    assert density.density.dtype == density.grid.dtype == density.nodes.dtype == torch.float32
    value = logdet(A, 10, 15, generator=generator())
    assert value.value.dtype == torch.float32
    assert abs(value.value - VALUES.log().sum()) < 4 * value.standard_error


def near_identity(level, size=1000):
    """An operator in single precision whose eigenvalues are within 2e-6 of a number."""
    noise = torch.randn(size, size, dtype=torch.float64, generator=generator())
    matrix = level * torch.eye(size, dtype=torch.float64) + 1e-6 * (noise + noise.T) / size**0.5
    return Matrix(matrix.float())


@pytest.mark.parametrize("level", [1, 0.7])
def test_the_error_of_a_log_determinant_includes_rounding(level):
    """The spread over probes is smaller than the rounding of the eigenvalues."""
    A = near_identity(level)
    truth = torch.linalg.slogdet(A.matrix.double()).logabsdet
    for seed in range(3):
        estimate = logdet(A, 4, 20, generator=generator(seed))
        assert abs(estimate.value - truth) < 2 * estimate.standard_error
        assert estimate.standard_error < 4e-7 * A.shape[0]


def test_the_density_of_similar_eigenvalues_has_no_systematic_rounding_error():
    A = near_identity(0.7)
    density = spectral_density(A, num_probes=4, generator=generator())
    values = torch.linalg.eigvalsh(A.matrix.double())
    expected = smoothed(values, density)
    assert (density.density - expected).abs().max() < 1e-5 * expected.max()


@pytest.mark.parametrize("size", [1e-24, 1e-20, 1e-12, 1e12, 1e20])
def test_the_density_in_single_precision_has_the_same_error_at_every_scale(size):
    matrix = symmetric(VALUES).matrix
    options = {"num_probes": 3, "num_steps": 20}
    plain = spectral_density(Matrix(matrix), width=0.2, generator=generator(), **options)
    single = Matrix((size * matrix).float())
    scaled = spectral_density(single, width=0.2 * size, generator=generator(), **options)
    for name in ("density", "standard_error", "quadrature_error"):
        in_units = size * getattr(scaled, name).double()
        largest = float(plain.density.max())
        torch.testing.assert_close(in_units, getattr(plain, name), rtol=1e-3, atol=1e-5 * largest)
    body = plain.density > 1e-2 * plain.density.max()
    actual = scaled.degrees_of_freedom[body].double()
    torch.testing.assert_close(actual, plain.degrees_of_freedom[body], rtol=1e-2, atol=0)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_picture_shows_the_density_and_its_error(scale):
    density = spectral_density(symmetric(VALUES), scale=scale, num_steps=10, generator=generator())
    ax = Figure().subplots()
    plot_spectral_density(density, ax)
    assert ax.get_xscale() == scale
    drawn = torch.as_tensor(ax.lines[0].get_ydata())
    torch.testing.assert_close(drawn.max(), density.density.max())
    assert len(ax.collections) == 1


def test_more_points_refine_the_same_density():
    coarse, fine = (spectral_density(Diagonal(VALUES), points) for points in (401, 801))
    torch.testing.assert_close(fine.density[::2], coarse.density)
    assert math.isclose(coarse.width, fine.width)


def test_a_logarithmic_density_of_eigenvalues_that_are_one():
    Q = torch.linalg.qr(torch.randn(400, 150, generator=generator(0), dtype=torch.float64)).Q
    density = spectral_density(
        Dense(Q) @ Dense(Q).T, scale="log", num_probes=3, num_steps=10, generator=generator(1)
    )
    integral = torch.trapezoid(density.density, density.grid.log10())
    assert float(integral) == pytest.approx(1 - density.null_fraction, abs=1e-3)
    assert density.null_fraction == pytest.approx(250 / 400, abs=0.05)
    assert density.grid[0] < 0.9999
    assert density.grid[-1] > 1.0001
