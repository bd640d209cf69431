"""Intervals: as many of them as they say cover the truth, from 12 products on.

A simulation of R runs tells a coverage c to √(c (1 − c) / R). A test fails where the number of runs
covered would have a probability below 0.001 if the coverage were within 0.93 and 0.97. With
`INTERVAL_RUNS=4000` in the environment that is 0.917 and 0.978, and some minutes.
"""

import math
import os
import warnings

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
from laplace_debias.operators import Diagonal

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
    "xtrace": lambda A, **k: trace(A, "xtrace", **k),
    "frobenius": frobenius_norm,
    "diagonal-hutchinson": lambda A, **k: diagonal(A, "hutchinson", **k),
    "diagonal-xdiag": lambda A, **k: diagonal(A, "xdiag", **k),
}
WIDER = {("xtrace", "low-rank")}
"""Where intervals are known to cover more: XTrace adds a covariance that may be none."""


def truth_of(name, A):
    if name == "frobenius":
        return A.matrix.norm()
    return A.matrix.diagonal() if name.startswith("diagonal") else A.matrix.trace()


def check_coverage(covered, runs, may_be_more=False):
    """`covered` of `runs` intervals of 95 % is compatible with a coverage of 0.93 to 0.97."""
    assert covered >= binom.ppf(0.001, runs, 0.93)
    assert may_be_more or covered <= binom.ppf(0.999, runs, 0.97)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_intervals_after_12_products_cover_the_truth_in_95_percent_of_runs(name, spectrum):
    A = symmetric(SPECTRA[spectrum], is_symmetric=True)
    truth = truth_of(name, A)
    # Entries of a diagonal are many in one run, but depend on each other.
    runs = RUNS // 4 if name.startswith("diagonal") else RUNS
    source, covered = generator(1), 0.0
    for _ in range(runs):
        lower, upper = ESTIMATORS[name](A, num_matvecs=12, generator=source).interval()
        covered += float(((lower <= truth) & (truth <= upper)).double().mean())
    check_coverage(round(covered), runs, (name, spectrum) in WIDER)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("num_matvecs", [30])
@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace", "frobenius"])
def test_more_products_keep_the_coverage(name, num_matvecs):
    A = symmetric(SPECTRA["indefinite"], is_symmetric=True)
    truth, source = truth_of(name, A), generator(2)
    covered = 0
    for _ in range(RUNS):
        estimate = ESTIMATORS[name](A, num_matvecs=num_matvecs, generator=source)
        lower, upper = estimate.interval()
        covered += int(lower <= truth <= upper)
    check_coverage(covered, RUNS)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("name", ["hutchinson", "hutch++"])
def test_operators_that_are_not_symmetric_have_intervals_of_the_samples(name):
    noise = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator(7))
    A = Matrix(noise + torch.eye(SIZE, dtype=torch.float64))
    truth, source = A.matrix.trace(), generator(3)
    covered = 0
    for _ in range(RUNS):
        lower, upper = ESTIMATORS[name](A, num_matvecs=12, generator=source).interval()
        covered += int(lower <= truth <= upper)
    check_coverage(covered, RUNS)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("function", [torch.log, torch.exp, lambda x: x**3])
def test_traces_of_functions_cover_from_four_probes_on(function):
    values = 0.5 + 2 * uniform(SIZE)
    A, truth = symmetric(values), function(values).sum()
    source, covered = generator(4), 0
    for _ in range(RUNS // 2):
        estimate = matrix_function_trace(A, function, 4, 10, generator=source)
        lower, upper = estimate.interval()
        covered += int(lower <= truth <= upper)
    check_coverage(covered, RUNS // 2)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(("decades", "num_steps"), one_axis_at_a_time([3, 1, 6], [8, 4, 16, 24]))
def test_log_determinants_cover_whether_or_not_the_quadrature_has_converged(decades, num_steps):
    values = 10 ** (-decades * uniform(120))
    A, truth = symmetric(values), values.log().sum()
    source, covered = generator(5), 0
    for _ in range(30):
        lower, upper = logdet(A, 4, num_steps, generator=source).interval()
        covered += int(lower <= truth <= upper)
    check_coverage(covered, 30, may_be_more=True)


VALUES = {
    "uniform": uniform(200),
    "outliers": torch.cat([torch.tensor([10.0, 7, 5]).double(), uniform(197) ** 3]),
    "clusters": torch.cat(
        [0.05 * uniform(100), 0.5 + 0.1 * uniform(50, 2), 1 + 0.15 * uniform(50, 3)]
    ),
}


def smoothed(values, density):
    gaussian = torch.distributions.Normal(values, density.width)
    return gaussian.log_prob(density.grid[:, None]).exp().mean(dim=1)


def density_of(A, width, num_steps, source):
    return spectral_density(
        A, 1025, width=width, num_probes=6, num_steps=num_steps, generator=source
    )


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(
    ("spectrum", "num_steps", "relative_width"),
    one_axis_at_a_time(VALUES, [10, 30], [0.03, 0.01, 0.1]),
)
def test_densities_cover_the_truth_at_any_width_and_number_of_steps(
    spectrum, num_steps, relative_width
):
    values = VALUES[spectrum]
    A = symmetric(values)
    width = relative_width * float(values.max() - values.min())
    source, shares = generator(6), []
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            density = density_of(A, width, num_steps, source)
        truth = smoothed(values, density)
        lower, upper = density.interval()
        matters = truth > 1e-3 * truth.max()
        shares.append(((lower <= truth) & (truth <= upper))[matters].double().mean())
    shares = torch.stack(shares)
    # Points of one density depend on each other, runs do not: their spread tells the coverage's.
    error = float(shares.std()) / len(shares) ** 0.5
    assert float(shares.mean()) > 0.93 - 3 * error


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("spectrum", VALUES)
def test_resolved_densities_cover_in_95_percent_and_not_in_more(spectrum):
    values = VALUES[spectrum]
    A, source, shares = symmetric(values), generator(9), []
    width = 0.1 * float(values.max() - values.min())
    for _ in range(RUNS // 2):
        density = spectral_density(A, 65, width=width, num_probes=6, num_steps=25, generator=source)
        truth = smoothed(values, density)
        assert (density.quadrature_error < 0.1 * density.standard_error + 1e-6 * truth.max()).all()
        lower, upper = density.interval()
        matters = truth > 1e-3 * truth.max()
        shares.append(((lower <= truth) & (truth <= upper))[matters].double().mean())
    shares = torch.stack(shares)
    error = float(shares.std()) / len(shares) ** 0.5
    assert 0.93 - 3 * error < float(shares.mean()) < 0.97 + 3 * error


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(("width", "num_steps"), one_axis_at_a_time([0.1, 0.03, 0.3], [10, 30]))
def test_densities_over_decades_cover_the_truth_where_nodes_are(width, num_steps):
    places = -2 * uniform(200)
    A, source, shares = symmetric(10**places), generator(6), []
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            density = spectral_density(
                A,
                scale="log",
                width=width,
                num_probes=6,
                num_steps=num_steps,
                generator=source,
            )
        gaussian = torch.distributions.Normal(places, width)
        truth = gaussian.log_prob(density.grid.log10()[:, None]).exp().mean(dim=1)
        lower, upper = density.interval()
        matters = truth > 1e-3 * truth.max()
        shares.append(((lower <= truth) & (truth <= upper))[matters].double().mean())
    shares = torch.stack(shares)
    assert float(shares.mean()) > 0.93 - 3 * float(shares.std()) / len(shares) ** 0.5


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
    flat, one = torch.cat([torch.ones(30), -torch.ones(30)]), torch.eye(60)[0] * 5
    many, few = (
        trace(symmetric(values, is_symmetric=True), num_matvecs=12, generator=generator())
        for values in (flat, one)
    )
    # 12 probes of one eigenvalue are as many χ² variables; of 60 equal ones, 60 times as many.
    assert 8 <= few.degrees_of_freedom <= 24
    assert 300 <= many.degrees_of_freedom <= 12 * 60


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
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


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_rademacher_probes_of_a_diagonal_matrix_have_no_spread(method):
    A = Matrix(torch.diag(SPECTRA["flat"]), is_symmetric=True)
    if method == "hutchinson":
        estimate = trace(A, method, 12, generator=generator())
        assert float(estimate.standard_error) < 1e-12
        lower, upper = estimate.interval()
        assert float(upper - lower) < 1e-10
    else:
        estimate = trace(A, method, 12, generator=generator())
        assert abs(estimate.value - A.matrix.trace()) < 5 * estimate.standard_error
