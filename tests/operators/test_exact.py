"""Closed forms against `torch.linalg` on the dense matrix, at 1e-10."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Opaque, randn, rotation, rotations

from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    Kronecker,
    LowRankPlusDiagonal,
    Permutation,
    Permuted,
    assume,
)
from laplace_debias.operators.exact import (
    exact_diagonal,
    exact_eigh,
    exact_frobenius_norm,
    exact_function,
    exact_inverse,
    exact_logdet,
    exact_solve,
    exact_spectral_norm,
    exact_sqrt,
    exact_trace,
)

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
    "eigen-kronecker": lambda: EigenKronecker(rotation(2), rotation(3), randn(2, 3).abs() + 0.1),
    "axes": lambda: EigenKronecker(None, rotation(3), randn(2, 3).abs() + 0.1),
    "groups": lambda: EigenKronecker(rotations(4, 2), rotations(4, 3), randn(4, 2, 3).abs() + 0.1),
    "groups-axes": lambda: EigenKronecker(rotations(4, 2), None, randn(4, 2, 1).abs() + 0.1),
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
    "low-rank-number": lambda: LowRankPlusDiagonal(randn(6, 2), randn(2).abs(), 0.5),
    "low-rank-negative": lambda: LowRankPlusDiagonal(0.1 * randn(6, 2), -randn(2).abs(), 2.0),
    "low-rank-wide": lambda: LowRankPlusDiagonal(randn(3, 5), randn(5).abs(), 0.5),
    "low-rank-none": lambda: LowRankPlusDiagonal(randn(3, 0), randn(0), 0.5),
    "low-rank": lambda: LowRankPlusDiagonal(randn(6, 2), randn(2).abs(), randn(6).abs() + 0.1),
}
# No symmetric root and no eigenpairs of their own, or none at all.
NO_SPECTRUM = {"low-rank"}
OTHERS = {
    "diagonal": lambda: Diagonal(randn(5)),
    "dense": lambda: Dense(randn(4, 4)),
    "indefinite": lambda: Dense(symmetric(4)),
    "kronecker": lambda: Kronecker(randn(2, 2), randn(3, 3)),
    "eigen-kronecker": lambda: -2 * EigenKronecker(rotation(2), rotation(3), randn(2, 3)),
    "block-diagonal": lambda: BlockDiagonal({"a": Dense(randn(2, 2)), "b": Diagonal(randn(3))}),
    "low-rank-mixed": lambda: LowRankPlusDiagonal(randn(5, 2), randn(2), randn(5)),
    "low-rank-negative-number": lambda: LowRankPlusDiagonal(randn(5, 2), randn(2), -0.5),
    "permutation": lambda: Permutation(torch.tensor([2, 0, 1, 4, 3]), torch.float64),
    "permuted": lambda: Permuted(Dense(randn(4, 4)), torch.tensor([2, 0, 3, 1])),
    "scaled-permutation": lambda: -2 * Permutation(torch.tensor([2, 0, 1, 3]), torch.float64),
    "product": lambda: Dense(randn(3, 3)) @ Dense(randn(3, 3, seed=1)),
    "product-of-structures": lambda: (
        Kronecker(randn(2, 2), randn(2, 2)) @ Permutation(torch.tensor([1, 0, 3, 2]))
    ),
}
SQUARE = {**DEFINITE, **{f"other-{name}": build for name, build in OTHERS.items()}}
RECTANGULAR = {
    "dense": lambda: Dense(randn(3, 5)),
    "kronecker": lambda: Kronecker(randn(2, 3), randn(3, 1)),
    "kronecker-square": lambda: Kronecker(randn(2, 3), randn(3, 2)),
    "scaled": lambda: -2 * Kronecker(randn(2, 3), Permutation(torch.tensor([1, 0]))),
}


@pytest.mark.parametrize("name", SQUARE)
def test_trace_and_diagonal(name):
    A = SQUARE[name]()
    dense = A.to_dense()
    if name == "other-product-of-structures":
        assert exact_diagonal(A) is None
        assert exact_trace(A) is None
    else:
        torch.testing.assert_close(exact_diagonal(A), dense.diagonal(), **CLOSE)
        torch.testing.assert_close(exact_trace(A), dense.trace(), **CLOSE)


@pytest.mark.parametrize("name", [*SQUARE, *RECTANGULAR])
def test_norms(name):
    A = {**RECTANGULAR, **SQUARE}[name]()
    dense = A.to_dense()
    frobenius, spectral = exact_frobenius_norm(A), exact_spectral_norm(A)
    if name in ("shifted-kronecker", "block-diagonal") or "product" in name:
        assert frobenius is None
    else:
        torch.testing.assert_close(frobenius, dense.norm(), **CLOSE)
    if name in ("low-rank", "other-low-rank-mixed") or "product" in name:
        assert spectral is None
    else:
        torch.testing.assert_close(spectral, torch.linalg.matrix_norm(dense, 2), **CLOSE)


@pytest.mark.parametrize("name", RECTANGULAR)
def test_norms_of_rectangles(name):
    A = RECTANGULAR[name]()
    dense = A.to_dense()
    torch.testing.assert_close(exact_frobenius_norm(A), dense.norm(), **CLOSE)
    torch.testing.assert_close(exact_spectral_norm(A), torch.linalg.matrix_norm(dense, 2), **CLOSE)


@pytest.mark.parametrize("name", SQUARE)
def test_inverse_and_solve(name):
    A = SQUARE[name]()
    dense = A.to_dense()
    inverse = exact_inverse(A)
    torch.testing.assert_close(inverse.to_dense(), torch.linalg.inv(dense), **CLOSE)
    torch.testing.assert_close(inverse.T.to_dense(), torch.linalg.inv(dense).T, **CLOSE)
    assert inverse.is_symmetric == A.is_symmetric
    for right in (randn(len(dense)), randn(len(dense), 3), randn(len(dense), 0)):
        expected = torch.linalg.solve(dense, right)
        torch.testing.assert_close(exact_solve(A, right), expected, **CLOSE)


@pytest.mark.parametrize("name", SQUARE)
def test_logdet(name):
    A = SQUARE[name]()
    dense = A.to_dense()
    sign, log = torch.linalg.slogdet(dense)
    if A.is_symmetric and torch.linalg.eigvalsh(dense).min() <= 0:
        if name == "other-low-rank-mixed":
            assert exact_logdet(A) is None
        else:
            with pytest.raises(ValueError, match=r"not positive definite.*\+ c \* Identity"):
                exact_logdet(A)
    elif sign < 0:
        with pytest.raises(ValueError, match=r"determinant is negative.*\+ c \* Identity"):
            exact_logdet(A)
    else:
        torch.testing.assert_close(exact_logdet(A), log, **CLOSE)


@pytest.mark.parametrize("sign", [1, -1])
def test_logdet_of_products_of_negative_determinants(sign):
    A = Diagonal(torch.tensor([-2.0, 1, 3], dtype=torch.float64)) @ Dense(randn(3, 3))
    A = A @ Dense(sign * randn(3, 3, seed=1)) @ Kronecker(randn(3, 3, seed=2))
    B = Kronecker(A, Dense(randn(2, 2)))
    for operator in (A, B, BlockDiagonal({"a": A, "b": B}), 2 * A, -1 * A):
        expected = torch.linalg.slogdet(operator.to_dense())
        if expected.sign > 0:
            torch.testing.assert_close(exact_logdet(operator), expected.logabsdet, **CLOSE)
        else:
            with pytest.raises(ValueError, match="determinant is negative"):
                exact_logdet(operator)


@pytest.mark.parametrize("name", SQUARE)
def test_eigenpairs(name):
    A = SQUARE[name]()
    dense = A.to_dense()
    pairs = exact_eigh(A)
    if not A.is_symmetric or name in ("low-rank", "other-low-rank-mixed"):
        assert pairs is None
        return
    values, vectors = pairs
    torch.testing.assert_close(values, torch.linalg.eigvalsh(dense).flip(0), **CLOSE)
    V = vectors.to_dense()
    torch.testing.assert_close(V.T @ V, torch.eye(len(V), dtype=V.dtype), **CLOSE)
    torch.testing.assert_close(dense @ V, V * values, **CLOSE)
    torch.testing.assert_close(vectors[:, :2].to_dense(), V[:, :2], **CLOSE)
    torch.testing.assert_close(vectors.T.to_dense(), V.T, **CLOSE)


@pytest.mark.parametrize("name", DEFINITE)
def test_roots_and_other_functions(name):
    A = DEFINITE[name]()
    dense = A.to_dense()
    root = exact_sqrt(A)
    if name in NO_SPECTRUM:
        assert root is None
        assert exact_function(A, torch.exp) is None
        return
    values, V = torch.linalg.eigh(dense)
    torch.testing.assert_close(root.to_dense(), V * values.sqrt() @ V.T, **CLOSE)
    assert root.is_symmetric
    exponential = exact_function(A, torch.exp)
    torch.testing.assert_close(exponential.to_dense(), torch.linalg.matrix_exp(dense), **CLOSE)


@pytest.mark.parametrize("name", OTHERS)
def test_roots_of_others(name):
    A = OTHERS[name]()
    if not A.is_symmetric or name == "low-rank-mixed":
        assert exact_sqrt(A) is None
    else:
        with pytest.raises(ValueError, match=r"has the eigenvalue.*\+ c \* Identity"):
            exact_sqrt(A)


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
        Dense(randn(3, 3)) @ Dense(gram(3, 1)),
    ],
)
def test_singular_operators_name_the_remedy(A):
    with pytest.raises(ValueError, match=r"singular.*`A \+ c \* Identity\(n\)`"):
        exact_inverse(A)
    with pytest.raises(ValueError, match=r"singular.*`A \+ c \* Identity\(n\)`"):
        exact_solve(A, torch.ones(A.shape[0], dtype=A.dtype))


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
    ):
        with pytest.raises(ValueError, match=r"singular, (to torch|a pivot).*`A \+ c \* Identity"):
            exact_inverse(A)
    # Not so a weak prior, which is added to what is not negative.
    weak = torch.finfo(dtype).eps / 1000
    flat = EigenKronecker(U, None, torch.tensor([[1.0], [1e-3], [0.0]], dtype=dtype))
    damped = Permuted(2 * (flat + weak * Identity(3)), order)
    inverse = exact_inverse(damped)
    x = torch.empty(3, dtype=dtype).index_copy_(0, order, U[:, 2])
    torch.testing.assert_close(weak * (inverse @ x), 0.5 * x, rtol=1e-3, atol=1e-3)
    negative = EigenKronecker(U, None, torch.tensor([[1.0], [1e-3], [-weak / 2]], dtype=dtype))
    with pytest.raises(ValueError, match="singular"):
        exact_inverse(negative + weak * Identity(3))
    # A diagonal's eigenvalues are no results either, and a shift cannot cancel.
    x = torch.ones(3, dtype=dtype)
    torch.testing.assert_close(exact_inverse(Diagonal(tiny[:, 0])) @ x, 1 / tiny[:, 0])
    A = LowRankPlusDiagonal(U[:, :1], tiny[0] / tiny[2], 1.0)
    torch.testing.assert_close(exact_inverse(A) @ U[:, 2], U[:, 2])


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
    assert isinstance(exact_sqrt(K), Kronecker)
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
        assert exact_solve(A, randn(A.shape[0])) is None
        assert exact_function(A, torch.exp) is None


@pytest.mark.usefixtures("unchecked")
def test_what_needs_a_square_operator_says_so():
    A = Dense(randn(2, 3))
    for function in (
        exact_trace,
        exact_diagonal,
        exact_logdet,
        exact_inverse,
        exact_sqrt,
        exact_eigh,
        lambda operator: exact_function(operator, torch.exp),
        lambda operator: exact_solve(operator, randn(2)),
    ):
        with pytest.raises(ValueError, match=r"shape \(2, 3\): this needs a square operator"):
            function(A)
    with pytest.raises(ValueError, match="cannot multiply a tensor of shape"):
        exact_solve(Diagonal(randn(2)), randn(3))
    with pytest.raises(ValueError, match="NaN or Inf"):
        exact_inverse(Dense(torch.full((2, 2), torch.nan)))


def test_low_rank_inverse_where_both_parts_are_far_apart():
    """Curvature times the number of examples against a weak prior, in single precision."""
    U, m = rotation(50)[:, :3], torch.tensor([1e8, 1e4, 1.0]).double()
    d = torch.full((50,), 1e-2).double()
    exact = torch.linalg.inv(U @ m.diag() @ U.T + d.diag())
    for diagonal in (d, 1e-2):
        single = LowRankPlusDiagonal(U, m, diagonal).to(torch.float32)
        inverse = exact_inverse(single).to_dense().double()
        torch.testing.assert_close(inverse, exact, rtol=0, atol=1e-4 * exact.abs().max().item())


def test_an_assumed_operator_is_taken_at_its_word():
    M = randn(4, 4)
    A = assume(Dense(M), symmetric=True)
    expected = torch.linalg.eigvalsh((M + M.T) / 2).flip(0)
    torch.testing.assert_close(exact_eigh(A).values, expected, **CLOSE)


def test_closed_forms_are_differentiable():
    def logdet(magnitudes, shift):
        A = EigenKronecker(rotation(2), None, magnitudes) + shift * Identity(6)
        return exact_logdet(BlockDiagonal({"a": A, "b": shift * Dense(positive(2))}))

    inputs = randn(2, 3).abs().requires_grad_(), torch.tensor(0.3).double().requires_grad_()
    assert torch.autograd.gradcheck(logdet, inputs)


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(set(DEFINITE) - NO_SPECTRUM)), min_size=1, max_size=3),
    shift=st.floats(0.1, 3),
    scalar=st.floats(0.1, 3),
    kronecker=st.booleans(),
)
def test_random_blocks_and_kronecker_products(names, shift, scalar, kronecker):
    parts = [DEFINITE[name]() for name in names]
    if kronecker:
        A = Kronecker(*parts[:2])
    else:
        A = BlockDiagonal({str(i): part for i, part in enumerate(parts)})
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
