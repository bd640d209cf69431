"""Square roots and solutions against dense float64 ones."""

import numpy as np
import pytest
import torch
from matrices import Opaque, randn
from spectra import Matrix, generator, orthogonal, symmetric, uniform

from laplace_debias.linalg import inverse, solve, sqrt
from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    ParameterLayout,
    assume,
)

SIZE = 60
B = torch.randn(SIZE, 3, dtype=torch.float64, generator=generator(2))
LAYOUT = ParameterLayout(("weight", "bias"), ((5, 10), (10,)))
SPECTRA = {
    "positive": 0.5 + uniform(SIZE),
    "decades": 10 ** torch.linspace(-6, 2, SIZE, dtype=torch.float64),
    "low rank": torch.cat([uniform(5), torch.zeros(SIZE - 5)]),
    "clustered": torch.tensor([1.0, 2.0, 3.0]).double().repeat(SIZE // 3),
    "zero": torch.zeros(SIZE).double(),
}


def root(values, seed=0):
    Q = orthogonal(len(values), seed)
    return (Q * values.sqrt()) @ Q.T


@pytest.mark.parametrize("name", SPECTRA)
def test_roots_equal_dense_ones(name):
    A = symmetric(SPECTRA[name])
    R = sqrt(A, tol=1e-10)
    expected = root(SPECTRA[name])
    torch.testing.assert_close(R @ B, expected @ B, rtol=0, atol=1e-7)
    torch.testing.assert_close(R.T @ B[:, 0], expected @ B[:, 0], rtol=0, atol=1e-7)
    torch.testing.assert_close(R @ (R @ B), A.matrix @ B, rtol=0, atol=1e-6)
    assert R.is_symmetric
    assert R.is_positive_semidefinite
    np.testing.assert_allclose(R.to_scipy() @ B.numpy(), expected @ B, rtol=0, atol=1e-7)
    assert not (R @ torch.zeros_like(B)).any()


def test_the_tolerance_bounds_the_error_and_saves_products():
    values = torch.linspace(1e-3, 1, 500, dtype=torch.float64)
    expected = root(values) @ torch.ones(500, dtype=torch.float64)
    spent = []
    for tol in (1e-1, 1e-2, 1e-4, 1e-6):
        A = symmetric(values)
        product = sqrt(A, tol=tol) @ torch.ones(500, dtype=torch.float64)
        assert (product - expected).norm() <= tol * expected.norm()
        spent.append(A.columns)
    assert spent == sorted(set(spent))
    assert spent[-1] < 200


def test_an_end_before_the_tolerance_is_told_with_a_remedy():
    A = symmetric(10 ** torch.linspace(-8, 0, 300, dtype=torch.float64))
    with pytest.warns(RuntimeWarning, match="after 7 Lanczos steps.*raise `max_iter`"):
        sqrt(A, tol=1e-8, max_iter=7) @ torch.ones(300, dtype=torch.float64)
    assert A.columns == 7


def test_indefinite_and_asymmetric_operators_have_no_root():
    with pytest.raises(ValueError, match=r"Ritz value -.*positive semi-definite.*Identity"):
        sqrt(symmetric(torch.linspace(-0.5, 1, SIZE))) @ B
    with pytest.raises(ValueError, match="not symmetric"):
        sqrt(CASES["lsmr"]) @ B
    with pytest.raises(ValueError, match="square operator"):
        sqrt(Matrix(torch.ones(3, 2)))
    with pytest.raises(ValueError, match="`tol` is 0"):
        sqrt(symmetric(SPECTRA["positive"]), tol=0.0)
    with pytest.raises(ValueError, match="`max_iter` is 0"):
        sqrt(symmetric(SPECTRA["positive"]), max_iter=0)
    with pytest.raises(ValueError, match="has the eigenvalue"):
        sqrt(Diagonal(torch.tensor([1.0, -1.0])))


def test_single_precision_stays_single():
    A = Matrix(symmetric(SPECTRA["decades"]).matrix.float(), is_positive_semidefinite=True)
    product = sqrt(A, tol=1e-5) @ B.float()
    assert product.dtype == torch.float32
    expected = (root(SPECTRA["decades"]) @ B).float()
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-3)


def test_structured_operators_have_structured_roots():
    A = EigenKronecker(orthogonal(6), orthogonal(10), uniform(SIZE).reshape(6, 10))
    R = sqrt(A + 0.1 * Identity(SIZE))
    assert isinstance(R, EigenKronecker)
    torch.testing.assert_close(R @ (R @ B), A @ B + 0.1 * B)


CASES = {
    "cg": symmetric(SPECTRA["positive"], is_positive_semidefinite=True),
    "lsmr": Matrix(randn(SIZE, SIZE) / SIZE**0.5 + 2 * torch.eye(SIZE)),
    "dense": Dense(randn(SIZE, SIZE) + 10 * torch.eye(SIZE)),
    "eigen-kronecker": EigenKronecker(None, None, 1 + uniform(SIZE).reshape(6, 10)),
    "product": Dense(randn(SIZE, SIZE) + 10 * torch.eye(SIZE)) @ Diagonal(1 + uniform(SIZE)),
}


@pytest.mark.parametrize("name", CASES)
def test_solutions_equal_dense_ones(name):
    A = CASES[name]
    options = {"tol": 1e-13} if name in ("cg", "lsmr") else {}
    expected = torch.linalg.solve(A.to_dense(), B)
    torch.testing.assert_close(solve(A, B, **options), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(solve(A, B[:, 0], **options), expected[:, 0], rtol=0, atol=1e-9)


def test_solutions_by_a_named_method_and_with_its_options():
    A = CASES["cg"]
    expected = torch.linalg.solve(A.matrix, B)
    series = solve(A, B, "neumann", num_terms=200)
    torch.testing.assert_close(series, expected, rtol=0, atol=1e-9)
    damped = torch.linalg.solve(A.matrix @ A.matrix + 0.25 * torch.eye(SIZE), A.matrix @ B)
    torch.testing.assert_close(
        solve(A, B, "lsmr", damping=0.5, tol=1e-13), damped, rtol=0, atol=1e-9
    )
    wide = Matrix(randn(20, 40))
    right = randn(20)
    torch.testing.assert_close(
        solve(wide, right, tol=1e-13), torch.linalg.pinv(wide.matrix) @ right, rtol=0, atol=1e-9
    )
    with pytest.raises(ValueError, match="no option of method='cg'"):
        solve(A, B, "cg", damping=0.5)
    with pytest.warns(RuntimeWarning, match="inverse by cg.*max_iter"):
        solve(A, B, tol=1e-13, max_iter=1)


def test_bad_systems_are_refused():
    singular = Diagonal(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="singular"):
        solve(singular, torch.ones(2))
    for wrong in (B[:10], B.float(), B * torch.nan):
        for A in (CASES["cg"], CASES["dense"]):
            with pytest.raises(ValueError, match="`b`"):
                solve(A, wrong)


def test_parameters_go_into_inverses_roots_and_solutions():
    matrix = symmetric(SPECTRA["positive"]).matrix
    A = assume(Opaque(matrix, LAYOUT), symmetric=True, positive_semidefinite=True)
    named = LAYOUT.unflatten(B[:, 0])
    expected = torch.linalg.solve(matrix, B[:, 0])
    for product in (
        inverse(A, tol=1e-12) @ named,
        inverse(A + 0 * Identity(SIZE), tol=1e-12) @ named,
        solve(A, named, tol=1e-12),
    ):
        assert list(product) == list(LAYOUT.names)
        torch.testing.assert_close(LAYOUT.flatten(product), expected, rtol=0, atol=1e-9)
    half = sqrt(A, tol=1e-10) @ named
    torch.testing.assert_close(
        LAYOUT.flatten(half), root(SPECTRA["positive"]) @ B[:, 0], rtol=0, atol=1e-7
    )
    # Of a Jacobian, the parameters are what comes out.
    J = Opaque(randn(20, SIZE), LAYOUT)
    assert inverse(J).layout is None
    assert inverse(J).T.layout == LAYOUT
    product = inverse(J, tol=1e-13).T @ named
    torch.testing.assert_close(product, torch.linalg.pinv(J.matrix).T @ B[:, 0])


def test_a_preconditioner_reaches_the_method_that_auto_chooses():
    A = symmetric(SPECTRA["decades"] + 1e-3, is_positive_semidefinite=True)
    exact = Dense(torch.linalg.inv(A.matrix))
    inverse(A, tol=1e-6, preconditioner=exact) @ B[:, 0]
    with_it, A.columns = A.columns, 0
    inverse(A, tol=1e-6) @ B[:, 0]
    assert with_it < A.columns / 4
    with pytest.raises(ValueError, match="method='auto' is 'lsmr', which takes no `precond"):
        inverse(CASES["lsmr"], preconditioner=exact)
    assert isinstance(inverse(Diagonal(B[:, 0]), preconditioner=exact), Diagonal)


def test_blocks_take_in_a_diagonal_and_stay_invertible():
    blocks = {"a": Dense(randn(2, 2) + 3 * torch.eye(2)), "b": Diagonal(1 + uniform(3))}
    A = BlockDiagonal({**blocks, "c": Identity(2)})
    d = Diagonal(1 + uniform(7))
    for total in (A + d, d + A):
        assert isinstance(total, BlockDiagonal)
        expected = A.to_dense() + d.values.diag()
        torch.testing.assert_close(total.to_dense(), expected)
        torch.testing.assert_close(inverse(total, "exact").to_dense(), expected.inverse())


def test_blocks_without_a_dtype_take_that_of_the_others():
    A = BlockDiagonal({"a": Identity(2), "b": Dense(randn(2, 2)), "c": 2 * Identity(1)})
    assert A.dtype == torch.float64
    assert (A @ torch.ones(5, dtype=torch.float64)).dtype == torch.float64
    assert A.blocks["c"].dtype == torch.float64
    with pytest.raises(ValueError, match="one dtype"):
        BlockDiagonal({"a": Diagonal(torch.ones(2)), "b": Dense(randn(2, 2))})
