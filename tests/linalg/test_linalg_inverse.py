"""Inverses as operators, and the Neumann series, against dense solves."""

import math

import pytest
import torch
from matrices import Opaque
from spectra import Matrix, generator, symmetric, uniform

from laplace_debias.linalg import inverse, neumann
from laplace_debias.operators import Dense, Diagonal, Identity, ParameterLayout, assume

SIZE = 30
POSITIVE = symmetric(0.5 + uniform(SIZE), is_positive_semidefinite=True)
GENERAL = Matrix(
    torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator(1)) / SIZE**0.5
    + 2 * torch.eye(SIZE)
)
B = torch.randn(SIZE, 3, dtype=torch.float64, generator=generator(2))


def test_an_inverse_solves_by_conjugate_gradients():
    operator = inverse(POSITIVE, tol=1e-13)
    torch.testing.assert_close(
        operator @ B, torch.linalg.solve(POSITIVE.matrix, B), rtol=0, atol=1e-8
    )
    assert operator.is_symmetric
    assert operator.T is operator


def test_options_reach_the_solver():
    A = symmetric(10 ** torch.linspace(-6, 2, SIZE).double(), is_positive_semidefinite=True)
    exact = Dense(torch.linalg.inv(A.matrix))
    inverse(A, tol=1e-6, preconditioner=exact) @ B[:, 0]
    with_it = A.columns
    A.columns = 0
    inverse(A, tol=1e-6) @ B[:, 0]
    assert with_it < A.columns / 4
    assert isinstance(inverse(Diagonal(B[:, 0]), preconditioner=exact), Diagonal)


def test_parameters_go_in_and_come_out():
    layout = ParameterLayout(("weight", "bias"), ((5, 5), (5,)))
    A = assume(Opaque(POSITIVE.matrix, layout), positive_semidefinite=True)
    named = layout.unflatten(B[:, 0])
    expected = torch.linalg.solve(POSITIVE.matrix, B[:, 0])
    for operator in (A, A + 0 * Identity(SIZE)):
        product = inverse(operator, tol=1e-12) @ named
        assert list(product) == list(layout.names)
        torch.testing.assert_close(layout.flatten(product), expected, rtol=0, atol=1e-9)


def test_inverse_of_a_structured_operator_is_exact_and_structured():
    A = Diagonal(torch.tensor([1.0, 2.0, 4.0]))
    assert isinstance(inverse(A), Diagonal)
    torch.testing.assert_close(inverse(A).to_dense(), A.to_dense().inverse())


def test_inverse_warns_where_a_solve_does_not_converge():
    A = symmetric(10 ** (-5 * uniform(SIZE)), is_positive_semidefinite=True)
    with pytest.warns(RuntimeWarning, match=r"inverse by cg.*max_iter"):
        inverse(A, max_iter=2, tol=1e-12) @ B


def test_operators_that_are_not_known_to_be_positive_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"assume\(A, positive_semidefinite=True\).*lsmr"):
        inverse(GENERAL)
    with pytest.raises(ValueError, match="square"):
        inverse(Matrix(torch.ones(3, 2)))


def test_an_inverse_solves_by_least_squares():
    operator = inverse(GENERAL, "lsmr", tol=1e-13)
    expected = torch.linalg.solve(GENERAL.matrix, B)
    torch.testing.assert_close(operator @ B, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(operator @ B[:, 0], expected[:, 0], rtol=0, atol=1e-8)
    expected = torch.linalg.solve(GENERAL.matrix.T, B)
    torch.testing.assert_close(operator.T @ B, expected, rtol=0, atol=1e-8)
    assert not operator.is_positive_semidefinite


def test_least_squares_are_those_of_the_pseudo_inverse_where_an_operator_is_singular():
    matrix = GENERAL.matrix.clone()
    matrix[:, :4] = matrix[:, 4:8]
    matrix[0] = 0
    operator = inverse(Matrix(matrix), "lsmr", tol=1e-13)
    torch.testing.assert_close(operator @ B, torch.linalg.pinv(matrix) @ B, rtol=0, atol=1e-8)


def test_the_least_squares_inverse_of_an_indefinite_hessian_solves_in_single_precision():
    A = symmetric(torch.cat([-0.5 - uniform(10), 0.5 + uniform(20)]), is_symmetric=True)
    single = Matrix(A.matrix.float(), is_symmetric=True)
    product = inverse(single, "lsmr", tol=1e-6) @ B.float()
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), torch.linalg.solve(A.matrix, B), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_least_squares_are_differentiable_in_the_right_hand_side():
    matrix = torch.randn(6, 6, dtype=torch.float64, generator=generator(3))
    b = torch.randn(6, dtype=torch.float64, generator=generator(4)).requires_grad_()
    x = inverse(Matrix(matrix), "lsmr", tol=1e-13, max_iter=1000) @ b
    (gradient,) = torch.autograd.grad(b @ x, b)
    expected = (matrix.inverse() + matrix.inverse().T) @ b.detach()
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-8)


def test_least_squares_warn_and_refuse_with_a_remedy():
    A = Matrix(symmetric(10 ** (-5 * uniform(SIZE))).matrix)
    with pytest.warns(
        RuntimeWarning, match=r"3 of 3 solves did not converge within 2 steps.*max_iter"
    ):
        inverse(A, "lsmr", max_iter=2, tol=1e-12) @ B
    with pytest.raises(ValueError, match=r"`preconditioner` has no effect.*Remove it"):
        inverse(A, "lsmr", preconditioner=Identity(SIZE))
    with pytest.raises(ValueError, match=r"`tol` is 0.*Pass the largest relative residual"):
        inverse(A, "lsmr", tol=0.0)
    with pytest.raises(ValueError, match=r"`method` is 'lsqr'.*mean 'lsmr'"):
        inverse(A, "lsqr")


@pytest.mark.parametrize("method", ["cg", "lsmr"])
@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_an_inverse_refuses_a_right_hand_side_that_is_not_finite(method, entry):
    b = B.clone()
    b[3, 1] = entry
    with pytest.raises(ValueError, match="`b` contains NaN or Inf"):
        inverse(POSITIVE, method) @ b


def test_least_squares_refuse_an_operator_that_is_not_finite():
    class Diverges(Matrix):
        """The products are not finite, but those of the adjoint are."""

        def _matmat(self, matrix):
            return super()._matmat(matrix) * math.nan

    matrix = GENERAL.matrix.clone()
    with pytest.raises(ValueError, match="product with Diverges contains NaN or Inf"):
        inverse(Diverges(matrix), "lsmr") @ B
    matrix[3, 1] = math.nan
    with pytest.raises(ValueError, match="adjoint of Matrix contains NaN or Inf"):
        inverse(Matrix(matrix), "lsmr") @ B


def test_least_squares_are_zero_for_a_right_hand_side_of_zeros():
    b = torch.stack([torch.zeros(SIZE).double(), B[:, 0]], dim=1)
    solution = inverse(GENERAL, "lsmr", tol=1e-13) @ b
    assert not solution[:, 0].any()
    torch.testing.assert_close(GENERAL.matrix @ solution[:, 1], B[:, 0], rtol=0, atol=1e-8)


def test_neumann_series_has_as_many_terms_as_asked_for():
    alpha, terms = 0.4, 6
    step = torch.eye(SIZE) - alpha * POSITIVE.matrix
    expected = sum(alpha * torch.linalg.matrix_power(step, j) @ B for j in range(terms))
    solution = neumann(POSITIVE, B, terms, scale=alpha)
    torch.testing.assert_close(solution.x, expected)
    torch.testing.assert_close(
        solution.residual_norms, (B - POSITIVE.matrix @ solution.x).norm(dim=0)
    )
    assert solution.status == "max_iter"
    assert solution.num_matvecs == 3 * terms


def test_neumann_scale_is_found_for_any_magnitude():
    for magnitude in (1e-4, 1e4):
        A = symmetric(magnitude * (0.5 + uniform(SIZE)))
        solution = neumann(A, B, 500, tol=1e-9, generator=generator())
        assert solution.status == "converged"
        torch.testing.assert_close(solution.x, torch.linalg.solve(A.matrix, B), rtol=1e-6, atol=0)


def test_neumann_preconditioner_speeds_it_up():
    scales = 10 ** (3 * uniform(SIZE))
    A = Matrix(scales.sqrt() * POSITIVE.matrix * scales.sqrt()[:, None])
    P = Diagonal(1 / A.matrix.diagonal())
    plain = neumann(A, B, 2000, tol=1e-8, generator=generator())
    better = neumann(A, B, 2000, tol=1e-8, preconditioner=P, scale=0.9)
    as_function = neumann(A, B, 2000, tol=1e-8, preconditioner=lambda r: P @ r, scale=0.9)
    assert better.converged
    assert better.num_matvecs * 3 < plain.num_matvecs
    assert better.x.equal(as_function.x)
    torch.testing.assert_close(better.x, torch.linalg.solve(A.matrix, B), rtol=1e-5, atol=1e-8)


def test_divergence_is_detected_and_the_best_partial_sum_kept():
    for A, scale in ((POSITIVE, 5.0), (symmetric(uniform(SIZE) - 0.5), 0.5)):
        solution = neumann(A, B, 500, scale=scale)
        assert solution.status == "diverged"
        assert not solution.converged
        assert "below 2 / λ_max" in solution.message
        assert solution.residual_norms.norm() <= B.norm() * (1 + 1e-12)
        torch.testing.assert_close(solution.residual_norms, (B - A.matrix @ solution.x).norm(dim=0))
        assert solution.num_matvecs < 3 * 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-17, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("size_of_b", [1e-12, 1.0])
def test_least_squares_do_not_depend_on_the_scale(dtype, scale, size_of_b):
    """SciPy's estimate of the condition number depends on it."""
    Q = torch.linalg.qr(torch.randn(50, 50, generator=generator(3), dtype=torch.float64)).Q
    M = (Q * torch.linspace(1, 2, 50)).to(dtype)
    b = size_of_b * torch.ones(50, dtype=dtype)
    z = inverse(Dense(scale * M @ M.T), "lsmr") @ b
    expected = torch.linalg.solve((M @ M.T).double(), b.double()) / scale
    error = (z.double() - expected).norm() / expected.norm()
    assert error < 200 * torch.finfo(dtype).eps ** (1 if dtype == torch.float64 else 0.9)


def test_each_right_hand_side_of_a_neumann_series_has_its_own_end():
    A = Dense(torch.diag(torch.tensor([0.5, 5.0]).double()))
    solution = neumann(A, torch.eye(2).double(), 20, scale=1.0, tol=0.3)
    assert [status.name for status in solution.statuses] == ["CONVERGED", "DIVERGED"]
    residuals = torch.eye(2).double() - A @ solution.x
    torch.testing.assert_close(solution.residual_norms, residuals.norm(dim=0))
    assert solution.residual_norms[0] <= 0.3
    assert solution.residual_norms[1] <= 1.0


def test_a_neumann_series_does_not_end_where_another_diverges():
    A = Dense(torch.diag(torch.tensor([0.5, 5.0, 0.1]).double()))
    solution = neumann(A, torch.eye(3).double(), 30, scale=1.0)
    assert [status.name for status in solution.statuses] == ["MAX_ITER", "DIVERGED", "MAX_ITER"]
    residuals = torch.tensor([0.5, 0.9]).double() ** 30
    torch.testing.assert_close(solution.residual_norms[[0, 2]], residuals)
    torch.testing.assert_close(solution.x[0, 0], (1 - residuals[0]) / 0.5)
    torch.testing.assert_close(solution.x[2, 2], (1 - residuals[1]) / 0.1)


@pytest.mark.parametrize("scale", [1e-24, 1e20])
def test_a_neumann_series_in_single_precision_at_every_scale(scale):
    A = Matrix(POSITIVE.matrix.float())
    result = neumann(A, scale * B.float(), 200, tol=1e-4, generator=generator())
    truth = scale * torch.linalg.solve(POSITIVE.matrix, B)
    assert result.converged
    torch.testing.assert_close(result.x.double(), truth, rtol=0, atol=1e-3 * scale)
