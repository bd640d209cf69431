"""Closed forms against `torch.linalg` on the dense matrix, at 1e-10."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import THIN, Opaque, randn, rotation

from laplace_debias.linalg import (
    cg,
    debiased_cg,
    eigsh,
    frobenius_norm,
    inverse,
    inverse_sqrt,
    logdet,
    neumann,
    spectral_density,
    spectral_norm,
    trace,
)
from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    Kronecker,
    LowRankPlusDiagonal,
    Permuted,
    assume,
)
from laplace_debias.operators.exact import (
    exact_diagonal,
    exact_eigh,
    exact_frobenius_norm,
    exact_inverse,
    exact_logdet,
    exact_spectral_norm,
    exact_sqrt,
    exact_trace,
    least_eigenvalue_bound,
)
from laplace_debias.operators.exact.spectrum import apply_function, or_none

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def gram(n, rank, seed=0):
    X = randn(n, rank, seed=seed)
    return X @ X.T


def positive(n, seed=0):
    """A positive definite matrix, symmetric to the last bit."""
    matrix = gram(n, n, seed) + torch.eye(n, dtype=torch.float64)
    return (matrix + matrix.T) / 2


def symmetric(n, seed=0):
    return randn(n, n, seed=seed) + randn(n, n, seed=seed).T


DEFINITE = {
    "identity": lambda: Identity(4, torch.float64),
    "scaled-identity": lambda: 3 * Identity(4, torch.float64),
    "diagonal": lambda: Diagonal(randn(5).abs() + 0.1),
    "dense": lambda: Dense(positive(4)),
    "assumed": lambda: assume(Dense(positive(4) + 1e-16 * randn(4, 4)), positive_semidefinite=True),
    "kronecker": lambda: Kronecker(positive(2), positive(3)),
    "kronecker-three": lambda: Kronecker(positive(2), Identity(2), Diagonal(randn(3).abs() + 1)),
    "kronecker-of-negatives": lambda: Kronecker(-positive(2), -positive(3)),
    "shifted-kronecker": lambda: Kronecker(gram(2, 1), positive(3)) + 0.1 * Identity(6),
    "shifted-eigen-kronecker": lambda: (
        EigenKronecker(rotation(2), None, randn(2, 3).abs()) + 0.1 * Identity(6)
    ),
    "block-diagonal": lambda: BlockDiagonal(
        {
            "a": Dense(positive(2)),
            "b": EigenKronecker(rotation(2), rotation(2), randn(2, 2).abs() + 0.1),
            "c": Kronecker(positive(2), positive(2)) + Identity(4),
        }
    ),
    "permuted": lambda: Permuted(
        BlockDiagonal(
            {
                "a": EigenKronecker(rotation(2), rotation(2), randn(2, 2).abs() + 0.1),
                "b": Dense(positive(3)),
            }
        ),
        torch.tensor([3, 0, 6, 2, 5, 1, 4]),
    ),
    "shifted-permuted": lambda: (
        Permuted(
            EigenKronecker(rotation(2), rotation(3), randn(2, 3).abs()),
            torch.tensor([3, 0, 2, 5, 1, 4]),
        )
        + 0.1 * Identity(6)
    ),
    **{f"thin {name}": lambda name=name: THIN[name]()[0] for name in THIN},
    "low-rank-number": lambda: LowRankPlusDiagonal(randn(6, 2), randn(2).abs(), 0.5),
    "low-rank-negative": lambda: LowRankPlusDiagonal(0.1 * randn(6, 2), -randn(2).abs(), 2.0),
    "low-rank-wide": lambda: LowRankPlusDiagonal(randn(3, 5), randn(5).abs(), 0.5),
    "low-rank-none": lambda: LowRankPlusDiagonal(randn(3, 0), randn(0), 0.5),
    "low-rank": lambda: LowRankPlusDiagonal(randn(6, 2), randn(2).abs(), randn(6).abs() + 0.1),
}
WITH_EIGENPAIRS = [name for name in DEFINITE if "low-rank" not in name]
NOT_DEFINITE = {
    "any-diagonal": lambda: Diagonal(randn(5)),
    "any-dense": lambda: Dense(randn(4, 4)),
    "indefinite": lambda: Dense(symmetric(4)),
    "any-kronecker": lambda: Kronecker(randn(2, 2), randn(3, 3)),
    "any-eigen-kronecker": lambda: -2 * EigenKronecker(rotation(2), rotation(3), randn(2, 3)),
    "any-block-diagonal": lambda: BlockDiagonal({"a": Dense(randn(2, 2)), "b": Diagonal(randn(3))}),
    "any-low-rank": lambda: LowRankPlusDiagonal(randn(5, 2), randn(2), randn(5)),
    "any-low-rank-number": lambda: LowRankPlusDiagonal(randn(5, 2), randn(2), -0.5),
    "any-permuted": lambda: Permuted(Dense(randn(4, 4)), torch.tensor([2, 0, 3, 1])),
}
RECTANGULAR = {
    "wide": lambda: Dense(randn(3, 5)),
    "wide-kronecker": lambda: Kronecker(randn(2, 3), randn(3, 1)),
    "square-kronecker": lambda: Kronecker(randn(2, 3), randn(3, 2)),
}
CASES = DEFINITE | NOT_DEFINITE | RECTANGULAR


def spectral(function):
    """Extend a scalar function to dense symmetric matrices, by their eigenpairs."""

    def apply(matrix):
        values, V = torch.linalg.eigh(matrix)
        return V * function(values) @ V.T

    return apply


FORMS = {
    "trace": (exact_trace, torch.trace),
    "diagonal": (exact_diagonal, torch.diagonal),
    "frobenius": (exact_frobenius_norm, torch.linalg.matrix_norm),
    "spectral": (exact_spectral_norm, lambda matrix: torch.linalg.matrix_norm(matrix, 2)),
    "logdet": (exact_logdet, torch.logdet),
    "inverse": (exact_inverse, torch.linalg.inv),
    "root": (exact_sqrt, spectral(torch.sqrt)),
    "exponential": (lambda A: or_none(apply_function, A, torch.exp), torch.matrix_exp),
}
# Cases without a closed form. A low rank plus an uneven diagonal has no known eigenvalues, and no
# inverse if an entry is negative; a Kronecker product of rectangles has no known trace. Without
# eigenvalues, only dense operators have known norms.
NO_NORM = {
    *("low-rank", "any-low-rank", "any-kronecker", "any-block-diagonal", "any-permuted"),
    *("wide-kronecker", "square-kronecker"),
}
CASES_WITHOUT_FORM = {
    "frobenius": NO_NORM,
    "spectral": NO_NORM,
    "logdet": {"any-low-rank"},
    "inverse": {"any-low-rank", "square-kronecker"},
    "root": {"low-rank", "any-low-rank"},
    "exponential": {"low-rank", "any-low-rank"},
    "trace": {"square-kronecker"},
    "diagonal": {"square-kronecker"},
}
SYMMETRIC_ONLY = {"logdet", "root", "exponential"}


@pytest.mark.parametrize("name", CASES)
def test_closed_forms_equal_those_of_the_matrix(name):
    for form in FORMS:
        check_form(form, name, CASES[name]())


def check_form(form, name, A):
    function, expected = FORMS[form]
    dense = A.to_dense()
    if A.shape[0] != A.shape[1] and form not in ("frobenius", "spectral"):
        return
    if name in CASES_WITHOUT_FORM.get(form, ()) or (form in SYMMETRIC_ONLY and not A.is_symmetric):
        assert function(A) is None
    elif name in NOT_DEFINITE and form in ("logdet", "root"):
        with pytest.raises(ValueError, match=r"eigenvalue.*\+ c \* Identity"):
            function(A)
    else:
        value = function(A)
        if not isinstance(value, torch.Tensor):
            assert value.is_symmetric == A.is_symmetric
            torch.testing.assert_close(value.T.to_dense(), expected(dense).T, **CLOSE)
            value = value.to_dense()
        torch.testing.assert_close(value, expected(dense), **CLOSE)


@pytest.mark.parametrize("name", DEFINITE | NOT_DEFINITE)
def test_eigenpairs(name):
    A = CASES[name]()
    dense = A.to_dense()
    pairs = exact_eigh(A)
    if not A.is_symmetric or "low-rank" in name:
        assert pairs is None
        return
    values, vectors = pairs
    torch.testing.assert_close(values.sort().values, torch.linalg.eigvalsh(dense), **CLOSE)
    V = vectors.to_dense()
    torch.testing.assert_close(V.T @ V, torch.eye(len(V), dtype=V.dtype), **CLOSE)
    torch.testing.assert_close(dense @ V, V * values, **CLOSE)
    torch.testing.assert_close(vectors[:, :2].to_dense(), V[:, :2], **CLOSE)
    torch.testing.assert_close(vectors.T.to_dense(), V.T, **CLOSE)


@pytest.mark.parametrize(
    ("A", "bound"),
    [
        (lambda G: G, 0.0),
        (lambda G: 3 * G + 0.5 * Identity(2), 0.5),
        (lambda G: G + Diagonal(torch.tensor([-2.0, 1.0], dtype=torch.float64)), -2.0),
        (lambda G: 2 * G - 0.5 * Identity(2), -0.5),
        (lambda G: -1 * G, None),
        (lambda G: Opaque(symmetric(2)) + 2 * G, None),
    ],
)
def test_bounds_of_the_least_eigenvalue(A, bound):
    G = assume(Opaque(gram(2, 1)), positive_semidefinite=True)
    assert least_eigenvalue_bound(A(G)) == bound


@pytest.mark.parametrize(
    "A",
    [
        Diagonal(torch.tensor([2.0, 0, 3], dtype=torch.float64)),
        EigenKronecker(rotation(2), rotation(2), torch.tensor([[1.0, 2], [3, 0]]).double()),
        Dense(gram(4, 1)),
        Dense(torch.zeros(3, 3)),
        Kronecker(gram(2, 1), positive(2)),
        LowRankPlusDiagonal(randn(4, 2), randn(2).abs(), 0.0),
        BlockDiagonal({"a": Diagonal(randn(2)), "b": Dense(gram(3, 2))}),
        0.0 * Identity(3),
    ],
)
def test_singular_operators_name_the_remedy(A):
    with pytest.raises(ValueError, match=r"singular.*`A \+ c \* Identity\(n\)`"):
        exact_inverse(A)


@pytest.mark.parametrize(
    "A",
    [
        EigenKronecker(rotation(2), rotation(2), torch.zeros(2, 2).double()),
        LowRankPlusDiagonal(randn(4, 2), torch.zeros(2).double(), 0.0),
    ],
)
def test_operators_of_zeros_are_named_singular(A):
    with pytest.raises(ValueError, match="singular because all of its eigenvalues are zero"):
        exact_inverse(A)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_that_are_singular_to_rounding_are_refused(dtype):
    tiny = torch.tensor([[1.0], [1e-3], [torch.finfo(dtype).eps / 100]], dtype=dtype)
    U = rotation(3).to(dtype)
    order = torch.tensor([2, 0, 1])
    for A in (
        EigenKronecker(U, None, tiny),
        Permuted(EigenKronecker(U, None, tiny), order),
        LowRankPlusDiagonal(U * tiny.sqrt().T, torch.ones(3, dtype=dtype), 0.0),
        assume(Dense(U * tiny.T @ U.T), symmetric=True),
        # A negative part cancels the diagonal, so the sum is not precise.
        LowRankPlusDiagonal(
            torch.eye(3, dtype=dtype)[:, :2],
            torch.tensor([1.0, torch.finfo(dtype).eps - 1], dtype=dtype),
            1.0,
        ),
    ):
        with pytest.raises(
            ValueError, match=r"singular (in torch|because a pivot).*`A \+ c \* Identity"
        ):
            exact_inverse(A)
    # The sum of a semidefinite matrix and a weak prior is invertible.
    weak = torch.finfo(dtype).eps / 1000
    flat = EigenKronecker(U, None, torch.tensor([[1.0], [1e-3], [0.0]], dtype=dtype))
    damped = Permuted(2 * (flat + weak * Identity(3)), order)
    inverse = exact_inverse(damped)
    x = torch.empty(3, dtype=dtype).index_copy_(0, order, U[:, 2])
    torch.testing.assert_close(weak * (inverse @ x), 0.5 * x, rtol=1e-3, atol=1e-3)
    negative = EigenKronecker(U, None, torch.tensor([[1.0], [1e-3], [-weak / 2]], dtype=dtype))
    with pytest.raises(ValueError, match="singular"):
        exact_inverse(negative + weak * Identity(3))
    # Tiny entries of a diagonal are exact, and a positive shift cannot cancel.
    x = torch.ones(3, dtype=dtype)
    torch.testing.assert_close(exact_inverse(Diagonal(tiny[:, 0])) @ x, 1 / tiny[:, 0])
    A = LowRankPlusDiagonal(U[:, :1], tiny[0] / tiny[2], 1.0)
    torch.testing.assert_close(exact_inverse(A) @ U[:, 2], U[:, 2])


def test_the_diagonal_does_not_lose_what_is_small_beside_the_remainder():
    """The directions are axes, along which the 1e14 times larger remainder has no entry."""
    axes = torch.eye(4, dtype=torch.float64)[:, :2]
    A = EigenKronecker(axes, None, torch.tensor([[1.0], [2.0], [1e14]], dtype=torch.float64))
    expected = torch.tensor([1.0, 2.0, 1e14, 1e14], dtype=torch.float64)
    torch.testing.assert_close(exact_diagonal(A), expected)
    torch.testing.assert_close(A @ axes[:, 1], 2 * axes[:, 1])


def test_the_trace_of_a_multiple_of_a_sum():
    terms = [Kronecker(randn(2, 2, seed=seed), randn(3, 3)) for seed in (0, 1)]
    A = 3 * (terms[0] + terms[1])
    torch.testing.assert_close(exact_diagonal(A), A.to_dense().diagonal(), **CLOSE)
    torch.testing.assert_close(exact_trace(A), A.to_dense().trace(), **CLOSE)


def test_positive_semidefinite_roots_of_singular_operators():
    for A in (Dense(gram(4, 2)), LowRankPlusDiagonal(randn(5, 2), randn(2).abs(), 0.0)):
        A = assume(A, symmetric=True)
        root = exact_sqrt(A).to_dense()
        torch.testing.assert_close(root @ root, A.to_dense(), rtol=0, atol=1e-10)
        torch.testing.assert_close(root, root.T, rtol=0, atol=1e-12)


def test_structure_is_kept():
    A = EigenKronecker(rotation(2), rotation(3), randn(2, 3).abs()) + 0.1 * Identity(6)
    for result in (exact_inverse(A), exact_sqrt(A)):
        assert isinstance(result, EigenKronecker)
        assert result.U_G is A.U_G
    K = Kronecker(positive(2), positive(3))
    assert isinstance(exact_inverse(K), Kronecker)
    for diagonal in (randn(6).abs(), 0.5):
        low_rank = LowRankPlusDiagonal(randn(6, 2), randn(2).abs(), diagonal)
        inverse = exact_inverse(low_rank)
        assert isinstance(inverse, LowRankPlusDiagonal)
        assert inverse.U.shape == (6, 2)
    blocks = BlockDiagonal({"a": A, "b": K})
    assert isinstance(exact_inverse(blocks).blocks["a"], EigenKronecker)


def test_operators_without_structure_have_no_closed_form():
    opaque = Opaque(positive(4))
    for A in (
        opaque,
        assume(opaque, positive_semidefinite=True),
        2 * opaque,
        opaque + Identity(4),
        opaque @ opaque,
        opaque[:3, :3],
        BlockDiagonal({"a": opaque, "b": Diagonal(randn(2))}),
        Kronecker(opaque, Identity(2)),
    ):
        for function in (
            exact_trace,
            exact_diagonal,
            exact_frobenius_norm,
            exact_spectral_norm,
            exact_logdet,
            exact_inverse,
            exact_sqrt,
            exact_eigh,
        ):
            assert function(A) is None, (A, function)
        assert or_none(apply_function, A, torch.exp) is None


def test_inverses_of_what_is_not_finite_are_refused():
    with pytest.raises(ValueError, match="NaN or Inf"):
        exact_inverse(Dense(torch.full((2, 2), torch.nan)))


def test_low_rank_inverse_where_both_parts_are_far_apart():
    """As for a curvature times the number of examples and a weak prior, in single precision."""
    U = rotation(50)[:, :3]
    m = torch.tensor([1e8, 1e4, 1.0]).double()
    d = torch.full((50,), 1e-2).double()
    exact = torch.linalg.inv(U @ m.diag() @ U.T + d.diag())
    for diagonal in (d, 1e-2):
        single = LowRankPlusDiagonal(U, m, diagonal).to(torch.float32)
        inverse = exact_inverse(single).to_dense().double()
        torch.testing.assert_close(inverse, exact, rtol=0, atol=1e-4 * exact.abs().max().item())


def test_an_assumed_operator_is_taken_at_its_word():
    M = randn(4, 4)
    A = assume(Dense(M), symmetric=True)
    expected = torch.linalg.eigvalsh((M + M.T) / 2)
    torch.testing.assert_close(exact_eigh(A)[0].sort().values, expected, **CLOSE)


def test_an_operator_without_a_new_assumption_is_returned_unchanged():
    definite = Diagonal(randn(3).abs())
    assert assume(definite, symmetric=True, positive_semidefinite=True) is definite
    any_operator = Opaque(randn(3, 3))
    assert assume(any_operator) is any_operator


def test_closed_forms_are_differentiable():
    def logdet(magnitudes, shift):
        A = EigenKronecker(rotation(2), None, magnitudes) + shift * Identity(6)
        return exact_logdet(BlockDiagonal({"a": A, "b": shift * Dense(positive(2))}))

    inputs = randn(2, 3).abs().requires_grad_(), torch.tensor(0.3).double().requires_grad_()
    assert torch.autograd.gradcheck(logdet, inputs)


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from(WITH_EIGENPAIRS), min_size=1, max_size=3),
    shift=st.floats(0.1, 3),
    scalar=st.floats(0.1, 3),
    kronecker=st.booleans(),
)
def test_random_blocks_and_kronecker_products(names, shift, scalar, kronecker):
    operators = [DEFINITE[name]() for name in names]
    if kronecker:
        A = Kronecker(*operators[:2])
    else:
        A = BlockDiagonal({str(i): operator for i, operator in enumerate(operators)})
    A = scalar * A + shift * Identity(A.shape[0])
    dense = A.to_dense()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(exact_logdet(A), torch.linalg.slogdet(dense).logabsdet, **close)
    torch.testing.assert_close(exact_inverse(A).to_dense(), torch.linalg.inv(dense), **close)
    torch.testing.assert_close(exact_trace(A), dense.trace(), **close)
    norm = torch.linalg.matrix_norm(dense, 2)
    torch.testing.assert_close(exact_spectral_norm(A), norm, **close)
    root = exact_sqrt(A).to_dense()
    torch.testing.assert_close(root @ root, dense, rtol=1e-9, atol=1e-9 * norm.item())


def test_functions_of_a_low_rank_operator_of_full_rank():
    """At full rank, the operator's added diagonal is not an eigenvalue by itself."""
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    for diagonal, values in ((0.0, torch.ones(3)), (-1.0, 2 * torch.ones(3))):
        A = LowRankPlusDiagonal(Q, values.double(), diagonal)
        for function in (inverse, inverse_sqrt):
            torch.testing.assert_close(function(A).to_dense(), torch.eye(3).double())


def test_blocks_may_be_empty():
    empty = Diagonal(torch.zeros(0).double())
    A = BlockDiagonal({"a": empty, "b": Diagonal(4 * torch.ones(2).double())})
    torch.testing.assert_close(inverse_sqrt(A).to_dense(), torch.eye(2).double() / 2)
    torch.testing.assert_close(inverse(A).to_dense(), torch.eye(2).double() / 4)
    for B, value in ((A, 4.0), (A + 0.5 * Identity(2), 4.5)):
        torch.testing.assert_close(B.to_dense(), value * torch.eye(2).double())
        assert float(logdet(B)) == pytest.approx(2 * math.log(value))
        assert float(spectral_norm(B)) == value
        torch.testing.assert_close(eigsh(B, 2).values, torch.full((2,), value).double())


@pytest.mark.parametrize(
    "A", [Dense(torch.zeros(0, 0)), Diagonal(torch.zeros(0)), Identity(0)], ids=repr
)
def test_an_operator_may_have_no_rows(A):
    """Empty sums are 0, an empty product is 1, and a system without unknowns is solved."""
    for value in (trace(A), logdet(A), spectral_norm(A), frobenius_norm(A)):
        assert float(value) == 0
        assert value.num_matvecs == 0
    for shape in ((0,), (0, 2)):
        b = torch.zeros(shape)
        result = debiased_cg(A, A, b, b)
        for solution in (cg(A, b), result.single, result.debiased):
            assert solution.x.shape == shape
            assert (solution.converged, solution.num_matvecs) == (True, 0)
    with pytest.raises(ValueError, match="no eigenvalues"):
        spectral_density(A)
    with pytest.raises(ValueError, match=r"shape \(0, 0\)"):
        neumann(A, torch.zeros(0))


def test_a_scalar_beyond_single_precision():
    A = 1e39 * Identity(4, torch.float64)
    assert float(trace(A).value) == 4e39


def test_a_permutation_of_any_integers():
    order = torch.tensor([1, 0], dtype=torch.int32)
    A = Permuted(Diagonal(torch.tensor([1.0, 2.0])), order)
    torch.testing.assert_close(A @ torch.tensor([1.0, 1.0]), torch.tensor([2.0, 1.0]))
