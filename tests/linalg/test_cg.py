"""Conjugate gradients and debiased conjugate gradients."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from matrices import randn
from spectra import Counted, with_eigenvalues
from torch.testing import assert_close

from laplace_debias.linalg import (
    Iterate,
    Status,
    cg,
    debiased_cg,
    eigsh,
    relative_progress,
    spectral_density,
    trace,
)
from laplace_debias.operators import Dense, Diagonal


def logspace(low, high, n):
    return torch.logspace(low, high, n, dtype=torch.float64)


def scipy_cg(matrix, b, tol, preconditioner=None):
    """Solve with SciPy; return the solution and the number of products."""
    products = []
    operator = scipy.sparse.linalg.LinearOperator(
        matrix.shape, lambda v: products.append(1) or matrix.numpy() @ v, dtype=np.float64
    )
    x, info = scipy.sparse.linalg.cg(
        operator, b.numpy(), rtol=tol, atol=0.0, maxiter=10**4, M=preconditioner
    )
    assert info == 0
    return torch.from_numpy(x), len(products)


def test_solves_to_the_tolerance_in_the_norm_it_promises():
    M = with_eigenvalues(logspace(-3, 0, 40))
    b = randn(40)
    solution = cg(Counted(M), b, tol=1e-10)
    assert solution.status == "converged"
    assert (b - M @ solution.x).norm() <= 1.01e-10 * b.norm()
    assert_close(solution.x, torch.linalg.solve(M, b), rtol=1e-6, atol=1e-6)
    assert solution.residual_norms[-1] <= 1e-10 * b.norm() < solution.residual_norms[-2]


@pytest.mark.parametrize(
    "spread", [pytest.param("log", marks=pytest.mark.slow), "linear", "clustered"]
)
def test_condition_1e6_is_as_good_as_scipy_in_as_many_products(spread):
    ours = []
    theirs = []
    for seed in range(4):
        eigenvalues = {
            "log": logspace(-6, 0, 100),
            "linear": torch.linspace(1e-6, 1, 100, dtype=torch.float64),
            "clustered": torch.cat([logspace(-6, -5.9, 5), logspace(-0.1, 0, 95)]),
        }[spread]
        M = with_eigenvalues(eigenvalues, seed)
        b = randn(100, seed=seed)
        A = Counted(M)
        solution = cg(A, b, tol=1e-8, max_iter=10**4)
        assert solution.converged
        assert A.columns == solution.num_matvecs == solution.num_iterations
        x, products = scipy_cg(M, b, 1e-8)
        ours.append(A.columns)
        theirs.append(products)
        for result in (x, solution.x):
            assert (b - M @ result).norm() <= 1.1e-8 * b.norm()
    # Rounding makes single runs take 2 % more or less, the mean of 4 up to 1.5 %.
    assert sum(ours) <= 1.03 * sum(theirs)


def test_directions_are_normalised_conjugate_and_give_the_slopes_and_curvatures():
    M = with_eigenvalues(logspace(-1, 1, 12))
    b = randn(12)
    x0 = randn(12, seed=1)
    xs = []
    s = cg(
        Counted(M), b, max_iter=8, x0=x0, keep_directions=True, callback=lambda i: xs.append(i.x)
    )
    D = s.directions
    X = torch.stack(xs, dim=1)
    assert D.shape == (12, 8)
    assert X.shape == (12, 9)
    G = D.T @ M @ D
    assert_close(D.norm(dim=0), torch.ones(8).double())
    assert_close(G, torch.diag(G.diag()), atol=1e-9, rtol=0)
    gradients = M @ X - b[:, None]
    assert_close(s.curvatures, G.diag())
    assert_close(s.slopes, (D * gradients[:, :-1]).sum(0), atol=1e-12, rtol=1e-9)
    assert_close(s.step_sizes, -s.slopes / s.curvatures)
    assert_close(X[:, 1:], X[:, :-1] + s.step_sizes * D)
    assert_close(X[:, 0], x0)
    assert_close(s.residual_norms, gradients.norm(dim=0))
    assert_close(s.values, 0.5 * (X * (M @ X)).sum(0) - b @ X)
    assert_close(s.x, X[:, -1])


def test_columns_equal_vectors_and_stop_costing_once_converged():
    M = with_eigenvalues(logspace(-3, 0, 30))
    easy = torch.linalg.eigh(M).eigenvectors[:, 3]
    b = torch.stack([randn(30), easy, torch.zeros(30).double(), randn(30, seed=1)], dim=1)
    A = Counted(M)
    block = cg(A, b, tol=1e-9, keep_directions=True)
    assert block.statuses == (Status.CONVERGED,) * 4
    assert block.num_iterations[1:3].tolist() == [1, 0]
    assert block.num_matvecs == A.columns == int(block.num_iterations.sum())
    for j in range(4):
        alone = cg(Counted(M), b[:, j], tol=1e-9, keep_directions=True)
        assert_close(block.x[:, j], alone.x, rtol=1e-6, atol=1e-6)
        t = int(alone.num_iterations)
        assert_close(block.directions[:, :5, j][:, :t], alone.directions[:, :5])
    later_steps = block.step_sizes[1:, 1]
    assert_close(later_steps, torch.zeros_like(later_steps))
    assert block.slopes[1:, 1].isnan().all()


def test_a_preconditioner_is_applied_as_scipy_applies_it():
    scale = logspace(-2, 2, 60)
    M = scale[:, None] * with_eigenvalues(logspace(-1, 0, 60)) * scale
    b = randn(60)
    inverse = torch.diag(1 / M.diag())
    P = Counted(inverse)
    plain = cg(Counted(M), b, tol=1e-8)
    as_operator = cg(Counted(M), b, tol=1e-8, preconditioner=P)
    as_function = cg(Counted(M), b, tol=1e-8, preconditioner=lambda r: inverse @ r)
    x, products = scipy_cg(M, b, 1e-8, inverse.numpy())
    assert torch.equal(as_operator.x, as_function.x)
    assert as_operator.converged
    assert abs(as_operator.num_matvecs - products) <= 2
    assert as_operator.num_matvecs < plain.num_matvecs / 3
    assert P.columns == as_operator.num_matvecs
    assert_close(as_operator.x, x, rtol=1e-4, atol=1e-8)


def test_negative_curvature_is_found_with_its_direction():
    M = with_eigenvalues(torch.cat([logspace(0, 1, 9), torch.tensor([-0.5]).double()]))
    solution = cg(Counted(M), randn(10))
    assert solution.status is Status.NEGATIVE_CURVATURE
    assert not solution.converged
    u = solution.negative_direction
    assert_close(u.norm(), torch.ones(()).double())
    assert_close(u @ M @ u, solution.negative_curvature)
    assert solution.negative_curvature < 0
    assert "damping" in solution.message
    # The last iterate before it is the minimum over the directions so far.
    assert solution.values[-1] < 0
    assert len(solution.values) == solution.num_iterations + 1


def test_a_singular_operator_has_zero_curvature_where_there_is_no_solution():
    M = with_eigenvalues(torch.tensor([1.0, 2.0, 3.0, 0.0]).double())
    U = torch.linalg.eigh(M).eigenvectors
    solution = cg(Counted(M), randn(4), tol=1e-10)
    assert solution.status is Status.ZERO_CURVATURE
    assert_close((U[:, 0] @ solution.negative_direction).abs(), torch.ones(()).double())
    assert cg(Counted(M), M @ randn(4), tol=1e-10).converged
    assert cg(Counted(torch.zeros(4, 4).double()), randn(4)).status is Status.ZERO_CURVATURE


def test_each_column_stops_for_its_own_reason():
    M = torch.diag(torch.tensor([1.0, -1.0, 0.0, 4.0]).double())
    b = torch.eye(4).double()
    solution = cg(Counted(M), b)
    assert [status.value for status in solution.statuses] == [
        "converged",
        "negative_curvature",
        "zero_curvature",
        "converged",
    ]
    assert solution.status is Status.NEGATIVE_CURVATURE
    assert_close(solution.negative_direction, b * torch.tensor([0.0, 1.0, 1.0, 0.0]).double())
    assert solution.negative_curvature[1:3].tolist() == [-1.0, 0.0]
    assert solution.negative_curvature[::3].isnan().all()
    assert_close(solution.x, torch.diag(torch.tensor([1.0, 0.0, 0.0, 0.25]).double()))
    assert solution.message.count("\n") == 2
    assert "converged (2 of 4)" in solution.message


def test_a_product_that_is_not_finite_ends_with_the_last_finite_iterate():
    M = with_eigenvalues(logspace(-2, 0, 20))

    class Fails(Counted):
        def _matmat(self, matrix):
            product = super()._matmat(matrix)
            return product * (torch.nan if self.columns > 5 else 1)

    solution = cg(Fails(M), randn(20))
    assert solution.status is Status.BREAKDOWN
    assert torch.equal(solution.x, cg(Counted(M), randn(20), max_iter=5).x)
    assert cg(Fails(M), randn(20, 6), x0=randn(20, 6)).statuses == (Status.BREAKDOWN,) * 6


def test_a_preconditioner_that_is_not_positive_is_named():
    solution = cg(Counted(with_eigenvalues(logspace(-1, 0, 5))), randn(5), preconditioner=torch.neg)
    assert solution.status is Status.INDEFINITE_PRECONDITIONER


def test_a_preconditioner_that_gives_nan_is_a_breakdown():
    solution = cg(Dense(torch.eye(3)), torch.ones(3), preconditioner=lambda r: r * torch.nan)
    assert solution.status == "breakdown"
    assert "preconditioner" in solution.message
    assert solution.x.equal(torch.zeros(3))


def test_max_iter_and_the_start_are_respected():
    M = with_eigenvalues(logspace(-4, 0, 50))
    b = randn(50)
    short = cg(Counted(M), b, tol=1e-12, max_iter=7)
    assert short.status is Status.MAX_ITER
    assert short.num_iterations == 7
    assert "max_iter" in short.message
    exact = torch.linalg.solve(M, b)
    warm = cg(Counted(M), b, tol=1e-6, x0=exact)
    assert warm.converged
    assert warm.num_iterations == 0
    assert warm.num_matvecs == 1
    assert_close(cg(Counted(M), 0 * b, x0=exact).x, 0 * b)


def test_a_rule_stops_one_column_and_not_the_other():
    M = with_eigenvalues(logspace(-4, 0, 50))
    b = torch.stack([randn(50), randn(50, seed=1)], dim=1)
    iterations = []

    def rule(iterate):
        iterations.append(iterate.iteration)
        assert iterate.x.shape == b.shape
        return torch.tensor([iterate.iteration == 3, False])

    solution = cg(Counted(M), b, max_iter=6, stop=rule)
    assert iterations == [1, 2, 3, 4, 5, 6]
    assert solution.statuses == (Status.STOPPED, Status.MAX_ITER)
    assert solution.num_iterations.tolist() == [3, 6]
    assert_close(solution.x[:, 0], cg(Counted(M), b[:, 0], max_iter=3).x)


def test_martens_rule_stops_at_the_first_iteration_that_meets_it():
    M = with_eigenvalues(logspace(-4, 0, 80))
    b = randn(80)
    stopped = cg(Counted(M), b, tol=0.0, stop=relative_progress(1e-3, 0.1, 4))
    values = cg(Counted(M), b, tol=0.0, max_iter=200).values.tolist()
    expected = next(
        t
        for t in range(1, 200)
        for w in [max(4, int(np.ceil(0.1 * t)))]
        if t > w and values[t] < 0 and (values[t] - values[t - w]) / values[t] < w * 1e-3
    )
    assert stopped.status is Status.STOPPED
    assert stopped.num_iterations == expected > 4


def test_iterates_have_the_directions_that_are_kept():
    M = with_eigenvalues(logspace(-1, 0, 10))
    b = randn(10)
    xs = []
    directions = []

    def callback(iterate: Iterate):
        xs.append(iterate.x)
        if iterate.direction is not None:
            directions.append(iterate.direction)
        assert len(iterate.values) == iterate.iteration + 1 == len(iterate.values[:])
        assert all(value.ndim == 0 for value in iterate.slopes)

    solution = cg(Counted(M), b, keep_directions=True, callback=callback)
    assert torch.equal(xs[-1], solution.x)
    assert torch.equal(torch.stack(directions, dim=1), solution.directions)
    assert cg(Counted(M), b).directions is None


def test_progress_shows_a_bar(capsys):
    cg(Counted(with_eigenvalues(logspace(-1, 0, 5))), randn(5), progress=True)
    assert "cg" in capsys.readouterr().err
    cg(Counted(with_eigenvalues(logspace(-1, 0, 5))), randn(5))
    assert capsys.readouterr().err == ""


def test_single_precision_stays_single_and_is_as_good_as_it_can_be():
    M = with_eigenvalues(logspace(-2, 0, 50)).float()
    b = randn(50).float()
    solution = cg(Counted(M), b, tol=1e-5)
    assert solution.x.dtype == solution.residual_norms.dtype == torch.float32
    assert solution.converged
    exact = torch.linalg.solve(M.double(), b.double())
    assert (solution.x - exact).norm() <= 1e-3 * exact.norm()


# ------------------------------------------------------------------- debiased


def pair(n=30, k=None):
    shape = (n,) if k is None else (n, k)
    A = with_eigenvalues(logspace(-2, 0, n), 0)
    A2 = with_eigenvalues(logspace(-2, 0, n), 1)
    return A, A2, randn(*shape), randn(*shape, seed=1)


def naive(A2, b2, directions, x0):
    """Eq. 8 written out, with two products per iteration and a new gradient each time."""
    x = x0
    trajectory = [x0]
    steps = []
    for d in directions.T:
        slope = d @ (A2 @ x - b2)
        curvature = d @ (A2 @ d)
        steps.append(-slope / curvature)
        x = x + steps[-1] * d
        trajectory.append(x)
    return torch.stack(trajectory, dim=1), torch.stack(steps)


@pytest.mark.parametrize("start", [False, True])
def test_the_recursion_of_the_gradient_equals_two_products(start):
    A, A2, b, b2 = pair()
    x0 = randn(30, seed=5) if start else None
    first, second = Counted(A), Counted(A2)
    xs = []
    options = {"max_iter": 15, "x0": x0, "keep_directions": True}
    solution = debiased_cg(first, second, b, b2, callback=lambda _, d: xs.append(d.x), **options)
    zero = torch.zeros(30).double()
    trajectory, steps = naive(A2, b2, solution.directions, zero if x0 is None else x0)
    assert_close(torch.stack(xs, dim=1), trajectory, rtol=1e-10, atol=1e-10)
    assert_close(solution.debiased.step_sizes, steps, rtol=1e-9, atol=1e-10)
    gradients = A2 @ trajectory - b2[:, None]
    assert_close(solution.debiased.residual_norms, gradients.norm(dim=0), rtol=1e-10, atol=0)
    # One extra product an iteration, and one for a start that is not zero.
    assert second.columns == first.columns == 15 + start
    assert solution.num_matvecs == 30 + 2 * start


def test_the_single_trajectory_beside_it_is_that_of_cg():
    A, A2, b, b2 = pair()
    solution = debiased_cg(Counted(A), Counted(A2), b, b2, max_iter=12)
    alone = cg(Counted(A), b, max_iter=12)
    assert torch.equal(solution.single.x, alone.x)
    assert torch.equal(solution.single.step_sizes, alone.step_sizes)
    assert solution.single.status is Status.MAX_ITER
    assert solution.debiased.status is Status.EXHAUSTED
    assert not torch.allclose(solution.debiased.step_sizes, solution.single.step_sizes)


@pytest.mark.parametrize("k", [None, 3])
def test_on_one_quadratic_it_is_cg_itself(k):
    A, _, b, _ = pair(k=k)
    solution = debiased_cg(Counted(A), Counted(A), b, b, tol=1e-9)
    alone = cg(Counted(A), b, tol=1e-9)
    assert torch.equal(solution.x, alone.x)
    assert torch.equal(solution.debiased.values, alone.values)
    assert solution.debiased.converged
    assert solution.single.converged


def test_rules_and_callbacks_see_both_trajectories():
    A, A2, b, b2 = pair()
    iterates = []
    solution = debiased_cg(
        Counted(A),
        Counted(A2),
        b,
        b2,
        callback=lambda single, debiased: iterates.append((single.x, debiased.x)),
        stop=lambda single, debiased: debiased.iteration == 4 and single.values[-1] < 0,
    )
    assert solution.single.status is solution.debiased.status is Status.STOPPED
    assert len(iterates) == 5
    assert torch.equal(iterates[-1][0], solution.single.x)
    assert torch.equal(iterates[-1][1], solution.debiased.x)


def test_it_ends_where_either_quadratic_has_no_curvature():
    A, A2, b, b2 = pair(10)
    bad = with_eigenvalues(torch.cat([logspace(-1, 0, 9), torch.tensor([-5.0]).double()]), 2)
    first = debiased_cg(Counted(bad), Counted(A2), b, b2)
    assert first.single.status is Status.NEGATIVE_CURVATURE
    assert first.debiased.status is Status.EXHAUSTED
    assert first.single.num_iterations == first.debiased.num_iterations
    second = debiased_cg(Counted(A), Counted(bad), b, b2)
    assert second.debiased.status is Status.NEGATIVE_CURVATURE
    assert second.single.status is Status.STOPPED
    u = second.debiased.negative_direction
    assert u @ bad @ u < 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"b": torch.ones(4).double()},
            r"`b` has shape \(4,\), but the operator has shape \(3, 3\)",
        ),
        ({"b": torch.ones(3)}, "`b` is torch.float32 on cpu, but the operator is torch.float64"),
        ({"b": torch.tensor([1.0, torch.nan, 0.0]).double()}, "`b` contains NaN or Inf"),
        ({"b": torch.ones(3, 1, 1).double()}, "Pass a tensor"),
        ({"x0": torch.ones(3, 2).double()}, "of the same shape"),
        ({"A": Counted(torch.ones(3, 2).double())}, "the quadratic needs a square operator"),
        ({"tol": -1.0}, "`tol` is"),
        ({"tol": float("nan")}, "`tol` is"),
        ({"max_iter": 0}, "max_iter must be at least 1"),
        ({"preconditioner": lambda r: r[:1]}, "The preconditioner maps"),
    ],
)
def test_bad_input_is_named_before_any_product(unchecked, change, message):
    operator = change.get("A", Counted(torch.eye(3).double()))
    arguments = {"A": operator, "b": torch.ones(3).double(), **change}
    with pytest.raises(ValueError, match=message):
        cg(**arguments)
    assert operator.columns == 0


def test_two_systems_must_fit_each_other(unchecked):
    A = Counted(torch.eye(3).double())
    b = torch.ones(3).double()
    different_size = Counted(torch.eye(4).double()), torch.ones(4).double()
    different_dtype = Counted(torch.eye(3)), b.float()
    for A2, b2 in (different_size, different_dtype):
        with pytest.raises(
            ValueError, match="two linear systems must have the same shape, dtype and device, got"
        ):
            debiased_cg(A, A2, b, b2)
    with pytest.raises(ValueError, match="must be positive"):
        relative_progress(epsilon=0.0)


@pytest.mark.parametrize("size", [5, 500])
def test_results_print_without_their_tensors(size):
    """The text is one line for any size of the problem, unlike that of a dataclass."""
    A = Dense(torch.diag(torch.linspace(1, 2, size, dtype=torch.float64)))
    b = torch.ones(size, dtype=torch.float64)
    results = [
        cg(A, b),
        cg(A, torch.stack([b, 2 * b], 1)),
        debiased_cg(A, A, b, b),
        eigsh(A, k=3),
        spectral_density(A),
        trace(A),
    ]
    for result in results:
        text = repr(result)
        assert text.startswith(f"{type(result).__name__}(")
        assert "tensor" not in text
        assert "\n" not in text
        assert len(text) < 800
    assert f"x=[{size}] 1 … 0.5" in repr(results[0])
    assert "statuses=CONVERGED" in repr(results[1])
    assert "values=[3] 2 … " in repr(results[3])


@pytest.mark.parametrize("scale", [1e-24, 1e-18, 1e18, 1e24])
def test_single_precision_at_every_scale_of_the_right_hand_side(scale):
    # A power of two changes no digit.
    scale = 2.0 ** round(np.log2(scale))
    M = with_eigenvalues(logspace(-2, 0, 30))
    b = randn(30)
    A = Dense(M.float())
    b = b.float()
    start = randn(30).float()
    for x0 in (None, start):
        plain = cg(A, b, x0=x0)
        scaled = cg(A, scale * b, x0=None if x0 is None else scale * x0)
        assert scaled.status == "converged"
        assert_close(scaled.x, scale * plain.x, rtol=0, atol=0)
        assert_close(scaled.residual_norms, scale * plain.residual_norms, rtol=0, atol=0)
        assert_close(scaled.step_sizes, scale * plain.step_sizes, rtol=0, atol=0)
        assert_close(scaled.slopes, scale * plain.slopes, rtol=0, atol=0)


@pytest.mark.parametrize("is_preconditioned", [False, True])
@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e20, 1e25])
def test_single_precision_at_every_scale_of_the_operator(scale, is_preconditioned):
    M = (scale * with_eigenvalues(logspace(-2, 0, 30))).float()
    b = randn(30).float()
    preconditioner = Dense((1 / M.diagonal()).diag()) if is_preconditioned else None
    truth = torch.linalg.solve(M.double(), b.double())
    plain = cg(Dense(M), b, preconditioner=preconditioner)
    debiased = debiased_cg(Dense(M), Dense(M), b, b, preconditioner=preconditioner).debiased
    for solution in (plain, debiased):
        assert solution.converged
        assert (solution.x.double() - truth).norm() < 1e-4 * truth.norm()
        assert (solution.curvatures > 0.009 * scale).all()
        assert (solution.curvatures < 1.001 * scale).all()


def test_right_hand_sides_of_different_scales_do_not_interfere():
    M = with_eigenvalues(logspace(-2, 0, 30))
    b = randn(30, 3).float()
    b = b * torch.tensor([1e-24, 1.0, 1e24])
    solution = cg(Dense(M.float()), b)
    truth = torch.linalg.solve(M.float().double(), b.double())
    errors = (solution.x.double() - truth).norm(dim=0) / truth.norm(dim=0)
    assert solution.converged
    assert errors.max() < 1e-4


def test_a_right_hand_side_near_the_largest_number_of_its_dtype_is_no_solution_of_nan():
    A = Diagonal(torch.tensor([1.0, 2.0, 3.0]))
    b = torch.full((3,), 1.8e38)
    solution = cg(A, b)
    assert_close(solution.x, b / torch.tensor([1.0, 2.0, 3.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-19, 1e-25, 1e-38])
def test_a_start_far_above_the_right_hand_side_does_not_overflow(size):
    values = torch.tensor([1.0, 2.0, 3.0])
    solution = cg(Diagonal(values), torch.full((3,), size), x0=torch.full((3,), 10.0), max_iter=50)
    assert solution.x.isfinite().all()
    assert solution.x.abs().max() < 1e-5
