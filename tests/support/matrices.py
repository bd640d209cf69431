"""Matrices and an operator without structure, for the tests of operators."""

import torch

from laplace_debias.operators import LinearOperator, Transpose


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotation(n, seed=0):
    return torch.linalg.qr(randn(n, n, seed=seed)).Q


def rotations(count, n):
    """Orthogonal matrices, one for each group, `[count, n, n]`."""
    return torch.stack([rotation(n, seed) for seed in range(count)])


class Opaque(LinearOperator):
    """A matrix that shows no structure: what an operator of a network looks like."""

    def __init__(self, matrix, layout=None):
        self.matrix, self._layout = matrix, layout

    shape = property(lambda self: tuple(self.matrix.shape))
    dtype = property(lambda self: self.matrix.dtype)
    device = property(lambda self: self.matrix.device)
    layout = property(lambda self: self._layout)

    def _matmat(self, matrix):
        assert matrix.shape[1] > 0
        return self.matrix @ matrix

    @property
    def T(self):  # noqa: N802
        return Transpose(self, lambda matrix: self.matrix.T @ matrix)
