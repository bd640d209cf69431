"""Inverses as operators, LSMR and the Neumann series against dense solves."""

import pytest
import torch
from matrices import Opaque, randn
from spectra import Matrix, generator, orthogonal, symmetric, uniform

from laplace_debias.linalg import inverse, lsmr, neumann
from laplace_debias.operators import Dense, Diagonal, Identity, ParameterLayout, assume

SIZE = 30
POSITIVE = symmetric(0.5 + uniform(SIZE), is_positive_semidefinite=True)
GENERAL = Matrix(
    torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator(1)) / SIZE**0.5
    + 2 * torch.eye(SIZE)
)
B = torch.randn(SIZE, 3, dtype=torch.float64, generator=generator(2))


@pytest.mark.parametrize(("A", "method"), [(POSITIVE, "cg"), (GENERAL, "lsmr")])
def test_the_method_is_chosen_by_what_is_known_of_the_operator(A, method):
    chosen = inverse(A, tol=1e-13)
    torch.testing.assert_close(chosen @ B, torch.linalg.solve(A.matrix, B), rtol=0, atol=1e-8)
    assert (chosen @ B).equal(inverse(A, method, tol=1e-13) @ B)
    assert chosen.is_symmetric == A.is_symmetric


def test_options_reach_the_method():
    M = POSITIVE.matrix
    damped = torch.linalg.solve(M @ M + 0.25 * torch.eye(SIZE), M @ B)
    product = inverse(POSITIVE, "lsmr", damping=0.5, tol=1e-13) @ B
    torch.testing.assert_close(product, damped, rtol=0, atol=1e-9)
    A = symmetric(10 ** torch.linspace(-6, 2, SIZE).double(), is_positive_semidefinite=True)
    exact = Dense(torch.linalg.inv(A.matrix))
    inverse(A, tol=1e-6, preconditioner=exact) @ B[:, 0]
    with_it, A.columns = A.columns, 0
    inverse(A, tol=1e-6) @ B[:, 0]
    assert with_it < A.columns / 4
    with pytest.raises(ValueError, match="method='auto' is 'lsmr', which takes no `precond"):
        inverse(GENERAL, preconditioner=exact)
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
    # Of a Jacobian, the parameters are what comes out.
    J = Opaque(randn(20, SIZE), layout)
    assert inverse(J).layout is None
    assert inverse(J).T.layout == layout
    product = inverse(J, tol=1e-13).T @ named
    torch.testing.assert_close(product, torch.linalg.pinv(J.matrix).T @ B[:, 0])


def test_inverse_of_a_structured_operator_is_exact_and_structured():
    A = Diagonal(torch.tensor([1.0, 2.0, 4.0]))
    for method in ("auto", "exact"):
        assert isinstance(inverse(A, method), Diagonal)
        torch.testing.assert_close(inverse(A, method).to_dense(), A.to_dense().inverse())


def test_inverse_warns_where_a_solve_does_not_converge():
    A = symmetric(10 ** (-5 * uniform(SIZE)), is_positive_semidefinite=True)
    for method in ("cg", "lsmr"):
        with pytest.warns(RuntimeWarning, match=f"inverse by {method}.*max_iter"):
            inverse(A, method, max_iter=2, tol=1e-12) @ B
    with pytest.warns(RuntimeWarning, match="inverse by neumann.*num_terms"):
        inverse(A, "neumann", num_terms=2, tol=1e-12) @ B
    with pytest.warns(RuntimeWarning, match="diverges"):
        inverse(A, "neumann", num_terms=50, scale=10.0) @ B


def test_options_that_a_method_does_not_know_are_refused():
    with pytest.raises(ValueError, match=r"`damping` is not an option.*'cg'.*'lsmr' would"):
        inverse(POSITIVE, "cg", damping=0.1)
    with pytest.raises(ValueError, match="Did you mean 'neumann'"):
        inverse(POSITIVE, "neuman")
    with pytest.raises(ValueError, match="no inverse in closed form"):
        inverse(POSITIVE, "exact")
    with pytest.raises(ValueError, match="square"):
        inverse(Matrix(torch.ones(3, 2)), "cg")


@pytest.mark.parametrize("shape", [(30, 30), (40, 25), (25, 40)])
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_lsmr_minimises_damped_least_squares(shape, damping):
    A = Matrix(torch.randn(shape, dtype=torch.float64, generator=generator(4)))
    b = torch.randn(shape[0], 2, dtype=torch.float64, generator=generator(5))
    # The damped problem is that of A above μ I.
    stacked = torch.cat([A.matrix, damping * torch.eye(shape[1])])
    expected = torch.linalg.pinv(stacked) @ torch.cat([b, torch.zeros(shape[1], 2)])
    solution = lsmr(A, b, damping=damping, tol=1e-13, max_iter=2000)
    torch.testing.assert_close(solution.x, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(solution.residual_norms, (b - A.matrix @ solution.x).norm(dim=0))
    assert solution.converged
    assert solution.num_matvecs == A.columns


def test_lsmr_says_why_it_stopped():
    assert lsmr(GENERAL, B).status == "converged"
    stopped = lsmr(GENERAL, B, max_iter=1)
    assert stopped.status == "max_iter"
    assert "raise `max_iter`" in stopped.message
    assert not stopped.converged
    tall = Matrix(torch.randn(40, 20, dtype=torch.float64, generator=generator(6)))
    right = torch.randn(40, dtype=torch.float64, generator=generator(7))
    assert lsmr(tall, right).status == "least_squares"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-12])
def test_lsmr_converges_by_the_rule_that_it_states(dtype, tol):
    singular = torch.logspace(0, -2, SIZE, dtype=torch.float64)
    A = Matrix((orthogonal(SIZE, 8) * singular @ orthogonal(SIZE, 9)).to(dtype))
    b = B.to(dtype)
    solution = lsmr(A, b, tol=tol, max_iter=3000)
    size = b.norm(dim=0) + A.matrix.norm() * solution.x.norm(dim=0)
    # The estimate of the norm of A grows a little beyond it.
    is_within = (solution.residual_norms <= 4 * tol * size).all()
    assert solution.converged == bool(is_within) == (dtype == torch.float64 or tol > 1e-7)
    assert "`tol` (‖b‖ + ‖A‖ ‖x‖)" in solution.message


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
