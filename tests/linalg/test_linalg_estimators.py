"""Trace, diagonal and Frobenius norm: unbiased, with honest standard errors."""

import math
import warnings
from functools import partial

import pytest
import torch
from cases import one_axis_at_a_time
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import Estimate, diagonal, frobenius_norm, trace
from laplace_debias.linalg.probes import draw
from laplace_debias.operators import Dense, Diagonal

SIZE, RUNS = 100, 150
INDEX = torch.arange(SIZE, dtype=torch.float64)
SPECTRA = {
    "decaying": 0.8**INDEX,
    "polynomial": (1 + INDEX) ** -1.5,
    "indefinite": 2 * uniform(SIZE) - 1.2,
    "flat": torch.linspace(1, 3, SIZE, dtype=torch.float64),
}
TRACES = ["hutchinson", "hutch++", "xtrace"]
DIAGONALS = ["hutchinson", "xdiag"]


def truth(function, A):
    if function is frobenius_norm:
        return A.matrix.norm()
    return A.matrix.trace() if function is trace else A.matrix.diagonal()


def repeated(function, A, runs=RUNS, **options):
    """Errors and standard errors over seeds, `[runs, ...]`."""
    estimates = [function(A, generator=generator(seed), **options) for seed in range(runs)]
    errors = torch.stack([estimate.value for estimate in estimates]) - truth(function, A)
    return errors, torch.stack([estimate.standard_error for estimate in estimates])


ESTIMATORS = [
    *(pytest.param(partial(trace, method=name), id=f"trace-{name}") for name in TRACES),
    *(pytest.param(partial(diagonal, method=name), id=f"diagonal-{name}") for name in DIAGONALS),
    pytest.param(frobenius_norm, id="frobenius"),
]


def bare(estimator):
    return getattr(estimator, "func", estimator)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(("estimator", "spectrum"), one_axis_at_a_time(ESTIMATORS, SPECTRA))
def test_standard_error_covers_the_truth_in_about_95_percent_of_runs(estimator, spectrum):
    A = symmetric(SPECTRA[spectrum])
    function = bare(estimator)
    options = getattr(estimator, "keywords", {})
    # A diagonal has as many entries that can be covered or not as the operator has columns.
    runs = 30 if function is diagonal else RUNS
    errors, standard_errors = repeated(function, A, runs, num_matvecs=48, **options)
    covered = (errors.abs() <= 2 * standard_errors).double().mean()
    assert 0.88 <= covered <= 0.995


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(
    ("estimator", "distribution"),
    one_axis_at_a_time(ESTIMATORS[:-1], ["rademacher", "gaussian", "spherical"]),
)
def test_estimates_are_unbiased_for_operators_that_are_not_symmetric(estimator, distribution):
    n = 40
    A = Matrix(torch.randn(n, n, dtype=torch.float64, generator=generator(7)) + torch.eye(n))
    options = estimator.keywords | {"distribution": distribution}
    errors, _ = repeated(bare(estimator), A, num_matvecs=12, **options)
    z = errors.mean(dim=0) / (errors.std(dim=0) / RUNS**0.5)
    assert z.abs().max() < 4


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "spherical"])
def test_square_of_the_frobenius_norm_is_unbiased_for_rectangular_operators(distribution):
    A = Matrix(torch.randn(30, 50, dtype=torch.float64, generator=generator(3)))
    runs = [
        frobenius_norm(A, 10, distribution=distribution, generator=generator(seed))
        for seed in range(RUNS)
    ]
    squares = torch.stack([run.value for run in runs]) ** 2
    error = squares.mean() - A.matrix.norm() ** 2
    assert abs(error) < 4 * squares.std() / RUNS**0.5


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize(("method", "factor"), [("hutch++", 10), ("xtrace", 50)])
def test_sketching_beats_hutchinson_on_a_decaying_spectrum(method, factor):
    A = symmetric(SPECTRA["decaying"])
    plain, _ = repeated(trace, A, runs=100, method="hutchinson", num_matvecs=60)
    better, _ = repeated(trace, A, runs=100, method=method, num_matvecs=60)
    assert better.square().mean().sqrt() * factor < plain.square().mean().sqrt()


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
def test_xdiag_beats_hutchinson_on_a_decaying_spectrum():
    A = symmetric(SPECTRA["decaying"])
    plain, _ = repeated(diagonal, A, runs=50, method="hutchinson", num_matvecs=60)
    better, _ = repeated(diagonal, A, runs=50, method="xdiag", num_matvecs=60)
    assert better.square().mean().sqrt() * 50 < plain.square().mean().sqrt()


@pytest.mark.parametrize("estimator", [ESTIMATORS[1], ESTIMATORS[2], ESTIMATORS[4]])
def test_a_sketch_that_holds_the_whole_range_is_exact(estimator):
    values = torch.zeros(SIZE)
    values[:6] = torch.tensor([5.0, 4, 3, 2, 1, -1])
    A = symmetric(values)
    for num_matvecs in (24, 36):
        estimate = estimator(A, num_matvecs=num_matvecs, generator=generator())
        error = (estimate.value - truth(bare(estimator), A)).abs().max()
        assert error < 1e-12
        assert estimate.standard_error.max() < 1e-12


def left_out(A, probes, i, others):
    Q = torch.linalg.qr(A @ probes[:, others]).Q
    rest = probes[:, i] - Q @ (Q.T @ probes[:, i])
    return (Q.T @ A @ Q).trace() + rest @ A @ rest


def test_xtrace_equals_the_mean_over_probes_left_out_by_hand():
    A, count = symmetric(SPECTRA["indefinite"]), 5
    estimate = trace(A, "xtrace", 2 * count, generator=generator(3), distribution="gaussian")
    probes = draw(A, count, "gaussian", generator(3))
    samples = [left_out(A.matrix, probes, i, [j for j in range(count) if j != i]) for i in range(5)]
    torch.testing.assert_close(estimate.value, torch.stack(samples).mean())
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    changes = {
        (i, j): samples[i] - left_out(A.matrix, probes, i, [m for m in range(5) if m not in (i, j)])
        for i, j in pairs
    }
    covariance = torch.stack([changes[i, j] * changes[j, i] for i, j in pairs]).mean()
    variance = torch.stack(samples).var() / count + covariance.clamp(min=0)
    torch.testing.assert_close(estimate.standard_error, variance.sqrt())


def test_xdiag_equals_the_mean_over_probes_left_out_by_hand():
    n, count = 40, 5
    A = Matrix(torch.randn(n, n, dtype=torch.float64, generator=generator(7)))
    estimate = diagonal(A, "xdiag", 2 * count, generator=generator(3))
    probes = draw(A, count, "rademacher", generator(3))

    def one(i, others):
        Q = torch.linalg.qr(A.matrix @ probes[:, others]).Q
        rest = A.matrix - Q @ Q.T @ A.matrix
        return (Q @ Q.T @ A.matrix).diagonal() + probes[:, i] * (rest @ probes[:, i])

    samples = torch.stack([one(i, [j for j in range(5) if j != i]) for i in range(5)])
    torch.testing.assert_close(estimate.value, samples.mean(dim=0))
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    changes = {
        (i, j): samples[i] - one(i, [m for m in range(5) if m not in (i, j)]) for i, j in pairs
    }
    covariance = torch.stack([changes[i, j] * changes[j, i] for i, j in pairs]).mean(dim=0)
    variance = samples.var(dim=0) / count + covariance.clamp(min=0)
    torch.testing.assert_close(estimate.standard_error, variance.sqrt())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_as_many_products_as_columns_are_exact_and_no_more_are_spent(estimator):
    A = symmetric(SPECTRA["indefinite"])
    estimate = estimator(A, num_matvecs=SIZE + 50, generator=generator())
    torch.testing.assert_close(estimate.value, truth(bare(estimator), A))
    assert estimate.standard_error.abs().max() == 0
    assert estimate.num_matvecs == A.columns == SIZE


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_structured_operators_are_exact_without_products(estimator):
    A = Diagonal(torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0]))
    estimate = estimator(A)
    dense = Matrix(A.to_dense())
    torch.testing.assert_close(estimate.value, truth(bare(estimator), dense))
    assert estimate.num_matvecs == 0
    assert estimate.standard_error.abs().max() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_products_are_counted_and_chunks_change_nothing(estimator):
    A = symmetric(SPECTRA["polynomial"])
    whole = estimator(A, num_matvecs=24, generator=generator())
    assert whole.num_matvecs == A.columns == 24
    parts = estimator(A, num_matvecs=24, generator=generator(), chunk=5)
    torch.testing.assert_close(parts.value, whole.value)
    torch.testing.assert_close(parts.standard_error, whole.standard_error)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tolerance_is_reached_with_more_products(estimator):
    A = symmetric(1 / (1 + torch.arange(500.0)))
    first = estimator(A, num_matvecs=30, generator=generator())
    tol = float(first.standard_error.norm() / first.value.norm()) / 2
    estimate = estimator(A, num_matvecs=30, tol=tol, max_matvecs=400, generator=generator())
    assert estimate.converged
    assert 30 < estimate.num_matvecs <= 400
    assert estimate.standard_error.norm() <= tol * estimate.value.norm()


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("method", TRACES)
def test_estimators_grown_to_a_tolerance_stay_calibrated(method):
    A = symmetric(SPECTRA["polynomial"])
    goals = {"hutchinson": 0.08, "hutch++": 0.0045, "xtrace": 0.003}
    errors, standard_errors = repeated(
        trace, A, method=method, num_matvecs=60, tol=goals[method], max_matvecs=95
    )
    assert errors.mean().abs() < goals[method] * A.matrix.trace() / 4
    assert 0.88 <= (errors.abs() <= 2 * standard_errors).double().mean() <= 0.995


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
@pytest.mark.parametrize("budget", [100, 130, 159, 160])
def test_the_exact_end_keeps_to_the_greatest_number_of_products(method, budget):
    A = symmetric(torch.linspace(-1, 1.5, 100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimate = trace(
            A, method, 60, tol=1e-9, max_matvecs=budget, generator=torch.Generator().manual_seed(0)
        )
    assert estimate.num_matvecs == A.columns <= budget
    assert estimate.converged == (estimate.standard_error == 0)
    if budget == 160:
        assert estimate.converged


def test_missed_tolerance_is_told():
    A = symmetric(SPECTRA["indefinite"])
    with pytest.warns(RuntimeWarning, match="raise `max_matvecs`"):
        estimate = trace(A, tol=1e-6, num_matvecs=10, max_matvecs=20, generator=generator())
    assert not estimate.converged
    assert estimate.num_matvecs == 20


def test_one_probe_has_an_infinite_standard_error():
    A = symmetric(SPECTRA["flat"])
    for estimate in (trace(A, num_matvecs=1), diagonal(A, num_matvecs=1), trace(A, "hutch++", 3)):
        assert estimate.standard_error.isinf().all()
        assert estimate.value.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_generator_fixes_the_result_and_dtype_is_kept(estimator):
    A = Matrix(symmetric(SPECTRA["decaying"]).matrix.float())
    first, again = (estimator(A, num_matvecs=20, generator=generator(5)) for _ in range(2))
    other = estimator(A, num_matvecs=20, generator=generator(6))
    assert first.value.equal(again.value)
    assert not first.value.equal(other.value)
    assert first.value.dtype == first.standard_error.dtype == torch.float32


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_zero_operator_is_estimated_as_zero(estimator):
    estimate = estimator(Matrix(torch.zeros(30, 30)), num_matvecs=12, generator=generator())
    assert estimate.value.abs().max() == 0
    assert estimate.standard_error.abs().max() == 0


def test_a_scalar_estimate_is_a_float():
    assert float(Estimate.exact(torch.tensor(2.5))) == 2.5
    assert math.isclose(float(trace(Dense(torch.eye(3)))), 3.0)


def test_progress_is_shown_on_request(capsys):
    trace(symmetric(SPECTRA["flat"]), num_matvecs=4)
    assert capsys.readouterr().err == ""
    trace(symmetric(SPECTRA["flat"]), num_matvecs=4, progress=True)
    assert "4/4" in capsys.readouterr().err
