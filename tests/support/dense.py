"""A dense operator that counts its products: the independent side of tests of linear algebra."""

import torch

from laplace_debias.operators.base import LinearOperator


class Counted(LinearOperator):
    """A dense matrix as an operator; counts the columns it multiplies."""

    def __init__(self, matrix, claim=False):
        self.matrix, self.claim, self.products = matrix, claim, 0

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
        return True

    @property
    def is_positive_semidefinite(self):
        return self.claim

    @property
    def T(self):  # noqa: N802
        return Counted(self.matrix.T, self.claim)

    def _matmat(self, matrix):
        self.products += matrix.shape[1]
        return self.matrix @ matrix


def symmetric(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues and a random eigenbasis, in their dtype."""
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    matrix = (Q * eigenvalues) @ Q.T
    return ((matrix + matrix.T) / 2).to(eigenvalues.dtype)


def randn(*shape, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + seed)
    )
