"""The information of earlier data, to which the information of new data is added."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import append_dims
from laplace_debias.curvature.fits.context import FactorScales
from laplace_debias.curvature.fits.factor_keys import FactorKey, Side
from laplace_debias.curvature.fits.factor_sums import FactorSums
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.directions import is_thin


@dataclass(frozen=True, eq=False)
class Information:
    """The information of earlier data: the number of examples times the mean loss's curvature.

    Attributes:
        curvature: C, block by block.
        weight: The number of examples N, so that the information is N C.
        factor_scales: The scales of K-FAC's factors, by the block's name; empty for a curvature
            that is not a product of factors, or if the scales are not known.
    """

    curvature: BlockDiagonal
    weight: float
    factor_scales: Mapping[str, FactorScales] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Information":
        """Move the curvature and the scales to a device."""
        factor_scales = {name: scales.to(device) for name, scales in self.factor_scales.items()}
        return Information(self.curvature.to(device), self.weight, factor_scales)


@dataclass(frozen=True)
class ExampleCounts:
    """Numbers of examples, which weight the information of earlier and of new data.

    Attributes:
        num_earlier: The number of earlier examples.
        num_new: The number of new examples.
        weight_read: The total weight of the new examples that were read.
    """

    num_earlier: float
    num_new: float
    weight_read: float

    @classmethod
    def for_update(
        cls, information: Information, num_data: int | None, totals: DataTotals
    ) -> "ExampleCounts":
        """Count the new examples by `num_data` or by the weights of the examples that were read."""
        num_new = totals.weight if num_data is None else num_data
        return cls(information.weight, num_new, totals.weight)

    @property
    def total(self) -> float:
        """The number of all examples."""
        return self.num_earlier + self.num_new

    @property
    def scale(self) -> float:
        """The factor that scales sums over the examples that were read to all new examples."""
        return self.num_new / self.weight_read

    def mean(self, earlier: Tensor, sums: Tensor) -> Tensor:
        """Average earlier means and sums over the new examples, in the dtype of the sums."""
        return (self.num_earlier * earlier.to(sums) + self.scale * sums) / self.total


def add_earlier_factors(
    sums: FactorSums, information: Information, counts: ExampleCounts, totals: DataTotals
) -> DataTotals:
    r"""Add the earlier factors to the factor sums of new data, in place.

    The results are the sums of K-FAC on all data. For the earlier curvature $G_1 \otimes A_1$ and
    the new sums $\Sigma G_2$ and $\Sigma A_2$, they are $N_1 G_1 + s \Sigma G_2$ and
    $M_1 A_1 + s \Sigma A_2$. Here, s is `counts.scale`, $N_1$ is the number of earlier examples,
    and $M_1$ is the number of these examples that have a position in the layer.

    Args:
        sums: The factor sums of the new data.
        information: The information of the earlier data, with the scales of all factors.
        counts: The numbers of examples.
        totals: The totals of the new data.

    Returns:
        The totals of all data, without the loss.
    """
    all_totals = DataTotals(weight=counts.total)
    for block, (new_G, new_A) in sums.items():
        earlier = information.curvature.blocks[block.name]
        assert isinstance(earlier, EigenKronecker)
        earlier_scales = information.factor_scales[block.name]
        num_earlier_in_A = counts.num_earlier * earlier_scales.share_A
        num_new_in_A = counts.scale * totals.input_weight(block)
        all_totals.add_input_weight(block, num_earlier_in_A + num_new_in_A)
        eigenvalues_G, eigenvalues_A = factor_eigenvalues(earlier, earlier_scales.trace_A)
        key_G = FactorKey(block, Side.G)
        key_A = FactorKey(block, Side.A)
        earlier_G = _rebuild_factor(key_G, counts.num_earlier * eigenvalues_G, earlier.U_G, new_G)
        earlier_A = _rebuild_factor(key_A, num_earlier_in_A * eigenvalues_A, earlier.U_A, new_A)
        scales_G, scales_A = _scales_of_new_sums(
            earlier, counts.scale, all_totals.input_divisor(block) / totals.input_divisor(block)
        )
        sums[block] = (
            earlier_G + _scale_factor(new_G, scales_G),
            earlier_A + _scale_factor(new_A, scales_A),
        )
    return all_totals


def _scales_of_new_sums(
    earlier: EigenKronecker, scale: float, scale_to_all: float
) -> tuple[Float[Tensor, " *groups"], Float[Tensor, " *groups"]]:
    """Return the numbers by which the new sums of G and of A are multiplied, one per group.

    A group whose earlier curvature is zero has no earlier A. Its A on all data is the mean over the
    new data, so only G contains the share of the new data.

    Args:
        earlier: The earlier curvature.
        scale: The factor that scales sums over the examples that were read to all new examples.
        scale_to_all: The factor that scales the new sum of A to the examples of all data.
    """
    is_zero = earlier.magnitudes.flatten(-2).amax(-1) == 0
    scales_G = torch.full_like(is_zero, scale, dtype=torch.float64)
    return scales_G, torch.where(is_zero, scale_to_all, scales_G)


def factor_eigenvalues(
    curvature: EigenKronecker, trace_A: Float[Tensor, " *groups"]
) -> tuple[Float[Tensor, "*groups rows"], Float[Tensor, "*groups columns"]]:
    r"""Compute the eigenvalues of G and of A, whose products are the eigenvalues of $G \otimes A$.

    Args:
        curvature: The Kronecker product.
        trace_A: The trace of A.
    """
    # With thin directions, one magnitude is shared by several directions.
    counts_G = curvature.output_directions.multiplicities(curvature.magnitudes)
    counts_A = curvature.input_directions.multiplicities(curvature.magnitudes)
    # The partial traces of G ⊗ A are G · tr(A) and A · tr(G).
    eigenvalues_G_times_trace_A = curvature.magnitudes @ counts_A
    eigenvalues_A_times_trace_G = curvature.magnitudes.mT @ counts_G
    trace_A = trace_A.unsqueeze(-1)
    trace_G = (eigenvalues_G_times_trace_A @ counts_G).unsqueeze(-1) / trace_A
    # If the curvature is zero, the traces may be zero, and so are the eigenvalues.
    eigenvalues_G = (eigenvalues_G_times_trace_A / trace_A).nan_to_num(0.0)
    eigenvalues_A = (eigenvalues_A_times_trace_G / trace_G).nan_to_num(0.0)
    return eigenvalues_G, eigenvalues_A


def _scale_factor(factor: Factor, scales: Float[Tensor, " *groups"]) -> Factor:
    """Multiply the factor of each group by a number; a diagonal factor has no groups."""
    if isinstance(factor, Tensor):
        return factor * append_dims(scales, factor.ndim).to(factor)
    if not scales.ndim:
        return factor * float(scales)
    rows = factor.rows * scales.sqrt().unsqueeze(-1).to(factor.rows)
    return GramFactor(rows, factor.residual_trace, factor.max_rows)


def _rebuild_factor(
    key: FactorKey,
    eigenvalues: Float[Tensor, "*groups values"],
    U: Float[Tensor, "*groups d r"] | None,
    new: Factor,
) -> Factor:
    r"""Build a factor from its eigenvalues and eigenvectors, in the dtype of the new factor.

    The factor is $U\,\mathrm{diag}(\lambda)\,U^\top$ or, if the other directions of a thin basis
    share the eigenvalue ρ, $U\,\mathrm{diag}(\lambda - \rho)\,U^\top + \rho I$. The result is a
    vector if the factor is diagonal, and otherwise rows or matrices.

    Args:
        key: The factor's block and side.
        eigenvalues: The eigenvalues; for a thin basis, the last one is shared by all other
            directions.
        U: The eigenvectors. None means the coordinate axes.
        new: The factor of the new data, to which the result is added.
    """
    dtype = new.dtype if isinstance(new, Tensor) else new.rows.dtype
    values = eigenvalues.to(dtype)
    if U is None:
        return values
    U = U.to(dtype)
    if not is_thin(U):
        return (U * values.unsqueeze(-2)) @ U.mT
    d, r = U.shape[-2:]
    remainder = values[..., -1:]
    # A streamed factor is never a matrix. Any other factor can be kept as rows, which need less
    # memory, if it has no groups and is zero outside of the eigenvectors.
    if key.is_streamed or (U.ndim == 2 and not remainder.any()):
        rows = (U * values[:r].sqrt()).mT
        return GramFactor(rows, remainder.squeeze(-1) * (d - r), key.max_rows).compressed()
    leading = (U * (values[..., :r] - remainder).unsqueeze(-2)) @ U.mT
    return leading + torch.diag_embed(remainder.expand(*U.shape[:-2], d))
