"""Directions: the eigenbases of Kronecker factors, as far as data determine them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.operators import eigh as decomposition
from laplace_debias.operators.structures.eigen_kronecker import coordinates, is_thin

# If two eigenvalues differ by less than this fraction of the largest one, rounding mixes their
# eigenvectors: the error of the angle between these is the rounding over the difference.
_RESOLUTION = 1e-7
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
# Rows of at least this many columns have thin directions; fewer columns are cheaper in full.
_THIN_FROM = 256
# Of products of more numbers than these, and of at least so many columns, only one of two symmetric
# halves is computed, in strips. Smaller products take less time in full; measured on one thread of
# a processor with AVX-512, for 64 to 16,384 rows of 25 to 4,608 columns.
_WHOLE_UP_TO = 2**16
_STRIPS_FROM = 128
_NUM_STRIPS = 4


@dataclass(frozen=True)
class GramFactor:
    """A factor that is kept as rows, because these are fewer than its dimension.

    The factor is `rowsᵀ rows`, plus an unknown remainder of known trace in other directions.

    Attributes:
        rows: `[n, *groups, d]`; without `max_rows`, n is at most half of d.
        residual_trace: The trace of the remainder.
        max_rows: The number of rows above which a sum keeps only the leading directions, half as
            many; None to keep all rows.
    """

    rows: Float[Tensor, "n *groups d"]
    residual_trace: Float[Tensor, ""] | float = 0.0
    max_rows: int | None = None

    def __add__(self, other: "Factor") -> "Factor":
        """The sum of two factors; a matrix if one is, or if the rows are many."""
        if isinstance(other, Tensor):
            return moments(self.rows) + other
        rows = torch.cat([self.rows, other.rows])
        trace = self.residual_trace + other.residual_trace
        total = GramFactor(rows, trace, self.max_rows).compressed()
        are_few = self.max_rows is not None or 2 * len(rows) <= rows.shape[-1]
        return total if are_few else moments(rows)

    __radd__ = __add__

    def __mul__(self, number: float) -> "GramFactor":
        return GramFactor(self.rows * number**0.5, self.residual_trace * number, self.max_rows)

    def __truediv__(self, number: float) -> "GramFactor":
        return self * (1 / number)

    def compressed(self) -> "GramFactor":
        """Compute the leading directions, if there are more rows than `max_rows`.

        The trace of the others joins the remainder.
        """
        if self.max_rows is None or len(self.rows) <= self.max_rows:
            return self
        values, vectors = decomposition.eigh(self.rows @ self.rows.mT, "the products of rows")
        num_dropped = len(values) - self.max_rows // 2
        trace = self.residual_trace + values[:num_dropped].clamp_min(0).sum()
        return GramFactor(vectors[:, num_dropped:].mT @ self.rows, trace, self.max_rows)

    def to(self, dtype: torch.dtype) -> "GramFactor":
        """Convert to another dtype."""
        return replace(self, rows=self.rows.to(dtype))

    @property
    def has_thin_directions(self) -> bool:
        """Whether the directions are only those that the rows span."""
        is_wide = self.rows.ndim == 2 and self.rows.shape[1] >= _THIN_FROM
        return self.max_rows is not None or is_wide


def moments(rows: Float[Tensor, "n *groups d"]) -> Float[Tensor, "*groups d d"]:
    """Compute `rowsᵀ rows`."""
    if rows.ndim == 2 and not _takes_strips(rows):
        return rows.T @ rows
    total = rows.new_zeros(*rows.shape[1:], rows.shape[-1])
    add_moments(total, rows)
    return total


def add_moments(total: Float[Tensor, "*groups d d"], rows: Float[Tensor, "n *groups d"]) -> None:
    """Add `rowsᵀ rows` to a sum; only one of two symmetric halves is computed where that pays."""
    size = rows.shape[-1]
    if rows.ndim == 3:
        groups = rows.transpose(0, 1)
        total.baddbmm_(groups.mT, groups)
    elif not _takes_strips(rows):
        total.addmm_(rows.T, rows)
    else:
        step = -(-size // _NUM_STRIPS)
        for start in range(0, size, step):
            stop = min(start + step, size)
            upper = total[start:stop, start:]
            upper.addmm_(rows[:, start:stop].T, rows[:, start:])
            total[stop:, start:stop] = upper[:, stop - start :].T


def _takes_strips(rows: Float[Tensor, "n d"]) -> bool:
    """Whether computing one of two symmetric halves of the product in strips takes less time."""
    return rows.numel() > _WHOLE_UP_TO and rows.shape[1] >= _STRIPS_FROM


# A matrix `[*groups, d, d]`, the diagonal of one, `[d]`, or rows.
Factor = Tensor | GramFactor
# Eigenvalues and eigenvectors; None for the coordinate axes.
Eigenpairs = tuple[Float[Tensor, "*groups values"], Float[Tensor, "*groups d r"] | None]


class Eigenbasis(NamedTuple):
    """The directions of a block, and the curvature of its factors along them.

    Eigenvectors are columns, by descending eigenvalue; None means the coordinate axes. Thin
    directions (r < d) do not span the null space: then there are r + 1 eigenvalues, the last one
    the mean of those in the remaining directions.
    """

    U_G: Float[Tensor, "*groups d_out r_G"] | None
    U_A: Float[Tensor, "*groups d_in r_A"] | None
    eigenvalues_G: Float[Tensor, "*groups rows"]
    eigenvalues_A: Float[Tensor, "*groups columns"]

    def directions(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return U_G and U_A in another dtype."""
        U_G = None if self.U_G is None else self.U_G.to(dtype)
        U_A = None if self.U_A is None else self.U_A.to(dtype)
        return U_G, U_A

    def to(self, dtype: torch.dtype) -> "Eigenbasis":
        """Convert the directions and the eigenvalues to another dtype."""
        U_G, U_A = self.directions(dtype)
        return Eigenbasis(U_G, U_A, self.eigenvalues_G.to(dtype), self.eigenvalues_A.to(dtype))

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Return the eigenvalues and eigenvectors of G, and those of A."""
        return (self.eigenvalues_G, self.U_G), (self.eigenvalues_A, self.U_A)

    def pooled(
        self, measured: Float[Tensor, "*groups rows columns"], dtype: torch.dtype
    ) -> Float[Tensor, "*groups rows columns"]:
        """Average magnitudes over directions whose eigenvalues nearly coincide.

        The data do not determine which basis of such an eigenspace an eigendecomposition returns.

        Args:
            measured: Curvature along each pair of directions of G and A.
            dtype: The dtype that the factors were computed in, whose rounding decides which
                eigenvalues coincide.
        """
        # Eigenvalues of the block are products of those of G and A.
        largest_G = self.eigenvalues_G.amax(-1, keepdim=True)
        largest_A = self.eigenvalues_A.amax(-1, keepdim=True)
        if self.U_G is not None:
            eigenvalues = self.eigenvalues_G * largest_A
            remaining = num_remaining(self.U_G)
            measured = average_degenerate(measured, eigenvalues, dtype, remaining)
        if self.U_A is not None:
            eigenvalues = self.eigenvalues_A * largest_G
            remaining = num_remaining(self.U_A)
            measured = average_degenerate(measured.mT, eigenvalues, dtype, remaining).mT
        # A file stores them contiguously. Products add in the order of memory, so that a posterior
        # and its file give the same bits.
        return measured.contiguous()


def num_remaining(U: Tensor) -> int:
    """Count the directions that share the last magnitude: d − r if `U` is thin, else 1."""
    return U.shape[-2] - U.shape[-1] if is_thin(U) else 1


def trace_along(
    curvature: Float[Tensor, "*groups values"], U: Float[Tensor, "*groups d r"] | None
) -> Float[Tensor, " *groups"]:
    """Compute a factor's trace from its curvature along all directions."""
    if not is_thin(U):
        return curvature.sum(-1)
    return curvature[..., :-1].sum(-1) + num_remaining(U) * curvature[..., -1]


def outer(
    curvature_G: Float[Tensor, "*groups d_out"], curvature_A: Float[Tensor, "*groups d_in"]
) -> Float[Tensor, "*groups d_out d_in"]:
    """Compute all products of two factors' curvatures, group by group."""
    return curvature_G.unsqueeze(-1) * curvature_A.unsqueeze(-2)


def eigh(factor: Factor, description: str = "the factor") -> Eigenpairs:
    """Compute descending eigenvalues and eigenvectors, or the entries of a diagonal factor."""
    return eigh_of_each([factor], description)[0]


def eigh_of_each(factors: Sequence[Factor], description: str) -> list[Eigenpairs]:
    """Decompose several factors as `eigh` does, those of one shape together.

    The eigenvectors of rows are those that span them, followed by others of the null space: in
    double precision, a decomposition of `[n, n]` coordinates loses no digit. Wide rows have thin
    directions: only the eigenvectors that span them, and one eigenvalue more, the mean in the
    remaining directions.

    The sign of an eigenvector is LAPACK's choice, and a sample depends on it. Here every
    eigenvector has a positive product with one fixed vector, so that other machines draw the same
    samples.
    """
    if isinstance(factors[0], Tensor):
        if factors[0].ndim == 1:
            return [(factor, None) for factor in factors]  # type: ignore[misc]
        matrices = cast("list[Tensor]", list(factors))
        # A single matrix is not copied.
        stacked = torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)
        values, vectors = decomposition.eigh(stacked, description)
        # Values below zero are rounding errors.
        return list(zip(values.flip(-1).clamp_min(0), _signed(vectors.flip(-1)), strict=True))
    gram_factors = cast("Sequence[GramFactor]", factors)
    columns = torch.stack([factor.rows for factor in gram_factors]).movedim(1, -1)
    if not factors[0].has_thin_directions:
        return list(zip(*_complete_pairs(columns, description), strict=True))
    d = columns.shape[-2]
    Q, R = torch.linalg.qr(columns)
    values, vectors = decomposition.eigh(R @ R.mT, description)
    values = values.flip(-1).clamp_min(0)
    directions = (Q @ vectors).flip(-1)
    pairs: list[Eigenpairs] = []
    for factor, factor_values, U in zip(gram_factors, values, directions, strict=True):
        rank = max(1, numerical_rank(factor_values))
        eigenvalues = F.pad(factor_values[:rank], (0, 1))
        eigenvalues[-1] = factor.residual_trace / (d - rank)
        pairs.append((eigenvalues, _signed(U[:, :rank].mT.contiguous().mT)))
    return pairs


def eigh_in_full(
    rows: Float[Tensor, "n d"], description: str
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Compute all d descending eigenvalues and eigenvectors of `rowsᵀ rows`, for n ≤ d rows."""
    return _complete_pairs(rows.mT, description)


def _complete_pairs(
    columns: Float[Tensor, "*batch d n"], description: str
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d d"]]:
    """Compute all eigenpairs of the products of columns, those of the null space last."""
    d, n = columns.shape[-2:]
    Q, R = torch.linalg.qr(columns, mode="complete")
    R = R[..., :n, :]
    values, vectors = decomposition.eigh(R @ R.mT, description)
    values = values.flip(-1).clamp_min(0)
    directions = (Q[..., :n] @ vectors).flip(-1)
    # Eigenvectors lie one after the other in memory, as torch has them.
    U = torch.cat([directions.mT, Q[..., n:].mT], -2).mT
    return F.pad(values, (0, d - n)), _signed(U)


def _signed(vectors: Float[Tensor, "*groups d r"]) -> Float[Tensor, "*groups d r"]:
    """Return the eigenvectors, in place, each with a positive product with one fixed vector."""
    # The entries follow no pattern that eigenvectors have: a vector of ones would be orthogonal to
    # every [1, -1], and rounding would choose the sign.
    size = vectors.shape[-2]
    numbers = torch.arange(1, size + 1, dtype=vectors.dtype, device=vectors.device)
    products = (numbers * _GOLDEN_RATIO).frac() @ vectors
    return vectors.mul_(torch.where(products < 0, -1.0, 1.0).to(vectors).unsqueeze(-2))


def numerical_rank(values: Float[Tensor, " d"], dtype: torch.dtype | None = None) -> int:
    """Count the eigenvalues that exceed the rounding errors of a dtype."""
    if not len(values):
        return 0
    # In units of the largest eigenvalue, sums of rounded products have an error of a few units of
    # rounding, and a decomposition in double precision one that grows as the root of the size.
    error_of_sums = 8 * torch.finfo(values.dtype if dtype is None else dtype).eps
    error_of_decomposition = 4 * len(values) ** 0.5 * torch.finfo(torch.float64).eps
    return int((values > max(error_of_sums, error_of_decomposition) * values[0]).sum())


def resolution(dtype: torch.dtype) -> float:
    """Return the least relative gap of eigenvalues that determines eigenvectors."""
    return max(_RESOLUTION, 8 * torch.finfo(dtype).eps)


def average_degenerate(
    measured: Float[Tensor, "*entries"],
    eigenvalues: Float[Tensor, "*groups d"],
    dtype: torch.dtype,
    remaining: int = 1,
) -> Float[Tensor, "*entries"]:
    r"""Average curvature along eigenvectors over those whose eigenvalues nearly coincide.

    Any orthonormal basis of an eigenspace consists of eigenvectors, above all in the null space:
    which basis results depends on the order of the examples, on the batch size and on the machine,
    and so does the curvature that *other* data have along it. The mean over the eigenspace depends
    on none of them, and is the expected curvature along a random basis. With a weight k that is 1
    up to half the `resolution`, falls linearly and is 0 from the full resolution on,

    $$\tilde\Lambda_i = \frac{\sum_j k(\lambda_i - \lambda_j)\,\Lambda_j}
    {\sum_j k(\lambda_i - \lambda_j)},$$

    the quotient of two traces of functions of the matrix, and so continuous in it.

    A matrix may also be only the rounding errors of a sum that cancels: gradients at the keys of
    attention add up to zero over positions. So if all eigenvalues are below the square of the
    resolution, as a fraction of the measured curvature, the average is over all eigenvectors. The
    columns of `measured` are averaged one by one; the last of the descending eigenvalues is for
    `remaining` eigenvectors.
    """
    if eigenvalues.shape[-1] == 0:
        return measured
    if eigenvalues.ndim > 1 and measured.ndim == eigenvalues.ndim:
        columns = measured.unsqueeze(-1)
        return average_degenerate(columns, eigenvalues, dtype, remaining).squeeze(-1)
    counts = torch.ones_like(eigenvalues)
    counts[..., -1] = remaining
    largest = eigenvalues[..., :1]
    column_dims = tuple(range(eigenvalues.ndim - 1, measured.ndim))
    least = resolution(dtype) ** 2 * measured.amax(column_dims)
    is_one_space = largest.squeeze(-1) <= least
    mean = measured.mean(eigenvalues.ndim - 1, keepdim=True).expand_as(measured)
    if remaining > 1:
        weighted = torch.tensordot(counts / counts.sum(), measured.to(eigenvalues), 1)
        mean = weighted.to(measured).expand_as(measured)
    if bool(is_one_space.all()):
        return mean
    width = resolution(dtype) * largest
    are_close = (eigenvalues[..., :-1] - eigenvalues[..., 1:] < width).any(-1)
    if not bool((is_one_space | are_close).any()):
        return measured
    gaps = (eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2)).abs() / width.unsqueeze(-1)
    weights = (2 - 2 * gaps).clamp(0, 1) * counts.unsqueeze(-2)
    weights = weights / weights.sum(-1, keepdim=True)
    averaged = (weights @ measured.to(eigenvalues)).to(measured)
    if eigenvalues.ndim == 1:
        return averaged
    return torch.where(is_one_space[..., None, None], mean, averaged)


def directional_curvature(
    factor: Factor, U: Float[Tensor, "*groups d r"] | None
) -> Float[Tensor, "*groups values"]:
    r"""Compute a factor's curvature along the columns of U, $\mathrm{diag}(U^\top F U)$ (Eq. 9).

    If U is thin, its mean along all other directions follows.
    """
    if isinstance(factor, GramFactor):
        return sum_remainder(coordinates(factor.rows, U).square().sum(0), U)
    if factor.ndim == 1:
        return factor if U is None else U.square().T @ factor
    if U is None:
        return factor.diagonal(dim1=-2, dim2=-1)
    return ((factor @ U) * U).sum(-2).clamp_min(0)


def sum_remainder(
    squares: Float[Tensor, "*n columns"], U: Tensor | None
) -> Float[Tensor, "*n values"]:
    """Replace the squares in the directions that thin ones do not span by their mean.

    Squares are those of coordinates in the frame of thin directions, `[..., r + d]`; they are
    returned unchanged if U is not thin.
    """
    if not is_thin(U):
        return squares
    spanned, remainder = squares.split([U.shape[-1], U.shape[-2]], -1)
    return torch.cat([spanned, remainder.sum(-1, keepdim=True) / num_remaining(U)], -1)


def ekfac_magnitudes(
    record: BlockRecord, U_G: Tensor | None, U_A: Tensor | None
) -> Float[Tensor, "*groups d_out d_in"]:
    r"""Compute the exact curvature along a block's directions, summed over examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    block = record.block
    is_linear = block.rule.is_linear and not block.is_exact
    total: Tensor | None = None
    if is_linear and len(record.inputs) == 1 and record.inputs[0].ndim == 2:
        # One position: the square of the outer product is the outer product of the squares.
        activations = block.rule.activations(record.layer, block, record.inputs[0])
        a = coordinates(activations[:, 0], U_A)
        rows = coordinates(record.columns()[0][..., 0], U_G)
        total = rows.square().sum(0).T @ a.square()
    else:
        # A frame has one more coordinate for each thin direction.
        frame = [
            d + U.shape[-1] if is_thin(U) else d
            for d, U in zip(block.shape, (U_G, U_A), strict=True)
        ]
        for _, J, columns in rotated_jacobians(record, U_G, U_A):
            squares = J.square().sum((0, 1))
            if total is None and columns is None and list(squares.shape[-2:]) == frame:
                total = squares
                continue
            if total is None:
                total = squares.new_zeros(*squares.shape[:-2], *frame)
            if columns is None:
                total[..., : squares.shape[-2], : squares.shape[-1]] += squares
            else:
                total.index_add_(1, columns, squares)
    assert total is not None
    return sum_remainder(sum_remainder(total, U_A).mT, U_G).mT
