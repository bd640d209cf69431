"""Trace, diagonal and Frobenius norm: unbiased, with honest standard errors."""

import math
from functools import partial

import pytest
import torch
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import (
    Estimate,
    diagonal,
    frobenius_norm,
    matrix_function_trace,
    products,
    trace,
)
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


def truth(function, A):
    if function is frobenius_norm:
        return A.matrix.norm()
    return A.matrix.trace() if function is trace else A.matrix.diagonal()


def repeated(function, A, runs=RUNS, **options):
    """Estimates' errors and standard errors over seeds, each `[runs, ...]`."""
    estimates = [function(A, generator=generator(seed), **options) for seed in range(runs)]
    errors = torch.stack([estimate.value for estimate in estimates]) - truth(function, A)
    return errors, torch.stack([estimate.standard_error for estimate in estimates])


ESTIMATORS = [
    *(pytest.param(partial(trace, method=name), id=f"trace-{name}") for name in TRACES),
    pytest.param(partial(diagonal), id="diagonal"),
    pytest.param(partial(diagonal, method="xdiag"), id="xdiag"),
    pytest.param(frobenius_norm, id="frobenius"),
]


def bare(estimator):
    return getattr(estimator, "func", estimator)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
@pytest.mark.parametrize("estimator", ESTIMATORS[:-1])
def test_estimates_are_unbiased_for_operators_that_are_not_symmetric(estimator):
    n = 40
    A = Matrix(torch.randn(n, n, dtype=torch.float64, generator=generator(7)) + torch.eye(n))
    errors, _ = repeated(bare(estimator), A, num_matvecs=12, **estimator.keywords)
    z = errors.mean(dim=0) / (errors.std(dim=0) / RUNS**0.5)
    assert z.abs().max() < 4


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
def test_square_of_the_frobenius_norm_is_unbiased_for_rectangular_operators():
    A = Matrix(torch.randn(30, 50, dtype=torch.float64, generator=generator(3)))
    runs = [frobenius_norm(A, 10, generator=generator(seed)) for seed in range(RUNS)]
    squares = torch.stack([run.value for run in runs]) ** 2
    error = squares.mean() - A.matrix.norm() ** 2
    assert abs(error) < 4 * squares.std() / RUNS**0.5


def test_the_frobenius_norm_of_rectangular_operators_is_exact_with_a_product_per_column():
    for shape in ((7, 4), (4, 7)):
        A = Matrix(torch.randn(*shape, dtype=torch.float64, generator=generator(4)))
        norm = frobenius_norm(A, num_matvecs=7)
        assert float(norm.value) == pytest.approx(float(A.matrix.norm()), rel=1e-14)
        assert float(norm.standard_error) == 0
        assert norm.num_matvecs == shape[1]


@pytest.mark.parametrize("scale", [1e-12, 1e-18, 1e12, 1e18])
def test_the_frobenius_norm_in_single_precision_does_not_depend_on_the_scale(scale):
    # A power of two changes no digit.
    scale = 2.0 ** round(math.log2(scale))
    matrix = symmetric(SPECTRA["flat"]).matrix.float()
    for num_matvecs in (12, SIZE):
        plain = frobenius_norm(Matrix(matrix), num_matvecs, generator=generator())
        scaled = frobenius_norm(Matrix(scale * matrix), num_matvecs, generator=generator())
        assert float(scaled.value) == scale * float(plain.value)
        assert float(scaled.standard_error) == pytest.approx(scale * float(plain.standard_error))


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        *((parameters.values[0], {"num_matvecs": 24}) for parameters in ESTIMATORS),
        (partial(matrix_function_trace, function=torch.abs), {"num_probes": 4, "num_steps": 8}),
    ],
)
@pytest.mark.parametrize("scale", [1e-28, 1e-20, 1e20, 1e28])
def test_estimates_in_single_precision_do_not_depend_on_the_scale(estimator, options, scale):
    # A power of two changes no digit.
    scale = 2.0 ** round(math.log2(scale))
    matrix = symmetric(SPECTRA["indefinite"]).matrix.float()
    plain = estimator(Matrix(matrix, True), generator=generator(), **options)
    scaled = estimator(Matrix(scale * matrix, True), generator=generator(), **options)
    # The eigenvalues are up to 1.2, so 1e-6 is a few rounding errors of an entry.
    assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    assert_close(scaled.value / scale, plain.value)
    assert_close(scaled.standard_error / scale, plain.standard_error)
    assert_close(scaled.degrees_of_freedom, plain.degrees_of_freedom)


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
def test_sketching_beats_hutchinson_on_a_decaying_spectrum():
    A = symmetric(SPECTRA["decaying"])
    plain, _ = repeated(trace, A, runs=50, method="hutchinson", num_matvecs=60)
    better, _ = repeated(trace, A, runs=50, method="hutch++", num_matvecs=60)
    assert better.square().mean().sqrt() * 10 < plain.square().mean().sqrt()


def test_a_sketch_that_holds_the_whole_range_is_exact():
    values = torch.zeros(SIZE)
    values[:6] = torch.tensor([5.0, 4, 3, 2, 1, -1])
    A = symmetric(values)
    for num_matvecs in (24, 36):
        estimate = trace(A, "hutch++", num_matvecs, generator=generator())
        assert (estimate.value - A.matrix.trace()).abs() < 1e-12
        assert estimate.standard_error.max() < 1e-12


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
def test_products_are_counted_and_chunks_change_nothing(estimator, monkeypatch):
    A = symmetric(SPECTRA["polynomial"])
    in_one_chunk = estimator(A, num_matvecs=24, generator=generator())
    assert in_one_chunk.num_matvecs == A.columns == 24
    monkeypatch.setattr(products, "_CHUNK_ELEMENTS", 5 * SIZE)
    in_chunks = estimator(A, num_matvecs=24, generator=generator())
    torch.testing.assert_close(in_chunks.value, in_one_chunk.value)
    torch.testing.assert_close(in_chunks.standard_error, in_one_chunk.standard_error)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_generator_fixes_the_result_and_dtype_is_kept(estimator):
    A = Matrix(symmetric(SPECTRA["decaying"]).matrix.float())
    first, again = (estimator(A, num_matvecs=20, generator=generator(5)) for _ in range(2))
    different_seed = estimator(A, num_matvecs=20, generator=generator(6))
    assert first.value.equal(again.value)
    assert not first.value.equal(different_seed.value)
    assert first.value.dtype == first.standard_error.dtype == torch.float32


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_zero_operator_is_estimated_as_zero(estimator):
    estimate = estimator(Matrix(torch.zeros(30, 30)), num_matvecs=12, generator=generator())
    assert estimate.value.abs().max() == 0
    assert estimate.standard_error.abs().max() == 0


def test_a_scalar_estimate_is_a_float():
    assert float(Estimate.exact(torch.tensor(2.5))) == 2.5
    assert math.isclose(float(trace(Dense(torch.eye(3)))), 3.0)


def left_out_projector(images, i):
    """The projector to the range of all images but one, by a QR decomposition."""
    remaining = torch.cat([images[:, :i], images[:, i + 1 :]], dim=1)
    Q = torch.linalg.qr(remaining).Q
    return Q @ Q.T


def xtrace_by_definition(matrix, probes):
    """The mean of Hutch++ with the sketch of all other probes, each probe's length divided out."""
    n = len(matrix)
    values = []
    for i in range(probes.shape[1]):
        inside = left_out_projector(matrix @ probes, i)
        outside = probes[:, i] - inside @ probes[:, i]
        scale = (n - inside.trace()) / outside.square().sum()
        values.append((inside @ matrix).trace() + scale * outside @ matrix @ outside)
    return torch.stack(values).mean()


def xdiag_by_definition(matrix, probes):
    values = []
    for i in range(probes.shape[1]):
        inside = left_out_projector(matrix @ probes, i) @ matrix
        values.append(inside.diagonal() + probes[:, i] * ((matrix - inside) @ probes[:, i]))
    return torch.stack(values).mean(dim=0)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("estimator", "definition", "distribution"),
    [
        (partial(trace, method="xtrace"), xtrace_by_definition, "spherical"),
        (partial(diagonal, method="xdiag"), xdiag_by_definition, "rademacher"),
    ],
)
def test_leaving_one_probe_out_has_the_value_and_error_of_its_definition(
    estimator, definition, distribution, is_symmetric
):
    matrix = torch.randn(40, 40, dtype=torch.float64, generator=generator(9))
    if is_symmetric:
        matrix = symmetric(0.7 ** INDEX[:40]).matrix
    A = Matrix(matrix, is_symmetric=is_symmetric)
    estimate = estimator(A, num_matvecs=12, generator=generator(4))
    probes = draw(A, 6, distribution, generator(4))
    torch.testing.assert_close(estimate.value, definition(matrix, probes))
    remaining_columns = [[j for j in range(6) if j != i] for i in range(6)]
    without_each = torch.stack(
        [definition(matrix, probes[:, columns]) for columns in remaining_columns]
    )
    variance = 5 * without_each.var(dim=0, correction=0)
    torch.testing.assert_close(estimate.standard_error, variance.sqrt())
    assert (torch.as_tensor(estimate.degrees_of_freedom) == 5).all()


@pytest.mark.usefixtures("unchecked")  # many calls, of which the checks would take most time
def test_leaving_one_out_beats_the_other_methods_on_a_decaying_spectrum():
    A = symmetric(SPECTRA["decaying"])
    for function, plain, better in (
        (trace, "hutch++", "xtrace"),
        (diagonal, "hutchinson", "xdiag"),
    ):
        errors = {
            method: repeated(function, A, runs=40, method=method, num_matvecs=24)[0]
            for method in (plain, better)
        }
        assert errors[better].square().mean() * 2 < errors[plain].square().mean()


@pytest.mark.parametrize("function", [trace, diagonal])
def test_leaving_one_out_is_exact_where_the_sketch_holds_the_range(function):
    values = torch.zeros(SIZE, dtype=torch.float64)
    values[:4] = torch.tensor([5.0, 4, 3, -1])
    A = symmetric(values)
    method = "xtrace" if function is trace else "xdiag"
    estimate = function(A, method, 14, generator=generator())
    assert (estimate.value - truth(function, A)).abs().max() < 1e-12
    assert torch.as_tensor(estimate.standard_error).max() < 1e-12


def test_the_methods_that_leave_one_out_need_three_probes():
    A = symmetric(SPECTRA["flat"])
    with pytest.raises(ValueError, match="num_matvecs must be at least 6"):
        trace(A, "xtrace", 5)
    with pytest.raises(ValueError, match="num_matvecs must be at least 6"):
        diagonal(A, "xdiag", 5)
    with pytest.raises(ValueError, match=r"`method` is 'xdiagonal'.*mean 'xdiag'"):
        diagonal(A, "xdiagonal")


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_the_exact_frobenius_norm_has_squares_in_range(scale):
    norm = frobenius_norm(Dense(scale * torch.eye(3)), num_matvecs=3)
    torch.testing.assert_close(norm.value, torch.tensor(scale * 3**0.5))
