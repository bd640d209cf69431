"""Every operator, and every kind of composition, in the conformance suite."""

import numpy as np
import pytest
import scipy.linalg
import torch
from conformance import OperatorConformance
from matrices import THIN, Opaque, randn, rotation

import laplace_debias.linalg
from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    Kronecker,
    LowRankPlusDiagonal,
    Permuted,
    Scaled,
    SubMatrix,
    Sum,
    assume,
)
from laplace_debias.operators.base import ADVICE


def eye(n):
    return torch.from_numpy(np.identity(n))


def kronecker(like):
    A, B, C = randn(2, 3), randn(3, 2), randn(2, 2)
    operator = Kronecker(A.to(like), B.to(like), Dense(C.to(like)))
    return operator, torch.from_numpy(np.kron(np.kron(A.numpy(), B.numpy()), C.numpy()))


def kronecker_of_grams(like):
    X = randn(2, 3)
    factor = Dense(X.to(like))
    dense = np.kron((X.T @ X).numpy(), np.identity(2))
    return Kronecker(factor.T @ factor, Identity(2)), torch.from_numpy(dense)


def block_diagonal(like):
    A, d, B = randn(2, 2), randn(3), randn(1, 1)
    blocks = {"a": Dense(A.to(like)), "b": Diagonal(d.to(like)), "c": Opaque(B.to(like))}
    dense = scipy.linalg.block_diag(A.numpy(), np.diag(d.numpy()), B.numpy())
    return BlockDiagonal(blocks), torch.from_numpy(dense)


def low_rank(like):
    U, m, d = randn(6, 2), randn(2), randn(6)
    operator = LowRankPlusDiagonal(U.to(like), m.to(like), d.to(like))
    return operator, U @ m.diag() @ U.T + d.diag()


def low_rank_and_number(like):
    U = randn(5, 2)
    m = randn(2).abs()
    operator = LowRankPlusDiagonal(U.to(like), m.to(like), 0.3)
    return operator, U @ m.diag() @ U.T + 0.3 * eye(5)


def permuted(like):
    U = rotation(4)
    m = randn(4, 1).abs()
    order = torch.tensor([2, 0, 3, 1])
    A = U @ m.flatten().diag() @ U.T
    dense = torch.zeros(4, 4, dtype=torch.float64)
    for i, row in enumerate(order.tolist()):
        for j, column in enumerate(order.tolist()):
            dense[row, column] = A[i, j]
    inner = EigenKronecker(U.to(like), None, m.to(like))
    return Permuted(inner, order.to(like.device)), dense


def sum_of_several(like):
    A, d = randn(5, 5), randn(5)
    operator = Opaque(A.to(like)) + Diagonal(d.to(like)) - Identity(5)
    assert isinstance(operator, Sum)
    assert len(operator.terms) == 2
    return operator, A + torch.from_numpy(np.diag(d.numpy() - 1))


def sum_of_semidefinite(like):
    X = randn(3, 5)
    J = Opaque(X.to(like))
    return J.T @ J + 2 * Identity(5), X.T @ X + 2 * eye(5)


def scaled(like):
    operator = torch.tensor(-0.5) * Opaque(randn(3, 5).to(like)) * 3
    assert isinstance(operator, Scaled)
    return operator, -1.5 * randn(3, 5)


def product(like):
    A, B, C = randn(3, 5), randn(5, 2), randn(2, 4)
    operator = Opaque(A.to(like)) @ Dense(B.to(like)) @ (2 * Opaque(C.to(like)))
    return operator, 2 * torch.linalg.multi_dot([A, B, C])


def sandwich(like):
    A = randn(3, 5)
    d = torch.tensor([1.0, -2, 3], dtype=torch.float64)
    J = Opaque(A.to(like))
    return J.T @ Diagonal(d.to(like)) @ J, A.T @ d.diag() @ A


def sub_matrix(like):
    A = randn(6, 7)
    operator = Opaque(A.to(like))[[4, 0, 0, 5], 1:6][:, ::2]
    assert isinstance(operator, SubMatrix)
    assert isinstance(operator.operator, Opaque)
    return operator, A[[4, 0, 0, 5]][:, [1, 3, 5]]


def principal_sub_matrix(like):
    X = randn(4, 6)
    J = Opaque(X.to(like))
    return (J.T @ J)[1:5, 1:5], (X.T @ X)[1:5, 1:5]


def assumed(like):
    G = randn(4, 6).T @ randn(4, 6)
    return assume(Opaque(G.to(like)), positive_semidefinite=True), G


def thin(name):
    def build(like):
        operator, dense = THIN[name]()
        return operator.to(like.device, like.dtype), dense

    return build


# What each operator must claim: (is symmetric, is positive semidefinite).
CLAIMS = {
    (False, False): {
        "dense": lambda like: (Dense(randn(4, 6).to(like)), randn(4, 6)),
        "kronecker": kronecker,
        "block-diagonal": block_diagonal,
        # In the same order.
        "permuted other": lambda like: (Permuted(Dense(randn(4, 4).to(like))), randn(4, 4)),
        "opaque": lambda like: (Opaque(randn(4, 5).to(like)), randn(4, 5)),
        "sum": sum_of_several,
        "scaled": scaled,
        "product": product,
        "sub-matrix": sub_matrix,
    },
    (True, False): {
        "diagonal": lambda like: (Diagonal(randn(6).to(like)), torch.diag(randn(6))),
        "low rank": low_rank,
        "sandwich": sandwich,
    },
    (True, True): {
        "identity": lambda like: (Identity(5, like.dtype, like.device), eye(5)),
        "kronecker of grams": kronecker_of_grams,
        "low rank and a number": low_rank_and_number,
        "permuted": permuted,
        "sum of semidefinite": sum_of_semidefinite,
        "principal sub-matrix": principal_sub_matrix,
        "assumed": assumed,
        **{f"thin {name}": thin(name) for name in THIN},
    },
}
CASES = {
    name: (claims, build) for claims, builders in CLAIMS.items() for name, build in builders.items()
}


class TestOperators(OperatorConformance):
    @pytest.fixture(params=CASES)
    def case(self, request, dtype, device):
        (self.symmetric, self.positive_semidefinite), build = CASES[request.param]
        return build(torch.ones((), dtype=dtype, device=device))


def test_a_name_of_another_library_is_explained():
    A = Dense(torch.eye(3, dtype=torch.float64))
    of_curvlinops = {"adjoint", "det", "frobenius_norm", "inverse", "logdet", "trace"}
    assert of_curvlinops <= ADVICE.keys()
    for name, advice in ADVICE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(A, name)
        assert str(caught.value) == f"Dense has no attribute {name!r}. Use {advice}."
        if name not in ("bmm", "cuda"):
            eval(advice, {"A": A, "torch": torch, "laplace_debias": laplace_debias})
    with pytest.raises(AttributeError, match="no_such"):
        _ = A.no_such
