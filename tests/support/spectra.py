"""Matrices of prescribed spectrum, of which algorithms can only compute products."""

import torch

from laplace_debias.operators.base import LinearOperator


class Matrix(LinearOperator):
    """No closed form applies to it; counts the columns it multiplies."""

    def __init__(self, matrix, is_symmetric=False, is_positive_semidefinite=False):
        self.matrix = matrix
        self._claims = is_symmetric or is_positive_semidefinite, is_positive_semidefinite
        self.columns = 0

    @property
    def shape(self):
        return tuple(self.matrix.shape)

    @property
    def dtype(self):
        return self.matrix.dtype

    @property
    def device(self):
        return self.matrix.device

    @property
    def is_symmetric(self):
        return self._claims[0]

    @property
    def is_positive_semidefinite(self):
        return self._claims[1]

    @property
    def T(self):  # noqa: N802
        return self if self.is_symmetric else _Adjoint(self)

    def _matmat(self, matrix):
        self.columns += matrix.shape[1]
        return self.matrix @ matrix


class Counted(Matrix):
    """A symmetric matrix whose transpose is another operator, with a count of its own."""

    def __init__(self, matrix, claim=False):
        super().__init__(matrix, is_symmetric=True, is_positive_semidefinite=claim)

    @property
    def T(self):  # noqa: N802
        return Counted(self.matrix.T, self.is_positive_semidefinite)


class _Adjoint(Matrix):
    """The adjoint of a matrix; its products count as products of the matrix."""

    def __init__(self, original):
        super().__init__(original.matrix.T)
        self._original = original

    @property
    def T(self):  # noqa: N802
        return self._original

    def _matmat(self, matrix):
        self._original.columns += matrix.shape[1]
        return self.matrix @ matrix


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def orthogonal(n, seed=0):
    gaussian = torch.randn(n, n, dtype=torch.float64, generator=generator(seed))
    return torch.linalg.qr(gaussian).Q


def with_eigenvalues(values, seed=0):
    """A symmetric matrix with these eigenvalues and a random eigenbasis."""
    Q = orthogonal(len(values), seed)
    matrix = (Q * values) @ Q.T
    return (matrix + matrix.T) / 2


def symmetric(values, seed=0, **claims):
    return Matrix(with_eigenvalues(torch.as_tensor(values, dtype=torch.float64), seed), **claims)


def uniform(count, seed=1):
    return torch.rand(count, dtype=torch.float64, generator=generator(seed))
