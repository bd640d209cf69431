"""Every operator, and every kind of composition, in the conformance suite."""

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from conformance import OperatorConformance
from matrices import THIN, Opaque, randn, rotation

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


def as_numpy(*tensors):
    return [tensor.numpy() for tensor in tensors]


class TestIdentity(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        return Identity(5, dtype, device), torch.from_numpy(np.identity(5))


class TestDiagonal(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        values = randn(6)
        return Diagonal(values.to(device, dtype)), torch.from_numpy(np.diag(values.numpy()))


class TestDense(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        matrix = randn(4, 6)
        return Dense(matrix.to(device, dtype)), matrix


class TestKronecker(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, B, C = randn(2, 3), randn(3, 2), randn(2, 2)
        operator = Kronecker(*(M.to(device, dtype) for M in (A, B)), Dense(C.to(device, dtype)))
        a, b, c = as_numpy(A, B, C)
        return operator, torch.from_numpy(np.kron(np.kron(a, b), c))


class TestKroneckerOfGrams(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(2, 3)
        factor = Dense(X.to(device, dtype))
        operator = Kronecker(factor.T @ factor, Identity(2))
        return operator, torch.from_numpy(np.kron((X.T @ X).numpy(), np.identity(2)))


@pytest.mark.parametrize("name", THIN, scope="class")
class TestEigenKronecker(OperatorConformance):
    symmetric = positive_semidefinite = True

    @pytest.fixture
    def case(self, dtype, device, name):
        self.name = name
        return self.make(dtype, device)

    def make(self, dtype, device):
        operator, dense = THIN[self.name]()
        return operator.to(device, dtype), dense


class TestBlockDiagonal(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, d, B = randn(2, 2), randn(3), randn(1, 1)
        blocks = {
            "a": Dense(A.to(device, dtype)),
            "b": Diagonal(d.to(device, dtype)),
            "c": Opaque(B.to(device, dtype)),
        }
        dense = scipy.linalg.block_diag(A.numpy(), np.diag(d.numpy()), B.numpy())
        return BlockDiagonal(blocks), torch.from_numpy(dense)


class TestLowRankPlusDiagonal(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        parts = randn(6, 2), randn(2), randn(6)
        U, m, d = as_numpy(*parts)
        operator = LowRankPlusDiagonal(*(part.to(device, dtype) for part in parts))
        return operator, torch.from_numpy(U @ np.diag(m) @ U.T + np.diag(d))


class TestLowRankPlusNumber(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        U, m = randn(5, 2), randn(2).abs()
        operator = LowRankPlusDiagonal(U.to(device, dtype), m.to(device, dtype), 0.3)
        return operator, U @ m.diag() @ U.T + 0.3 * torch.from_numpy(np.identity(5))


class TestPermuted(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        U, m, order = rotation(4), randn(4, 1).abs(), torch.tensor([2, 0, 3, 1])
        inner = EigenKronecker(U.to(device, dtype), None, m.to(device, dtype))
        A = U @ m.flatten().diag() @ U.T
        dense = torch.zeros(4, 4, dtype=torch.float64)
        for i, row in enumerate(order.tolist()):
            for j, column in enumerate(order.tolist()):
                dense[row, column] = A[i, j]
        return Permuted(inner, order.to(device)), dense


class TestPermutedOther(OperatorConformance):
    """Without symmetry, and in the same order."""

    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        matrix = randn(4, 4)
        return Permuted(Dense(matrix.to(device, dtype))), matrix


class TestOpaque(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        matrix = randn(4, 5)
        return Opaque(matrix.to(device, dtype)), matrix


class TestSum(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, d = randn(5, 5), randn(5)
        operator = Opaque(A.to(device, dtype)) + Diagonal(d.to(device, dtype)) - Identity(5)
        assert isinstance(operator, Sum)
        assert len(operator.terms) == 2
        return operator, A + torch.from_numpy(np.diag(d.numpy() - 1))


class TestSumOfSemidefinite(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(3, 5)
        J = Opaque(X.to(device, dtype))
        operator = J.T @ J + 2 * Identity(5)
        return operator, X.T @ X + torch.from_numpy(2 * np.identity(5))


class TestScaled(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A = randn(3, 5)
        operator = torch.tensor(-0.5) * Opaque(A.to(device, dtype)) * 3
        assert isinstance(operator, Scaled)
        return operator, -1.5 * A


class TestProduct(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A, B, C = randn(3, 5), randn(5, 2), randn(2, 4)
        operator = Opaque(A.to(device, dtype)) @ Dense(B.to(device, dtype))
        operator = operator @ (2 * Opaque(C.to(device, dtype)))
        return operator, 2 * torch.linalg.multi_dot([A, B, C])


class TestSandwich(OperatorConformance):
    symmetric, positive_semidefinite = True, False

    def make(self, dtype, device):
        A, d = randn(3, 5), torch.tensor([1.0, -2, 3], dtype=torch.float64)
        J = Opaque(A.to(device, dtype))
        return J.T @ Diagonal(d.to(device, dtype)) @ J, A.T @ d.diag() @ A


class TestSubMatrix(OperatorConformance):
    symmetric = positive_semidefinite = False

    def make(self, dtype, device):
        A = randn(6, 7)
        operator = Opaque(A.to(device, dtype))[[4, 0, 0, 5], 1:6][:, ::2]
        assert isinstance(operator, SubMatrix)
        assert isinstance(operator.operator, Opaque)
        return operator, A[[4, 0, 0, 5]][:, [1, 3, 5]]


class TestPrincipalSubMatrix(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(4, 6)
        J = Opaque(X.to(device, dtype))
        return (J.T @ J)[1:5, 1:5], (X.T @ X)[1:5, 1:5]


class TestAssumed(OperatorConformance):
    symmetric = positive_semidefinite = True

    def make(self, dtype, device):
        X = randn(4, 6)
        G = X.T @ X
        return assume(Opaque(G.to(device, dtype)), positive_semidefinite=True), G
