"""The covariance of a linear last layer's outputs, as operations on the layer's inputs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.laplace.functional.dense import orthonormalisers
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker, LowRankPlusDiagonal


def last_layer_covariance(blocks: Sequence[Block], posterior: GaussianPosterior) -> nn.Module:
    r"""A module from the layer's inputs φ `[B, ..., d]` to the covariance of its outputs.

    With $J = I \otimes (\phi, 1)^\top$ it is $J P^{-1} J^\top$, what `la.functional` gives.

    Args:
        blocks: The layer's blocks: its weight's, its bias's, or both in one.
        posterior: A posterior over them.

    Returns:
        A module called with φ and whether the variances `[B, ..., C]` will do; else it gives
        `[B, ..., C, C]`.

    Raises:
        NotImplementedError: For a block of another structure.
    """
    if DENSE_BLOCK in posterior.curvature.blocks:
        return _Dense(blocks, posterior)
    return _Blocks(blocks, posterior)


class _Blocks(nn.Module):
    r"""$U_G\,\mathrm{diag}\big(\sum_j (U_A^\top\phi)_j^2/P_{ij}\big)_i U_G^\top$, summed."""

    def __init__(self, blocks: Sequence[Block], posterior: GaussianPosterior) -> None:
        super().__init__()
        self._inputs: list[str] = []
        deltas = posterior.prior_precision.to(posterior.mean).expand(len(blocks))
        for index, (block, delta) in enumerate(zip(blocks, deltas, strict=True)):
            operator = posterior.curvature.blocks[block.name]
            if not isinstance(operator, EigenKronecker):
                raise NotImplementedError(
                    f"{block.name} has a curvature of type {type(operator).__name__}, whose "
                    'predictive cannot be exported: use method="nn".'
                )
            precisions = posterior.data_weight * operator.magnitudes + delta
            self._inputs.append(_what_it_reads(block))
            # Copies: of views the file would hold what they are views of.
            self.register_buffer(f"U_G_{index}", _copied(operator.U_G))
            self.register_buffer(f"U_A_{index}", _copied(operator.U_A))
            self.register_buffer(f"variances_{index}", precisions.reciprocal().contiguous())

    def forward(self, phi: Tensor, diagonal: bool) -> Float[Tensor, "..."]:
        """See `last_layer_covariance`."""
        total: Tensor | None = None
        for index, reads in enumerate(self._inputs):
            U_G, U_A = getattr(self, f"U_G_{index}"), getattr(self, f"U_A_{index}")
            x = _with_one(phi) if reads == "both" else phi
            x = torch.ones_like(phi[..., :1]) if reads == "one" else x
            rotated = x if U_A is None else x @ U_A
            along = rotated.square() @ getattr(self, f"variances_{index}").mT
            total = _sum(total, _from_eigenbasis(U_G, along, diagonal))
        assert total is not None
        return total


class _Dense(nn.Module):
    r"""$JU\,\mathrm{diag}(1/(N\lambda+\delta))(JU)^\top$, and the rest of J over δ, in float64."""

    directions: Tensor
    variances: Tensor

    def __init__(self, blocks: Sequence[Block], posterior: GaussianPosterior) -> None:
        super().__init__()
        block = posterior.curvature.blocks[DENSE_BLOCK]
        delta = float(posterior.prior_precision)
        (root,) = orthonormalisers([posterior])
        U = block.U_G if isinstance(block, EigenKronecker) else getattr(block, "U", None)
        assert U is not None
        assert isinstance(block, (EigenKronecker, LowRankPlusDiagonal))
        U = U.double()
        if root is not None:
            U = torch.linalg.solve_triangular(root.mT, U, upper=True, left=False)
        parts = U.split([block.size for block in blocks])
        # Of every output the directions along its row of the weight, and along its bias.
        rows = [part.unflatten(0, b.shape) for part, b in zip(parts, blocks, strict=True)]
        self._has_one = any(_what_it_reads(block) != "phi" for block in blocks)
        magnitudes = block.magnitudes.flatten().double()
        self._delta = None if root is None else delta
        self._tolerance = 4 * len(U) ** 0.5 * torch.finfo(torch.float64).eps
        self.register_buffer("directions", torch.cat(rows, dim=1))  # [C, d (+ 1), k]
        self.register_buffer("variances", 1 / (posterior.data_weight * magnitudes + delta))

    def forward(self, phi: Tensor, diagonal: bool) -> Float[Tensor, "..."]:
        """See `last_layer_covariance`."""
        x = (_with_one(phi) if self._has_one else phi).double()
        along = torch.einsum("...i,cik->...ck", x, self.directions)
        total = _product(along * self.variances, along, diagonal)
        if self._delta is not None:
            squares = x.square().sum(-1)[..., None]
            taken = _product(along, along, diagonal)
            left = squares - along.square().sum(-1)
            # Where that is rounding alone it is zero.
            is_left = left > self._tolerance * squares
            rest = left
            if not diagonal:
                rest = squares[..., None] * torch.eye(
                    along.shape[-2], dtype=x.dtype, device=x.device
                )
                rest = rest - taken
                is_left = is_left.unsqueeze(-1) & is_left.unsqueeze(-2)
            total = total + torch.where(is_left, rest, 0.0) / self._delta
        return total.to(phi.dtype)


def _copied(U: Tensor | None) -> Tensor | None:
    return None if U is None else U.clone(memory_format=torch.contiguous_format)


def _what_it_reads(block: Block) -> str:
    if block.is_exact:
        return "one"
    return "both" if block.is_joint else "phi"


def _with_one(phi: Tensor) -> Tensor:
    return torch.cat([phi, torch.ones_like(phi[..., :1])], dim=-1)


def _from_eigenbasis(U_G: Tensor | None, along: Tensor, diagonal: bool) -> Tensor:
    if U_G is None:
        return along if diagonal else torch.diag_embed(along)
    if diagonal:
        return along @ U_G.square().mT
    return (U_G * along.unsqueeze(-2)) @ U_G.mT


def _product(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    return (left * right).sum(-1) if diagonal else left @ right.mT


def _sum(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term
