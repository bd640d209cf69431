"""A dense operator that counts its products: the independent side of tests of linear algebra."""

import torch
from spectra import Matrix


class Counted(Matrix):
    """A dense symmetric matrix as an operator; counts the columns it multiplies.

    Its transpose is another operator, with a count of its own.
    """

    def __init__(self, matrix, claim=False):
        super().__init__(matrix, is_symmetric=True, is_positive_semidefinite=claim)

    @property
    def products(self):
        return self.columns

    @property
    def T(self):  # noqa: N802
        return Counted(self.matrix.T, self.is_positive_semidefinite)


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
