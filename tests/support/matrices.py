"""Matrices and an operator without structure, for the tests of operators."""

import torch

from laplace_debias.operators import EigenKronecker, LinearOperator, Transpose


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotation(n, seed=0):
    return torch.linalg.qr(randn(n, n, seed=seed)).Q


def rotations(count, n):
    """Orthogonal matrices, one for each group, `[count, n, n]`."""
    return torch.stack([rotation(n, seed) for seed in range(count)])


def thin(U_G, U_A, magnitudes, r_G, r_A):
    """A thin `EigenKronecker`, and the matrix of its definition, one direction after the other.

    Args:
        U_G: An orthogonal matrix `[d_out, d_out]`, or one per group. The first r_G columns are
            kept. None stands for the axes.
        U_A: An orthogonal matrix `[d_in, d_in]`, or one per group, or None.
        magnitudes: The magnitudes of the kept directions and of the remainders,
            `[*groups, rows, columns]`.
        r_G: The number of kept columns of U_G; d_out for all.
        r_A: The number of kept columns of U_A; d_in for all.
    """
    *groups, rows, columns = magnitudes.shape
    blocks = []
    for group in range(groups[0] if groups else 1):
        basis_G = _group_basis(U_G, group, groups, rows)
        basis_A = _group_basis(U_A, group, groups, columns)
        group_magnitudes = magnitudes[group] if groups else magnitudes
        block = 0
        for i in range(len(basis_G)):
            for j in range(len(basis_A)):
                direction = torch.kron(basis_G[:, i], basis_A[:, j])
                # The last row and column are the magnitudes of the remainders.
                magnitude = group_magnitudes[min(i, r_G), min(j, r_A)]
                block = block + magnitude * torch.outer(direction, direction)
        blocks.append(block)
    thin_G = None if U_G is None else U_G[..., :r_G]
    thin_A = None if U_A is None else U_A[..., :r_A]
    return EigenKronecker(thin_G, thin_A, magnitudes), torch.block_diag(*blocks)


def _group_basis(U, group, groups, size):
    """Return the whole basis of one group, `[size, size]`."""
    if U is None:
        return torch.eye(size, dtype=torch.float64)
    return U[group] if groups else U


THIN = {
    "both": lambda: thin(rotation(4), rotation(5), randn(3, 4).abs() + 0.1, 2, 3),
    "one left": lambda: thin(rotation(4), rotation(5), randn(4, 5).abs() + 0.1, 3, 4),
    "G": lambda: thin(rotation(4), rotation(3), randn(2, 3).abs() + 0.1, 1, 3),
    "A": lambda: thin(rotation(3), rotation(5), randn(3, 3).abs() + 0.1, 3, 2),
    "A, axes": lambda: thin(None, rotation(5), randn(3, 3).abs() + 0.1, 3, 2),
    "G, axes": lambda: thin(rotation(5), None, randn(3, 2).abs() + 0.1, 2, 2),
    "none kept": lambda: thin(rotation(3), rotation(4), randn(1, 1).abs() + 0.1, 0, 0),
    "whole": lambda: thin(rotation(3), rotation(4), randn(3, 4).abs() + 0.1, 3, 4),
    "whole, axes left": lambda: thin(None, rotation(4), randn(3, 4).abs() + 0.1, 3, 4),
    "whole, axes right": lambda: thin(rotation(3), None, randn(3, 4).abs() + 0.1, 3, 4),
    "whole, axes": lambda: thin(None, None, randn(3, 4).abs() + 0.1, 3, 4),
    "whole groups": lambda: thin(
        rotations(3, 2), rotations(3, 4), randn(3, 2, 4).abs() + 0.1, 2, 4
    ),
    "whole groups, axes": lambda: thin(None, None, randn(3, 2, 4).abs() + 0.1, 2, 4),
    "groups": lambda: thin(rotations(3, 4), rotations(3, 5), randn(3, 3, 3).abs() + 0.1, 2, 2),
    "groups, A": lambda: thin(rotations(2, 2), rotations(2, 5), randn(2, 2, 3).abs() + 0.1, 2, 2),
    "groups, axes": lambda: thin(None, rotations(2, 5), randn(2, 2, 3).abs() + 0.1, 2, 2),
}
"""Thin operators, and their matrices."""


class Opaque(LinearOperator):
    """A matrix without visible structure, such as the operator of a network."""

    def __init__(self, matrix, layout=None):
        self.matrix = matrix
        self._layout = layout

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
