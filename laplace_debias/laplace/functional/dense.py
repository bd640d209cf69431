"""Functional covariance of posteriors with directions in all parameters together."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import Jacobians, rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker, LowRankPlusDiagonal

# Rows of U that are converted to double precision at a time.
_ROWS = 2**18


class DenseMoments:
    r"""$J P^{-1} J^\top$, from the coordinates $JU$ along the directions and the rest of each row.

    $$J P^{-1} J^\top = JU\,\mathrm{diag}\big(\tfrac{1}{N\lambda + \delta}\big)(JU)^\top
    + \tfrac1\delta\big(JJ^\top - JU(JU)^\top\big)$$

    Both are summed layer by layer, in double precision: the last term is a difference. With U
    rounded to single precision it would be off by that rounding over δ, which for
    $N\lambda\gg\delta$ is more than the whole and of any sign. So U's rounding is undone first, by
    `orthonormalisers`.

    Args:
        blocks: The parameters' blocks, one after the other the rows of the posteriors' one.
        posteriors: Posteriors with one block of all parameters.
        prior_precisions: δ, `[posteriors, P, 1]`.
        diagonal: Whether to give variances alone.
        jacobians: Where Jacobians come from.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        posteriors: Sequence[GaussianPosterior],
        prior_precisions: Float[Tensor, "posteriors grid 1"],
        diagonal: bool,
        jacobians: Jacobians = rotated_jacobians,
    ) -> None:
        self._blocks = blocks
        self._places = _places_of(blocks)
        self._posteriors = posteriors
        self._roots = orthonormalisers(posteriors)
        self._deltas = prior_precisions[:, :, 0].double()
        self._diagonal = diagonal
        self._jacobians = jacobians

    def add_last_layer(self, *_: object) -> int:
        """None: directions mix the last layer with all others."""
        return 0

    def begin(self, into: Float[Tensor, "posteriors grid batch columns *again"]) -> None:
        """As `BlockMoments.begin`."""
        self._into = into
        self._along: list[Tensor | None] = [None] * len(self._posteriors)
        self._gram: Tensor | None = None

    def add(self, index: int, layer: nn.Module, uses: Uses) -> None:
        """As `BlockMoments.add`."""
        block, place = self._blocks[index], self._places[index]
        for part, J, columns in self._jacobians(layer, block, uses, None, None):
            if columns is not None:
                J = J.new_zeros(*J.shape[:3], block.shape[1]).index_add_(3, columns, J)
            rows = J.flatten(2).double()
            gram = rows.square().sum(-1) if self._diagonal else rows @ rows.mT
            if self._gram is None:
                self._gram = gram.new_zeros(self._into.shape[2], *gram.shape[1:])
            self._gram[part] += gram
            for index, posterior in enumerate(self._posteriors):
                along = rows @ _directions(posterior)[place].double()
                total = self._along[index]
                if total is None:
                    total = along.new_zeros(self._into.shape[2], *along.shape[1:])
                    self._along[index] = total
                total[part] += along

    def end(self) -> None:
        """Add the covariances, or variances, of what came since `begin`."""
        assert self._gram is not None
        results = []
        for posterior, along, deltas, root in zip(
            self._posteriors, self._along, self._deltas, self._roots, strict=True
        ):
            assert along is not None
            block = posterior.curvature.blocks[DENSE_BLOCK]
            magnitudes = block.magnitudes.flatten().double()
            rest = None
            if root is not None:
                along = torch.linalg.solve_triangular(root.mT, along, upper=True, left=False)
                rest = self._rest(self._gram, along, block.shape[0])
            for delta in deltas:
                weights = 1 / (posterior.data_weight * magnitudes + delta)
                total = self._product(along * weights, along)
                results.append(total if rest is None else total + rest / delta)
        total = torch.stack(results).unflatten(0, (len(self._posteriors), -1))
        self._into += total.to(self._posteriors[0].mean)

    def _rest(self, gram: Tensor, along: Tensor, size: int) -> Tensor:
        """Products of what the directions leave of each row; zero where that is rounding alone."""
        rest = gram - self._product(along, along)
        squares = gram if self._diagonal else gram.diagonal(dim1=-2, dim2=-1)
        left = rest if self._diagonal else rest.diagonal(dim1=-2, dim2=-1)
        is_left = left > 4 * size**0.5 * torch.finfo(gram.dtype).eps * squares
        if not self._diagonal:
            is_left = is_left.unsqueeze(-1) & is_left.unsqueeze(-2)
        return rest.where(is_left, 0.0)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1) if self._diagonal else left @ right.mT


def _places_of(blocks: Sequence[Block]) -> list[slice]:
    """Where each block's entries lie among all."""
    places, start = [], 0
    for block in blocks:
        places.append(slice(start, start + block.size))
        start += block.size
    return places


def orthonormalisers(posteriors: Sequence[GaussianPosterior]) -> list[Float[Tensor, "k k"] | None]:
    """Cholesky factors L of UᵀU: the columns of U L⁻ᵀ are orthonormal in double precision.

    Args:
        posteriors: Posteriors with one block of all parameters.

    Returns:
        L of each, float64; None where the directions are all there are.
    """
    roots: list[Tensor | None] = []
    for posterior in posteriors:
        U = _directions(posterior)
        if U.shape[0] == U.shape[1]:
            roots.append(None)
            continue
        products = sum(part.mT @ part for part in map(torch.Tensor.double, U.split(_ROWS)))
        roots.append(torch.linalg.cholesky(products))
    return roots


def _directions(posterior: GaussianPosterior) -> Float[Tensor, "parameters k"]:
    block = posterior.curvature.blocks[DENSE_BLOCK]
    if isinstance(block, EigenKronecker):
        assert block.U_G is not None
        return block.U_G
    assert isinstance(block, LowRankPlusDiagonal)
    return block.U
