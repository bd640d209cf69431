"""Intervals of 95 % cover the truth in about 95 % of the runs, from 12 products on.

A simulation of R runs measures a coverage c to √(c (1 − c) / R). A test fails if the number of
covered runs would have a probability below 0.001 at every coverage between 0.93 and 0.97. With
`INTERVAL_RUNS=4000` in the environment, these limits are 0.917 and 0.978, and the tests take some
minutes.
"""

import math
import os
import warnings
from functools import partial

import pytest
import torch
from cases import one_axis_at_a_time
from scipy.stats import binom
from scipy.stats import t as student
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import (
    Estimate,
    diagonal,
    frobenius_norm,
    logdet,
    matrix_function_trace,
    spectral_density,
    trace,
)
from laplace_debias.linalg.estimators.function_trace import with_bias
from laplace_debias.operators import Diagonal

pytestmark = pytest.mark.usefixtures("unchecked")  # many calls: checks would take most time
SIZE = 60
RUNS = int(os.environ.get("INTERVAL_RUNS", "120"))
INDEX = torch.arange(SIZE, dtype=torch.float64)
SPECTRA = {
    "flat": torch.linspace(1, 3, SIZE, dtype=torch.float64),
    "decaying": 0.8**INDEX,
    "low-rank": torch.cat([torch.tensor([50.0, 40, 30]), 0.1 + 0.1 * uniform(SIZE - 3)]).double(),
    "indefinite": 2 * uniform(SIZE) - 1.2,
}
ESTIMATORS = {
    "hutchinson": lambda A, **k: trace(A, "hutchinson", **k),
    "hutch++": lambda A, **k: trace(A, "hutch++", **k),
    "frobenius": frobenius_norm,
    "diagonal": diagonal,
    "xtrace": lambda A, **k: trace(A, "xtrace", **k),
    "xdiag": lambda A, **k: diagonal(A, "xdiag", **k),
}
DIAGONALS = ("diagonal", "xdiag")
JACKKNIFE = ("xtrace", "xdiag")  # The estimated variance is too large on average.


def truth_of(name, A):
    if name == "frobenius":
        return A.matrix.norm()
    return A.matrix.diagonal() if name in DIAGONALS else A.matrix.trace()


def check_coverage(estimate, truth, runs=RUNS, may_be_more=False):
    """Assert that the number of intervals that hold the truth suits a coverage of 0.93 to 0.97."""
    covered = 0.0
    for _ in range(runs):
        lower, upper = estimate().interval()
        covered += float(((lower <= truth) & (truth <= upper)).double().mean())
    assert round(covered) >= binom.ppf(0.001, runs, 0.93)
    assert may_be_more or round(covered) <= binom.ppf(0.999, runs, 0.97)


@pytest.mark.parametrize(("name", "spectrum"), one_axis_at_a_time(ESTIMATORS, SPECTRA))
def test_intervals_after_12_products_cover_the_truth_in_95_percent_of_runs(name, spectrum):
    A = symmetric(SPECTRA[spectrum], is_symmetric=True)
    # Entries of a diagonal are many in one run, but depend on each other.
    runs = RUNS // 4 if name in DIAGONALS else RUNS
    estimate = partial(ESTIMATORS[name], A, num_matvecs=12, generator=generator(1))
    check_coverage(estimate, truth_of(name, A), runs, may_be_more=name in JACKKNIFE)


@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "frobenius"])
def test_more_products_keep_the_coverage(name):
    A = symmetric(SPECTRA["indefinite"], is_symmetric=True)
    estimate = partial(ESTIMATORS[name], A, num_matvecs=30, generator=generator(2))
    check_coverage(estimate, truth_of(name, A))


@pytest.mark.slow
def test_the_frobenius_norm_covers_where_one_eigenvalue_is_large():
    """Few squared norms often miss it, so intervals from their spread cover in only 90 %."""
    values = torch.cat([torch.tensor([7.0]).double(), uniform(SIZE - 1)])
    A = symmetric(values, is_symmetric=True)
    estimate = partial(frobenius_norm, A, num_matvecs=12, generator=generator(6))
    check_coverage(estimate, A.matrix.norm(), 25 * RUNS)


def low_rank(source, dtype):
    """A matrix of rank 3, so that a sketch of six columns spans its range."""
    root = torch.randn(200, 3, dtype=torch.float64, generator=source)
    return Matrix((root @ root.T).to(dtype), is_symmetric=True)


def diagonal_matrix(source, dtype):
    values = torch.rand(200, dtype=torch.float64, generator=source)
    return Matrix(values.diag().to(dtype), is_symmetric=True)


def orthogonal(source, dtype):
    noise = torch.randn(200, 200, dtype=torch.float64, generator=source)
    return Matrix(torch.linalg.qr(noise).Q.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("hutch++", low_rank),
        ("xtrace", low_rank),
        ("hutchinson", diagonal_matrix),
        ("diagonal", diagonal_matrix),
        ("frobenius", orthogonal),
    ],
)
def test_estimates_that_are_exact_have_intervals_of_rounding(name, matrix, dtype):
    source = generator(8)
    for _ in range(20):
        A = matrix(source, dtype)
        estimate = ESTIMATORS[name](A, num_matvecs=18, generator=source)
        truth = truth_of(name, Matrix(A.matrix.double()))
        lower, upper = (end.double() for end in estimate.interval())
        assert ((lower <= truth) & (truth <= upper)).all()
        scale = estimate.value.double().abs()
        assert (upper - lower <= 200 * torch.finfo(dtype).eps * scale).all()


@pytest.mark.parametrize("name", ["hutchinson", "hutch++"])
def test_operators_that_are_not_symmetric_have_intervals_of_the_samples(name):
    noise = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator(7))
    A = Matrix(noise + torch.eye(SIZE, dtype=torch.float64))
    estimate = partial(ESTIMATORS[name], A, num_matvecs=12, generator=generator(3))
    check_coverage(estimate, A.matrix.trace())


@pytest.mark.parametrize("function", [torch.log, torch.exp, lambda x: x**3])
def test_traces_of_functions_cover_from_four_probes_on(function):
    values = 0.5 + 2 * uniform(SIZE)
    A = symmetric(values)
    source = generator(4)
    check_coverage(
        lambda: matrix_function_trace(A, function, 4, 10, generator=source),
        function(values).sum(),
        RUNS // 2,
    )


@pytest.mark.parametrize(("decades", "num_steps"), one_axis_at_a_time([3, 1, 6], [8, 4, 16, 24]))
def test_log_determinants_cover_whether_or_not_the_quadrature_has_converged(decades, num_steps):
    values = 10 ** (-decades * uniform(120))
    estimate = partial(logdet, symmetric(values), 4, num_steps, generator=generator(5))
    check_coverage(estimate, values.log().sum(), 30, may_be_more=True)


VALUES = {
    "uniform": uniform(200),
    "outliers": torch.cat([torch.tensor([10.0, 7, 5]).double(), uniform(197) ** 3]),
    "clusters": torch.cat(
        [0.05 * uniform(100), 0.5 + 0.1 * uniform(50, 2), 1 + 0.15 * uniform(50, 3)]
    ),
}


def smoothed(values, density):
    grid = density.grid if density.scale == "linear" else density.grid.log10()
    return torch.distributions.Normal(values, density.width).log_prob(grid[:, None]).exp().mean(1)


def density_of(A, width, num_steps, source, num_points=1025, **options):
    return spectral_density(
        A, num_points, width=width, num_probes=6, num_steps=num_steps, generator=source, **options
    )


def coverage(values, densities):
    """The share of points whose interval holds the truth, and its standard error.

    Points where the true density is negligible are left out. The points of one density depend on
    each other but the runs do not, so the error comes from the spread between runs.
    """
    shares = []
    for density in densities:
        truth = smoothed(values, density)
        lower, upper = density.interval()
        matters = truth > 1e-3 * truth.max()
        shares.append(((lower <= truth) & (truth <= upper))[matters].double().mean())
    shares = torch.stack(shares)
    return float(shares.mean()), float(shares.std()) / len(shares) ** 0.5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("spectrum", "num_steps", "relative_width"),
    one_axis_at_a_time(VALUES, [10, 30], [0.03, 0.01, 0.1]),
)
def test_densities_cover_the_truth_at_any_width_and_number_of_steps(
    spectrum, num_steps, relative_width
):
    values = VALUES[spectrum]
    source = generator(6)
    A = symmetric(values)
    width = relative_width * float(values.max() - values.min())
    densities = [density_of(A, width, num_steps, source) for _ in range(8)]
    covered, error = coverage(values, densities)
    assert covered > 0.93 - 3 * error


@pytest.mark.slow
@pytest.mark.parametrize("spectrum", VALUES)
def test_resolved_densities_cover_in_95_percent_and_not_in_more(spectrum):
    values = VALUES[spectrum]
    source = generator(9)
    A = symmetric(values)
    width = 0.1 * float(values.max() - values.min())
    densities = [density_of(A, width, 25, source, 65) for _ in range(RUNS // 2)]
    for density in densities:
        negligible = 1e-6 * smoothed(values, density).max()
        assert (density.quadrature_error < 0.1 * density.standard_error + negligible).all()
    covered, error = coverage(values, densities)
    assert 0.93 - 3 * error < covered < 0.97 + 3 * error


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("width", "num_steps"), one_axis_at_a_time([0.1, 0.03, 0.3], [10, 30]))
def test_densities_over_decades_cover_the_truth_where_nodes_are(width, num_steps):
    places = -2 * uniform(200)
    source = generator(6)
    A = symmetric(10**places)
    densities = [density_of(A, width, num_steps, source, 401, scale="log") for _ in range(8)]
    covered, error = coverage(places, densities)
    assert covered > 0.93 - 3 * error


def test_a_width_finer_than_the_steps_resolve_is_told_with_a_remedy():
    A = symmetric(VALUES["uniform"])
    with pytest.warns(RuntimeWarning, match="Raise `width` or `num_steps`"):
        density = density_of(A, 0.01, 20, generator())
    truth = smoothed(VALUES["uniform"], density)
    assert density.quadrature_error.mean() > 0.3 * (density.density - truth).abs().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        density_of(A, 0.1, 20, generator())


def test_all_eigenvalues_have_neither_a_spread_nor_a_quadrature_error():
    density = spectral_density(Diagonal(VALUES["uniform"]))
    assert density.quadrature_error.abs().max() == 0
    for end in density.interval():
        assert end.equal(density.density)


def test_a_density_of_a_single_probe_has_no_interval():
    density = spectral_density(
        symmetric(VALUES["uniform"]), width=0.1, num_probes=1, num_steps=30, generator=generator()
    )
    lower, upper = density.interval()
    assert lower.max() == 0
    assert upper.isinf().all()


def test_intervals_are_students():
    value, error = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 3.0]).double()
    degrees = torch.tensor([3.0, 40.0]).double()
    estimate = Estimate(value, error, 12, degrees_of_freedom=degrees)
    for level in (0.5, 0.95, 0.99):
        lower, upper = estimate.interval(level)
        for i in range(2):
            ends = student.interval(level, float(degrees[i]), float(value[i]), float(error[i]))
            assert (float(lower[i]), float(upper[i])) == pytest.approx(ends)


def test_exact_values_have_the_point_as_interval():
    for estimate in (
        Estimate.exact(torch.tensor([1.0, 2.0])),
        trace(Diagonal(torch.tensor([1.0, 2.0]))),
        trace(symmetric(SPECTRA["flat"]), num_matvecs=SIZE),
    ):
        lower, upper = estimate.interval()
        assert lower.equal(estimate.value)
        assert upper.equal(estimate.value)


@pytest.mark.parametrize(
    "estimate",
    [
        lambda A: trace(A, num_matvecs=1),
        lambda A: trace(A, "hutch++", 3),
        lambda A: diagonal(A, num_matvecs=1),
        lambda A: frobenius_norm(A, 1),
        lambda A: matrix_function_trace(A, torch.log, 1, 20),
    ],
)
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_one_probe_has_an_infinite_interval_and_no_degree_of_freedom(estimate, is_symmetric):
    result = estimate(symmetric(SPECTRA["flat"], is_symmetric=is_symmetric))
    assert torch.as_tensor(result.degrees_of_freedom).max() == 0
    lower, upper = result.interval()
    assert (lower == -math.inf).all()
    assert (upper == math.inf).all()


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, math.nan])
def test_levels_are_probabilities(level):
    with pytest.raises(ValueError, match=r"`level` is .*between 0 and 1"):
        Estimate.exact(torch.tensor(1.0)).interval(level)
    with pytest.raises(ValueError, match=r"`level` is .*between 0 and 1"):
        spectral_density(Diagonal(VALUES["uniform"])).interval(level)


def test_degrees_of_freedom_count_the_eigenvalues_that_matter():
    flat = torch.cat([torch.ones(30), -torch.ones(30)])
    single = torch.eye(60)[0] * 5
    many, few = (
        trace(symmetric(values, is_symmetric=True), num_matvecs=12, generator=generator())
        for values in (flat, single)
    )
    # 12 probes of one eigenvalue are as many χ² variables; of 60 equal ones, 60 times as many.
    assert 8 <= few.degrees_of_freedom <= 24
    assert 300 <= many.degrees_of_freedom <= 12 * 60


def test_degrees_of_freedom_with_a_known_bias_are_satterthwaites():
    degrees = torch.tensor([3.0, 7, 12]).double()
    variance = torch.tensor([2.0, 1, 0.5]).double()
    squared_bias = torch.tensor([0.0, 1, 2]).double()
    # The variance is known up to a relative variance of 2 / degrees, and the bias exactly.
    spread = variance**2 / degrees
    expected = (variance + squared_bias) ** 2 / spread
    torch.testing.assert_close(with_bias(degrees, variance, squared_bias), expected)


def test_the_spread_of_few_probes_is_known_without_bias():
    A = symmetric(SPECTRA["indefinite"], is_symmetric=True)
    source = generator(8)
    runs = [trace(A, num_matvecs=4, generator=source) for _ in range(400)]
    values = torch.stack([run.value for run in runs])
    variances = torch.stack([run.standard_error for run in runs]) ** 2
    # The variance of 400 values is known to 7 %, the mean of the estimates to less.
    assert float(variances.mean() / values.var()) == pytest.approx(1, abs=0.25)
    # From four samples the usual variance has a relative standard deviation of 0.8.
    assert float(variances.std() / variances.mean()) < 0.3


def test_rademacher_probes_of_a_diagonal_matrix_have_no_spread():
    A = Matrix(torch.diag(SPECTRA["flat"]), is_symmetric=True)
    estimate = trace(A, "hutchinson", 12, generator=generator())
    assert float(estimate.standard_error) < 1e-12
    lower, upper = estimate.interval()
    assert float(upper - lower) < 1e-10
