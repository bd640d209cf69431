"""Functional covariance of posteriors whose directions span all parameters together."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.fits.inducing import InducingDirections, block_rows
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.jacobians import dense_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.structures.base import CurvatureBlock
from laplace_debias.laplace.functional.accumulator import CovarianceAccumulator
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker, LowRankPlusDiagonal

# The number of rows of U that are converted to double precision at a time.
_ROWS = 2**18


class DenseAccumulator(CovarianceAccumulator):
    r"""The covariance $J P^{-1} J^\top$, computed from the coordinates $JU$ along the directions.

    $$J P^{-1} J^\top = JU\,\mathrm{diag}\big(\tfrac{1}{N\lambda + \delta}\big)(JU)^\top
    + \tfrac{1}{N\tau + \delta}\big(JJ^\top - JU(JU)^\top\big)$$

    Here τ is the curvature of all other directions, which may be zero. Both terms are summed layer
    by layer, in double precision because the last term is a difference. If U is rounded to single
    precision, the error of the last term is the rounding error divided by δ. For
    $N\lambda\gg\delta$, this exceeds the covariance and can have either sign, so `orthonormaliser`
    first corrects the rounding of U.

    The posterior has one δ and a single block, whose rows are the parameters of the blocks of all
    layers, one after the other.
    """

    # The factor that makes the directions orthonormal; None if they already are.
    _root: Float[Tensor, "k k"] | None
    # Whether rows of J have components outside the directions.
    _leaves_residual: bool

    def _read_directions(self) -> None:
        """Read the directions of each block, and compute the factor that makes them orthonormal."""
        directions = _directions(self.posterior).split([block.size for block in self.blocks])
        self._directions = dict(zip(self.blocks, directions, strict=True))
        self._num_directions = directions[0].shape[1]
        self._root = orthonormaliser(self.posterior)
        self._leaves_residual = self._root is not None

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        records: Iterable[BlockRecord],
        outputs: Int[Tensor, "#batch columns"] | None,
    ) -> None:
        """Add the covariances under the posterior that all outputs share; `outputs` is not used."""
        gram, coordinates = self._products(into, records)
        self._add_products(into, gram, coordinates, self.posterior.curvature.blocks[DENSE_BLOCK])

    def _add_products(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        gram: Float[Tensor, "batch columns *again"],
        coordinates: Float[Tensor, "batch columns k"],
        dense_block: CurvatureBlock,
    ) -> None:
        """Add the covariances under one dense block, computed from J Jᵀ and J U."""
        residual = None
        magnitudes = dense_block.magnitudes.flatten().double()
        remainder = 0.0
        if isinstance(dense_block, LowRankPlusDiagonal):
            remainder = float(dense_block.diagonal)
            magnitudes = magnitudes + remainder
        if self._root is not None:
            coordinates = torch.linalg.solve_triangular(
                self._root.mT, coordinates, upper=True, left=False
            )
        if self._leaves_residual:
            residual = self._residual_products(gram, coordinates, dense_block.shape[0])
        deltas = self.prior_precisions[:, 0].double()
        for point, delta in zip(into, deltas, strict=True):
            weights = 1 / (self.posterior.curvature_weight * magnitudes + delta)
            total = self._product(coordinates * weights, coordinates)
            if residual is not None:
                total = total + residual / (self.posterior.curvature_weight * remainder + delta)
            point += total.to(point)

    def _products(
        self, into: Float[Tensor, "grid batch columns *again"], records: Iterable[BlockRecord]
    ) -> tuple[Float[Tensor, "batch columns *again"], Float[Tensor, "batch columns k"]]:
        """Compute J Jᵀ (or its diagonal), in the shape of `into[0]`, and J U, in float64."""
        gram = into.new_zeros(into.shape[1:], dtype=torch.float64)
        coordinates = gram.new_zeros(*into.shape[1:3], self._num_directions)
        for record in records:
            U = self._directions[record.block]
            for examples, rows in dense_jacobians(record, self._jacobians):
                rows = rows.double()
                gram[examples] += self._product(rows, rows)
                coordinates[examples] += rows @ U.double()
            # Release the memory before the rows of the next block are computed.
            del record, rows
        return gram, coordinates

    def _residual_products(self, gram: Tensor, coordinates: Tensor, size: int) -> Tensor:
        """Compute products of the components outside the directions, rounding errors set to 0."""
        residual = gram - self._product(coordinates, coordinates)
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


class KernelAccumulator(DenseAccumulator):
    r"""The covariance $J P^{-1} J^\top$ for directions spanned by inducing inputs.

    The coordinates along these directions are kernels, $JU = (J J_Z^\top) W$. The rows of J are
    kept until all blocks have been added.
    """

    @property
    def kept_row_bytes(self) -> int:
        """The number of bytes of a Jacobian row in double precision."""
        return 8 * sum(block.size for block in self.blocks)

    def _read_directions(self) -> None:
        """Read the directions, which are orthonormal in double precision."""
        self._root = None
        self._leaves_residual = True

    def _products(
        self, into: Float[Tensor, "grid batch columns *again"], records: Iterable[BlockRecord]
    ) -> tuple[Float[Tensor, "batch columns *again"], Float[Tensor, "batch columns k"]]:
        """Compute J Jᵀ (or its diagonal), in the shape of `into[0]`, and J U, in float64."""
        gram, rows_by_block = self._rows(into, records)
        directions = inducing_directions(self.posterior.curvature.blocks[DENSE_BLOCK])
        if not rows_by_block:
            return gram, gram.new_zeros(*into.shape[1:3], directions.shape[1])
        coordinates = directions.coordinates(rows_by_block)
        return gram, coordinates.view(*into.shape[1:3], coordinates.shape[1])

    def _rows(
        self, into: Float[Tensor, "grid batch columns *again"], records: Iterable[BlockRecord]
    ) -> tuple[Float[Tensor, "batch columns *again"], dict[Block, Float[Tensor, "rows d"]]]:
        """Compute J Jᵀ, or its diagonal, and the rows of J by block, in double precision."""
        gram = into.new_zeros(into.shape[1:], dtype=torch.float64)
        rows_by_block = {}
        for record in records:
            rows = block_rows(record, self._jacobians)
            gram += self._product(rows, rows)
            rows_by_block[record.block] = rows.flatten(0, 1)
        return gram, rows_by_block


class IndependentAccumulator(KernelAccumulator):
    """The variances of outputs that have separate posteriors, and are therefore uncorrelated."""

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        records: Iterable[BlockRecord],
        outputs: Int[Tensor, "#batch columns"] | None,
    ) -> None:
        """Add the variances of each output under its own posterior; covariances remain 0.

        Raises:
            ValueError: If an output has no posterior, because the model had fewer outputs at the
                fit.
        """
        assert outputs is not None
        num_outputs = len(self.posterior.curvature.blocks)
        if outputs.max() >= num_outputs:
            raise ValueError(
                f"The posterior has a process for each of {num_outputs} outputs, but these inputs "
                "have more outputs than the inputs of the fit. Shorten the inputs, or fit with "
                "`independent_outputs=False`."
            )
        gram, rows_by_block = self._rows(into, records)
        if not rows_by_block:
            return
        outputs = outputs.expand(into.shape[1:3])
        for block in self.posterior.curvature.blocks.values():
            directions = inducing_directions(block)
            output = directions.inducing_rows.output
            assert output is not None
            is_output = outputs.eq(output)
            if not is_output.any():
                continue
            output_rows = {name: rows[is_output.flatten()] for name, rows in rows_by_block.items()}
            coordinates = gram.new_zeros(*outputs.shape, directions.shape[1])
            coordinates[is_output] = directions.coordinates(output_rows)
            is_pair = is_output
            if not self._diagonal:
                is_pair = is_output.unsqueeze(-1) & is_output.unsqueeze(-2)
            self._add_products(into, gram.where(is_pair, 0.0), coordinates, block)


def orthonormaliser(posterior: GaussianPosterior) -> Float[Tensor, "k k"] | None:
    """Compute the Cholesky factor L of UᵀU, which makes the columns of U L⁻ᵀ orthonormal.

    The factor is in float64; it is None if the directions form a complete basis.
    """
    U = _directions(posterior)
    if U.shape[0] == U.shape[1]:
        return None
    products = sum(rows.mT @ rows for rows in map(torch.Tensor.double, U.split(_ROWS)))
    return torch.linalg.cholesky(products)


def inducing_directions(block: CurvatureBlock) -> InducingDirections:
    """Return the directions of a block, which are spanned by inducing inputs."""
    assert isinstance(block, LowRankPlusDiagonal)
    assert isinstance(block.U, InducingDirections)
    return block.U


def dense_accumulator(posterior: GaussianPosterior) -> type[DenseAccumulator] | None:
    """Return the accumulator for a dense posterior, or None if the posterior has layer blocks."""
    block = next(iter(posterior.curvature.blocks.values()))
    if isinstance(block, LowRankPlusDiagonal) and isinstance(block.U, InducingDirections):
        return KernelAccumulator if block.U.inducing_rows.output is None else IndependentAccumulator
    return DenseAccumulator if DENSE_BLOCK in posterior.curvature.blocks else None


def _directions(posterior: GaussianPosterior) -> Float[Tensor, "parameters k"]:
    block = posterior.curvature.blocks[DENSE_BLOCK]
    if isinstance(block, EigenKronecker):
        assert block.U_G is not None
        return block.U_G
    return block.directions
