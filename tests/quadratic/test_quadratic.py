"""The quadratic of a loss: slopes, curvatures, cuts, Newton steps; the equations on its bias."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import randn
from spectra import Counted, with_eigenvalues
from torch.testing import assert_close

from laplace_debias.linalg import cg
from laplace_debias.operators import Dense
from laplace_debias.quadratic import Cut, Quadratic

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def quadratic(n=9, seed=0, eigenvalues=None):
    if eigenvalues is None:
        eigenvalues = torch.logspace(-1, 1, n, dtype=torch.float64)
    H = with_eigenvalues(eigenvalues, seed)
    value = randn(1, seed=seed)[0]
    g = randn(n, seed=seed + 1)
    theta0 = randn(n, seed=seed + 2)
    return Quadratic(value, g, Counted(H), theta0), H


def value_of(q, H, theta):
    """The value of Eq. 2, written out."""
    step = theta - q.position
    return q.value + q.gradient @ step + 0.5 * step @ H @ step


def test_value_and_gradient_anywhere_are_those_of_the_formula():
    q, H = quadratic()
    thetas = randn(9, 4, seed=7)
    for j in range(4):
        theta = thetas[:, j].clone().requires_grad_()
        value = value_of(q, H, theta)
        (gradient,) = torch.autograd.grad(value, theta)
        assert_close(q(thetas[:, j]), value.detach(), **EXACT)
        assert_close(q(thetas)[j], value.detach(), **EXACT)
        assert_close(q.gradient_at(thetas)[:, j], gradient, **EXACT)
        assert_close(q.gradient_at(thetas[:, j]), gradient, **EXACT)


def test_slopes_and_curvatures_are_derivatives_along_unit_vectors():
    q, H = quadratic()
    D = 3 * randn(9, 5, seed=4)
    X = randn(9, 5, seed=5)
    for j in range(5):
        unit = D[:, j] / D[:, j].norm()

        def along(tau, origin, unit=unit):
            return value_of(q, H, origin + tau * unit)

        zero = torch.zeros(()).double()
        for origin, slopes in (
            (q.position, q.slope(D)),
            (X[:, 0], q.slope(D, at=X[:, 0])),
            (X[:, j], q.slope(D, at=X)),
        ):
            first = torch.func.grad(along)(zero, origin)
            second = torch.func.grad(torch.func.grad(along))(zero, origin)
            assert_close(slopes[j], first, **EXACT)
            assert_close(q.curvature(D)[j], second, **EXACT)
        assert_close(q.slope(D[:, j], at=X[:, j]), q.slope(D, at=X)[j], **EXACT)
        assert_close(q.curvature(D[:, j]), q.curvature(D)[j], **EXACT)


@pytest.mark.parametrize("length", [1e-25, 1e-22, 1e20, 1e25])
def test_directions_of_every_length_in_single_precision(length):
    q, _ = quadratic()
    single = Quadratic(
        q.value.float(), q.gradient.float(), Dense(q.matrix.matrix.float()), q.position.float()
    )
    directions = randn(9, 2, seed=5)
    short_or_long = (length * directions).float()
    assert_close(single.slope(short_or_long).double(), q.slope(directions), rtol=1e-5, atol=1e-5)
    curvatures = single.curvature(short_or_long[:, 0]).double()
    assert_close(curvatures, q.curvature(directions[:, 0]), rtol=1e-5, atol=0)


def test_products_are_as_few_as_promised():
    q, _ = quadratic()
    D = randn(9, 5, seed=4)
    X = randn(9, 5, seed=5)
    for call, products in (
        (lambda: q.slope(D), 0),
        (lambda: q.slope(D, at=X[:, 0]), 1),
        (lambda: q.slope(D, at=X), 5),
        (lambda: q.curvature(D), 5),
        (lambda: q.cut(D[:, :2])(torch.linspace(-1, 1, 50).double(), torch.zeros(50)), 2),
        (lambda: q.cut(D[:, :2], at=X[:, 0]), 3),
    ):
        columns_before = q.matrix.columns
        call()
        assert q.matrix.columns - columns_before == products


def test_cuts_are_the_quadratic_on_lines_planes_and_beyond():
    q, H = quadratic()
    V = 2 * randn(9, 3, seed=3)
    a = torch.linspace(-2, 1, 4).double()
    b = torch.linspace(-1, 3, 5).double()
    for point in (None, randn(9, seed=8)):
        origin = q.position if point is None else point
        line = q.cut(V[:, 0], point)
        plane = q.cut(V[:, :2], point)
        space = q.cut(V, point)
        grid = plane(a[:, None], b)
        assert grid.shape == (4, 5)
        for i in range(4):
            assert_close(line(a)[i], value_of(q, H, origin + a[i] * V[:, 0]), **EXACT)
            for j in range(5):
                theta = origin + V[:, :2] @ torch.stack([a[i], b[j]])
                assert_close(grid[i, j], value_of(q, H, theta), **EXACT)
        assert_close(space(a, a, a)[2], value_of(q, H, origin + V @ a[[2, 2, 2]]), **EXACT)
        lowest = plane.minimizer()
        assert (plane(*lowest) < grid).all()
        slopes = q.slope(V[:, :2], at=origin + V[:, :2] @ lowest)
        assert_close(slopes, torch.zeros(2).double(), **EXACT)


def test_a_plane_is_six_numbers():
    q, H = quadratic()
    V = torch.linalg.eigh(H).eigenvectors[:, -2:]
    cut = q.cut(V)
    assert_close(cut.curvatures, torch.diag(torch.linalg.eigvalsh(H)[-2:]), **EXACT)
    assert cut.value == q.value
    assert_close(cut.slopes, V.T @ q.gradient, **EXACT)
    expected = q(q.position + 0.5 * V[:, 0] - 2 * V[:, 1])
    assert_close(cut(0.5, -2), expected, **EXACT)
    assert_close(cut(torch.tensor([1, 0]), 0)[1], q.value, **EXACT)


@pytest.mark.parametrize("method", ["cg", "exact"])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_newton_steps_end_at_the_damped_minimum(method, damping):
    q, H = quadratic()
    options = {"tol": 1e-12} if method == "cg" else {}
    step = q.newton_step(method, damping=damping, **options)
    exact = -torch.linalg.solve(H + damping * torch.eye(9).double(), q.gradient)
    assert_close(step, exact, **EXACT)
    if damping == 0:
        assert q.gradient_at(q.position + step).norm() < 1e-10


def test_a_truncated_newton_step_is_that_of_cg():
    q, _ = quadratic()
    inverse = torch.diag(1 / q.matrix.matrix.diag())
    for options in ({"max_iter": 3}, {"stop": lambda iterate: iterate.iteration == 3}):
        expected = cg(q.matrix, -q.gradient, max_iter=3).x
        assert torch.equal(q.newton_step(**options), expected)
    assert_close(
        q.newton_step(max_iter=3, preconditioner=lambda r: inverse @ r),
        cg(q.matrix, -q.gradient, max_iter=3, preconditioner=lambda r: inverse @ r).x,
    )


def test_the_regulariser_acts_where_the_mask_says():
    q, H = quadratic()
    mask = torch.arange(9) % 3 > 0
    regularized = q.regularized(0.4, on=mask)
    theta = randn(9, seed=6)
    expected = value_of(q, H, theta) + 0.2 * theta[mask].square().sum()
    assert_close(regularized(theta), expected, **EXACT)
    assert_close(regularized.gradient, q.gradient + 0.4 * mask * q.position, **EXACT)
    assert_close(regularized.matrix.to_dense(), H + 0.4 * torch.diag(mask.double()), **EXACT)
    assert_close(regularized.matrix.T.to_dense(), H + 0.4 * torch.diag(mask.double()), **EXACT)
    everywhere = q.regularized(0.4)(theta)
    assert_close(everywhere, value_of(q, H, theta) + 0.2 * theta.square().sum(), **EXACT)


# ------------------------------------------------------- equations on the bias


def test_the_mean_over_a_partition_is_the_full_batch():
    """Eq. 5, for slopes anywhere and for curvatures."""
    theta0 = quadratic(seed=0)[0].position
    batches = []
    hessians = []
    for seed in range(4):
        q, H = quadratic(seed=seed)
        batches.append(Quadratic(q.value, q.gradient, q.matrix, theta0))
        hessians.append(H)
    full = Quadratic(
        torch.stack([q.value for q in batches]).mean(),
        torch.stack([q.gradient for q in batches]).mean(0),
        Counted(torch.stack(hessians).mean(0)),
        theta0,
    )
    D = randn(9, 6, seed=9)
    theta = randn(9, seed=10)
    slopes = torch.stack([q.slope(D, at=theta) for q in batches])
    curvatures = torch.stack([q.curvature(D) for q in batches])
    assert_close(slopes.mean(0), full.slope(D, at=theta), **EXACT)
    assert_close(curvatures.mean(0), full.curvature(D), **EXACT)


spectra = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8)


@settings(max_examples=40, deadline=None)
@given(spectra, st.integers(0, 10**6), st.integers(0, 10**6))
def test_curvatures_on_another_batch_are_means_of_its_eigenvalues(spectrum, seed, seed2):
    """Eq. 6, 7 and 20 for equal spectra in any two eigenbases."""
    eigenvalues = torch.tensor(sorted(spectrum)).double()
    n = len(eigenvalues)
    top = eigenvalues[-1]
    H = with_eigenvalues(eigenvalues, seed)
    H2 = with_eigenvalues(eigenvalues, seed2 + 10**7)
    values, U = torch.linalg.eigh(H)
    values2, U2 = torch.linalg.eigh(H2)
    zero = torch.zeros(n).double()
    q, q2 = (Quadratic(zero[0], zero, Counted(M), zero) for M in (H, H2))
    W = (U.T @ U2) ** 2
    scaled = {"rtol": 0, "atol": 1e-10 * float(top)}
    assert_close(W.sum(0), torch.ones(n).double(), **EXACT)
    assert_close(W.sum(1), torch.ones(n).double(), **EXACT)
    assert_close(q.curvature(U), values, **scaled)
    curvatures = q2.curvature(U)
    assert_close(curvatures, W @ values2, **scaled)
    assert curvatures[-1] <= top * (1 + 1e-12)
    assert curvatures[0] >= eigenvalues[0] - 1e-12 * top
    # Strict, by at least the overlap that is lost times the gap to the next eigenvalue.
    assert top - curvatures[-1] >= (1 - W[-1, -1]) * (top - eigenvalues[-2]) - 1e-10 * top
    assert curvatures[0] - eigenvalues[0] >= (1 - W[0, 0]) * (eigenvalues[1] - eigenvalues[0]) - (
        1e-10 * top
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 20), st.floats(1e-2, 1e2))
def test_the_slope_along_the_negative_gradient_is_steepest_on_its_own_batch(seed, n, norm):
    """Eq. 19: the bias is ‖g‖(1 − cos) for gradients of equal norm."""
    g, g2 = (
        norm * torch.nn.functional.normalize(randn(n, seed=s), dim=0) for s in (seed, -seed - 1)
    )
    zero = torch.zeros(n).double()
    identity = Counted(torch.eye(n).double())
    q, q2 = (Quadratic(zero[0], gradient, identity, zero) for gradient in (g, g2))
    cosine = torch.nn.functional.cosine_similarity(g, g2, dim=0)
    assert_close(q.slope(-g), torch.tensor(-norm, dtype=torch.float64), rtol=1e-10, atol=0)
    assert_close(q2.slope(-g), -norm * cosine, rtol=1e-8, atol=1e-10 * norm)
    difference = q2.slope(-g) - q.slope(-g)
    assert_close(difference, norm * (1 - cosine), rtol=1e-8, atol=1e-10 * norm)


# ------------------------------------------------------------------ bad input


def test_bad_input_is_named(unchecked):
    q, _ = quadratic()
    g = q.gradient
    theta = q.position
    with pytest.raises(ValueError, match="do not match"):
        Quadratic(q.value, g[:4], q.matrix, theta)
    with pytest.raises(ValueError, match="have the same dtype"):
        Quadratic(q.value, g.float(), q.matrix, theta)
    for length in (0.0, torch.nan):
        one_wrong = torch.tensor([1.0, length]).double() * randn(9, 2)
        with pytest.raises(ValueError, match="contains NaN or Inf"):
            q.slope(one_wrong)
    with pytest.raises(ValueError, match=r"direction has shape \(4,\)"):
        q.curvature(torch.ones(4).double())
    with pytest.raises(ValueError, match="one position"):
        q.slope(g, at=torch.ones(9, 2).double())
    with pytest.raises(ValueError, match="one for each direction"):
        q.cut(randn(9, 2))(torch.zeros(3))
    with pytest.raises(ValueError, match="at least 0"):
        q.regularized(-1.0)
    with pytest.raises(ValueError, match="`on` has shape"):
        q.regularized(1.0, on=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="Unknown method 'lu'"):
        q.newton_step("lu")
    with pytest.raises(ValueError, match="`damping` is"):
        q.newton_step(damping=-1.0)
    with pytest.raises(ValueError, match=r"apply only to `method=.cg"):
        q.newton_step("exact", max_iter=3)


def test_a_quadratic_without_minimum_says_so():
    downhill = torch.cat([torch.ones(4), -torch.ones(1)]).double()
    q, _ = quadratic(5, eigenvalues=downhill)
    for method in ("cg", "exact"):
        with pytest.raises(ValueError, match="has no minimum"):
            q.newton_step(method)
        assert q.newton_step(method, damping=2.0).isfinite().all()
    with pytest.raises(ValueError, match="smallest curvature is -1"):
        Cut(torch.zeros(()), torch.ones(2), torch.diag(torch.tensor([1.0, -1.0]))).minimizer()
    with pytest.raises(ValueError, match="positive definite approximation"):
        q.newton_step(preconditioner=torch.neg)


def test_autocast_is_refused():
    torch.manual_seed(0)
    g = torch.randn(6)
    theta = torch.randn(6)
    directions = torch.randn(6, 2)
    matrix = Dense(torch.eye(6))
    q = Quadratic(torch.zeros(()), g, matrix, theta)
    cut = q.cut(directions)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: q.slope(directions),
            lambda: q.curvature(directions),
            lambda: q.cut(directions),
            lambda: cut(0.5, 0.25),
            lambda: q.regularized(0.1),
        ):
            with pytest.raises(RuntimeError, match="autocast"):
                call()


def test_a_quadratic_is_shown_in_a_line_however_many_parameters_it_has():
    q, _ = quadratic(2000, eigenvalues=torch.linspace(1, 2, 2000, dtype=torch.float64))
    for shown in (repr(q), repr(q.cut(randn(2000, 2)))):
        assert "\n" not in shown
        assert len(shown) < 300
    assert f"value={q.value:.4g}, gradient=[2000]" in repr(q)
