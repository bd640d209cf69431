"""Functional covariance of posteriors with directions in all parameters together."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.jacobians import Jacobians, rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker

# Rows of U that are converted to double precision at a time.
_ROWS = 2**18


class DenseMoments:
    r"""$J P^{-1} J^\top$ from the coordinates $JU$ along the directions, and from what they leave.

    $$J P^{-1} J^\top = JU\,\mathrm{diag}\big(\tfrac{1}{N\lambda + \delta}\big)(JU)^\top
    + \tfrac1\delta\big(JJ^\top - JU(JU)^\top\big)$$

    Both are summed layer by layer, in double precision: the last term is a difference. With U
    rounded to single precision it would be off by that rounding over δ, which for
    $N\lambda\gg\delta$ is more than the whole and of any sign. So U's rounding is undone first, by
    `orthonormaliser`.

    Args:
        blocks: The parameters' blocks, one after the other the rows of the posterior's one.
        posterior: A posterior with one block of all parameters.
        prior_precisions: δ, `[P, 1]`.
        diagonal: Whether to compute only variances.
        jacobians: A function that computes Jacobians.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        posterior: GaussianPosterior,
        prior_precisions: Float[Tensor, "grid blocks"],
        diagonal: bool,
        jacobians: Jacobians = rotated_jacobians,
    ) -> None:
        self.blocks = blocks
        self.posterior = posterior
        directions = _directions(posterior).split([block.size for block in blocks])
        self._directions = dict(zip(blocks, directions, strict=True))
        self._num_directions = directions[0].shape[1]
        self._root = orthonormaliser(posterior)
        self.prior_precisions = prior_precisions
        self._diagonal = diagonal
        self._jacobians = jacobians

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        records: Iterable[BlockRecord],
    ) -> None:
        """Add the covariances, or variances, of some columns, from each block's output gradients.

        Args:
            into: The sums.
            records: The records of a backward pass.
        """
        gram = into.new_zeros(into.shape[1:], dtype=torch.float64)
        residual = None
        along = gram.new_zeros(*into.shape[1:3], self._num_directions)
        for record in records:
            block = record.block
            U = self._directions[block]
            for examples, J, columns in self._jacobians(record, None, None):
                if columns is not None:
                    J = J.new_zeros(*J.shape[:3], block.shape[1]).index_add_(3, columns, J)
                rows = J.flatten(2).double()
                gram[examples] += self._product(rows, rows)
                along[examples] += rows @ U.double()
            # Let go before the next block's are made.
            del record, J, rows
        dense_block = self.posterior.curvature.blocks[DENSE_BLOCK]
        magnitudes = dense_block.magnitudes.flatten().double()
        if self._root is not None:
            along = torch.linalg.solve_triangular(self._root.mT, along, upper=True, left=False)
            residual = self._residual_products(gram, along, dense_block.shape[0])
        deltas = self.prior_precisions[:, 0].double()
        for point, delta in zip(into, deltas, strict=True):
            weights = 1 / (self.posterior.data_weight * magnitudes + delta)
            total = self._product(along * weights, along)
            if residual is not None:
                total = total + residual / delta
            point += total.to(point)

    def _residual_products(self, gram: Tensor, along: Tensor, size: int) -> Tensor:
        """Compute products of what the directions leave of each row; 0 if it is only rounding."""
        residual = gram - self._product(along, along)
        squares = gram
        residual_squares = residual
        if not self._diagonal:
            squares = gram.diagonal(dim1=-2, dim2=-1)
            residual_squares = residual.diagonal(dim1=-2, dim2=-1)
        is_above = residual_squares > 4 * size**0.5 * torch.finfo(gram.dtype).eps * squares
        if not self._diagonal:
            is_above = is_above.unsqueeze(-1) & is_above.unsqueeze(-2)
        return residual.where(is_above, 0.0)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1) if self._diagonal else left @ right.mT


def orthonormaliser(posterior: GaussianPosterior) -> Float[Tensor, "k k"] | None:
    """Compute the Cholesky factor L of UᵀU, for which the columns of U L⁻ᵀ are orthonormal.

    It is in float64, and None if the directions are a complete basis.
    """
    U = _directions(posterior)
    if U.shape[0] == U.shape[1]:
        return None
    products = sum(rows.mT @ rows for rows in map(torch.Tensor.double, U.split(_ROWS)))
    return torch.linalg.cholesky(products)


def _directions(posterior: GaussianPosterior) -> Float[Tensor, "parameters k"]:
    block = posterior.curvature.blocks[DENSE_BLOCK]
    if isinstance(block, EigenKronecker):
        assert block.U_G is not None
        return block.U_G
    return block.U
