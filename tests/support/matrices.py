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
        U_G: An orthogonal matrix `[d_out, d_out]`, or one for each group, of which the first r_G
            columns are kept; None for the axes.
        U_A: Likewise `[d_in, d_in]`.
        magnitudes: Of the kept directions and of the remainders, `[*groups, rows, columns]`.
        r_G: How many directions there are; d_out for all.
        r_A: Likewise.
    """
    *groups, rows, columns = magnitudes.shape
    blocks = []
    for group in range(groups[0] if groups else 1):
        of_sides = []
        for U, r, size in ((U_G, r_G, rows), (U_A, r_A, columns)):
            basis = torch.eye(size, dtype=torch.float64) if U is None else U[group] if groups else U
            of_sides.append([(basis[:, i], min(i, r)) for i in range(len(basis))])
        total = 0
        for u, i in of_sides[0]:
            for a, j in of_sides[1]:
                direction = torch.kron(u, a)
                value = (magnitudes[group] if groups else magnitudes)[i, j]
                total = total + value * torch.outer(direction, direction)
        blocks.append(total)
    U_G, U_A = (None if U is None else U[..., :r] for U, r in ((U_G, r_G), (U_A, r_A)))
    return EigenKronecker(U_G, U_A, magnitudes), torch.block_diag(*blocks)


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
