"""Directions: the eigenbases of Kronecker factors, and which of their vectors data determine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses, activations, output_gradients
from laplace_debias.operators import eigh as decomposition
from laplace_debias.operators.structures.eigen_kronecker import coordinates, is_thin

# Eigenvalues nearer than this share of the largest one belong to directions that rounding mixes:
# the angle between two such is off by rounding over their distance.
_RESOLUTION = 1e-7
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
# From so many columns on, rows have thin directions. Those of fewer are cheaper whole.
_THIN_FROM = 256
# Matrices of fewer columns are multiplied whole; wider ones gain from their symmetry.
_SYMMETRIC_FROM = 256


@dataclass(frozen=True)
class Rows:
    """A factor of few examples, or of few directions, of which no matrix `[d, d]` is made.

    It is `rowsᵀ rows`, of rows `[n, *groups, d]`, and an unknown rest of known trace in other
    directions. Without `most`, n is at most half of d. Of more rows than `most` a sum keeps the
    leading directions, half as many.
    """

    rows: Float[Tensor, "n *groups d"]
    rest: Float[Tensor, ""] | float = 0.0
    most: int | None = None

    def __add__(self, other: "Factor") -> "Factor":
        """The sum of two factors; a matrix if one is, or if the rows are many."""
        if isinstance(other, Tensor):
            return moments(self.rows) + other
        rows = torch.cat([self.rows, other.rows])
        total = Rows(rows, self.rest + other.rest, self.most).compressed()
        is_few = self.most is not None or 2 * len(rows) <= rows.shape[-1]
        return total if is_few else moments(rows)

    __radd__ = __add__

    def __mul__(self, number: float) -> "Rows":
        return Rows(self.rows * number**0.5, self.rest * number, self.most)

    def __truediv__(self, number: float) -> "Rows":
        return self * (1 / number)

    def compressed(self) -> "Rows":
        """The leading directions, if there are more rows than `most`; the others join the rest."""
        if self.most is None or len(self.rows) <= self.most:
            return self
        values, vectors = decomposition.eigh(self.rows @ self.rows.mT, "the products of rows")
        num_left = len(values) - self.most // 2
        rest = self.rest + values[:num_left].clamp_min(0).sum()
        return Rows(vectors[:, num_left:].mT @ self.rows, rest, self.most)

    def to(self, dtype: torch.dtype) -> "Rows":
        """The same in another dtype."""
        return replace(self, rows=self.rows.to(dtype))

    @property
    def has_thin_directions(self) -> bool:
        """Whether its directions are those that the rows span alone."""
        return self.most is not None or (self.rows.ndim == 2 and self.rows.shape[1] >= _THIN_FROM)


def moments(rows: Float[Tensor, "n *groups d"]) -> Float[Tensor, "*groups d d"]:
    """`rowsᵀ rows`."""
    total = rows.new_zeros(*rows.shape[1:], rows.shape[-1])
    add_moments(total, rows)
    return total


def add_moments(total: Float[Tensor, "*groups d d"], rows: Float[Tensor, "n *groups d"]) -> None:
    """Add `rowsᵀ rows` to a sum.

    Of each two symmetric halves one is computed where that pays.
    """
    size = rows.shape[-1]
    if rows.ndim == 3:
        of_groups = rows.transpose(0, 1)
        total.baddbmm_(of_groups.mT, of_groups)
    elif size < _SYMMETRIC_FROM:
        total.addmm_(rows.T, rows)
    else:
        step = -(-size // 8)
        for start in range(0, size, step):
            stop = min(start + step, size)
            upper = total[start:stop, start:]
            upper.addmm_(rows[:, start:stop].T, rows[:, start:])
            total[stop:, start:stop] = upper[:, stop - start :].T


# A matrix `[*groups, d, d]`, the diagonal of one, `[d]`, or rows.
Factor = Tensor | Rows
# Eigenvalues and eigenvectors; None for the coordinate axes.
Eigenpairs = tuple[Float[Tensor, "*groups values"], Float[Tensor, "*groups d r"] | None]


class Eigenbasis(NamedTuple):
    """Directions of a block, and the factors' own curvature along them.

    Eigenvectors are columns, by descending eigenvalue; None stands for the coordinate axes. Thin
    directions (r < d) leave the null space: then there are r + 1 eigenvalues, the last the mean of
    those that the directions leave.
    """

    U_G: Float[Tensor, "*groups d_out r_G"] | None
    U_A: Float[Tensor, "*groups d_in r_A"] | None
    along_G: Float[Tensor, "*groups rows"]
    along_A: Float[Tensor, "*groups columns"]

    def directions(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """U_G and U_A in another dtype."""
        U_G, U_A = self.U_G, self.U_A
        return None if U_G is None else U_G.to(dtype), None if U_A is None else U_A.to(dtype)

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Eigenvalues and eigenvectors of G, and of A."""
        return (self.along_G, self.U_G), (self.along_A, self.U_A)

    def pooled(
        self, measured: Float[Tensor, "*groups rows columns"], precision: torch.dtype
    ) -> Float[Tensor, "*groups rows columns"]:
        """Curvature along the directions, averaged over those that data cannot tell apart."""
        # In units of the block's curvature, not of one factor's.
        along_G = self.along_G * self.along_A.amax(-1, keepdim=True)
        along_A = self.along_A * self.along_G.amax(-1, keepdim=True)
        if self.U_G is not None:
            measured = pooled(measured, along_G, precision, left_by(self.U_G))
        if self.U_A is not None:
            measured = pooled(measured.mT, along_A, precision, left_by(self.U_A)).mT
        # As a file has them: their order in memory decides in which order products add.
        return measured.contiguous()


def left_by(U: Tensor) -> int:
    """How many directions the last magnitude stands for: those that thin ones leave, or one."""
    return U.shape[-2] - U.shape[-1] if is_thin(U) else 1


def outer(
    along_G: Float[Tensor, "*groups d_out"], along_A: Float[Tensor, "*groups d_in"]
) -> Float[Tensor, "*groups d_out d_in"]:
    """All products of two factors' curvatures, group by group."""
    return along_G.unsqueeze(-1) * along_A.unsqueeze(-2)


def eigh(factor: Factor, what: str = "the factor") -> Eigenpairs:
    """Eigenvalues, descending, and eigenvectors; of a diagonal factor its entries and None."""
    return eigh_of_each([factor], what)[0]


def eigh_of_each(factors: Sequence[Factor], what: str) -> list[Eigenpairs]:
    """As `eigh`, of factors of one kind and shape, all at once.

    Of rows the eigenvectors are those that span them, and others of their null space behind: in
    double precision, a decomposition of `[n, n]` coordinates loses no digit. Of wide rows they are
    thin: the others are left out, and one eigenvalue more is the mean of all theirs.

    An eigenvector's sign is LAPACK's choice, and a sample depends on it. Here every eigenvector has
    a positive product with one fixed vector, so that other machines draw the same samples.
    """
    if isinstance(factors[0], Tensor):
        if factors[0].ndim == 1:
            return [(factor, None) for factor in factors]  # type: ignore[misc]
        values, vectors = decomposition.eigh(torch.stack(factors), what)  # type: ignore[arg-type]
        # Below zero there is nothing but rounding.
        return list(zip(values.flip(-1).clamp_min(0), _signed(vectors.flip(-1)), strict=True))
    of_rows = cast("Sequence[Rows]", factors)
    columns = torch.stack([factor.rows for factor in of_rows]).movedim(1, -1)
    *_, d, n = columns.shape
    is_whole = not factors[0].has_thin_directions
    Q, R = torch.linalg.qr(columns, mode="complete" if is_whole else "reduced")
    R = R[..., :n, :]
    values, inner = decomposition.eigh(R @ R.mT, what)
    values, along = values.flip(-1).clamp_min(0), (Q[..., :n] @ inner).flip(-1)
    if is_whole:
        # Eigenvectors lie one after the other in memory, as torch has them.
        U = torch.cat([along.mT, Q[..., n:].mT], -2).mT
        return list(zip(F.pad(values, (0, d - n)), _signed(U), strict=True))
    pairs: list[Eigenpairs] = []
    for factor, of_factor, U in zip(of_rows, values, along, strict=True):
        rank = max(1, numerical_rank(of_factor))
        kept = F.pad(of_factor[:rank], (0, 1))
        kept[-1] = factor.rest / (d - rank)
        pairs.append((kept, _signed(U[:, :rank].mT.contiguous().mT)))
    return pairs


def _signed(vectors: Float[Tensor, "*groups d r"]) -> Float[Tensor, "*groups d r"]:
    """The eigenvectors, in place, each with a positive product with one fixed vector."""
    # The entries follow no pattern that eigenvectors have: a vector of ones would be orthogonal to
    # every [1, -1], and rounding would choose the sign.
    at = torch.arange(1, vectors.shape[-2] + 1, dtype=vectors.dtype, device=vectors.device)
    products = (at * _GOLDEN_RATIO).frac() @ vectors
    return vectors.mul_(torch.where(products < 0, -1.0, 1.0).to(vectors).unsqueeze(-2))


def numerical_rank(values: Float[Tensor, " d"], precision: torch.dtype | None = None) -> int:
    """How many descending eigenvalues are above the rounding of what they were computed in."""
    if not len(values):
        return 0
    computed = torch.finfo(values.dtype if precision is None else precision).eps
    # Sums of rounded products are off by few units of rounding of the largest eigenvalue, of which
    # a decomposition in double precision is off by a few times the square root of the size.
    decomposed = 4 * len(values) ** 0.5 * torch.finfo(torch.float64).eps
    return int((values > max(8 * computed, decomposed) * values[0]).sum())


def resolution(precision: torch.dtype) -> float:
    """The least gap of eigenvalues that determines eigenvectors, as a share of the largest."""
    return max(_RESOLUTION, 8 * torch.finfo(precision).eps)


def pooled(
    measured: Float[Tensor, "*entries"],
    values: Float[Tensor, "*groups d"],
    precision: torch.dtype,
    left: int = 1,
) -> Float[Tensor, "*entries"]:
    r"""Curvature along eigenvectors, averaged over those whose eigenvalues nearly coincide.

    Any orthonormal basis of the space of an eigenvalue is one of eigenvectors, of the null space
    above all: which one comes out depends on the order of the examples, on the batch size and on
    the machine. So does what *other* data measure along it. The mean over the space depends on
    none of them, and is what a basis chosen at random measures on average. With a weight k that is
    1 up to half the `resolution`, falls linearly and is 0 from the whole on,

    $$\tilde\Lambda_i = \frac{\sum_j k(\lambda_i - \lambda_j)\,\Lambda_j}
    {\sum_j k(\lambda_i - \lambda_j)},$$

    the quotient of two traces of functions of the matrix, and so continuous in it.

    A matrix may also be nothing but what rounding left of a sum that cancels: gradients at the keys
    of attention add up to zero over positions. So eigenvectors whose eigenvalues are all below the
    square of the resolution, as a share of the curvature measured, are averaged over as one space.
    The columns of `measured` are averaged one by one; the last of the descending eigenvalues stands
    for `left` eigenvectors.
    """
    if values.shape[-1] == 0:
        return measured
    if values.ndim > 1 and measured.ndim == values.ndim:
        return pooled(measured.unsqueeze(-1), values, precision, left).squeeze(-1)
    counts = torch.ones_like(values)
    counts[..., -1] = left
    largest = values[..., :1]
    over = tuple(range(values.ndim - 1, measured.ndim))
    is_one_space = largest.squeeze(-1) <= resolution(precision) ** 2 * measured.amax(over)
    mean = measured.mean(values.ndim - 1, keepdim=True).expand_as(measured)
    if left > 1:
        of_all = torch.tensordot(counts / counts.sum(), measured.to(values), 1)
        mean = of_all.to(measured).expand_as(measured)
    if bool(is_one_space.all()):
        return mean
    width = resolution(precision) * largest
    if not bool((is_one_space | (values[..., :-1] - values[..., 1:] < width).any(-1)).any()):
        return measured
    distances = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs() / width.unsqueeze(-1)
    weights = (2 - 2 * distances).clamp(0, 1) * counts.unsqueeze(-2)
    averaged = ((weights / weights.sum(-1, keepdim=True)) @ measured.to(values)).to(measured)
    if values.ndim == 1:
        return averaged
    return torch.where(is_one_space[..., None, None], mean, averaged)


def directional_curvature(
    factor: Factor, U: Float[Tensor, "*groups d r"] | None
) -> Float[Tensor, "*groups values"]:
    r"""Curvature of a factor along the columns of U, $\mathrm{diag}(U^\top F U)$ (Eq. 9).

    Behind it, where U is thin, its mean along all directions that U leaves.
    """
    if isinstance(factor, Rows):
        return folded(coordinates(factor.rows, U).square().sum(0), U)
    if factor.ndim == 1:
        return factor if U is None else U.square().T @ factor
    if U is None:
        return factor.diagonal(dim1=-2, dim2=-1)
    return ((factor @ U) * U).sum(-2).clamp_min(0)


def folded(squares: Float[Tensor, "*n columns"], U: Tensor | None) -> Float[Tensor, "*n values"]:
    """Squares of coordinates in the frame of thin directions, with a mean of those that it leaves.

    Squares are `[..., r + d]`, and left as they are where U is not thin.
    """
    if not is_thin(U):
        return squares
    along, rest = squares.split([U.shape[-1], U.shape[-2]], -1)
    return torch.cat([along, rest.sum(-1, keepdim=True) / left_by(U)], -1)


def ekfac_magnitudes(
    layer: nn.Module, block: Block, uses: Uses, U_G: Tensor | None, U_A: Tensor | None
) -> Float[Tensor, "*groups d_out d_in"]:
    r"""Exact curvature along a block's directions, summed over the batch's examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    is_linear = block.role == "weight" and isinstance(layer, nn.Linear)
    total: Tensor | None = None
    if is_linear and len(uses) == 1 and uses[0][0].ndim == 2:  # type: ignore[index,arg-type]
        # One position: the square of the outer product is the outer product of the squares.
        x, g = uses[0]  # type: ignore[index]
        a = coordinates(activations(layer, block, x)[:, 0], U_A)
        rows = coordinates(output_gradients(layer, block, g)[..., 0], U_G)
        total = rows.square().sum(0).T @ a.square()
    else:
        # Of thin directions a frame has as many coordinates more.
        sides = zip(block.shape, (U_G, U_A), strict=True)
        frame = [d + (U.shape[-1] if is_thin(U) else 0) for d, U in sides]
        for _, J, columns in rotated_jacobians(layer, block, uses, U_G, U_A):
            squares = J.square().sum((0, 1))
            if total is None:
                total = squares.new_zeros(*squares.shape[:-2], *frame)
            if columns is None:
                total[..., : squares.shape[-2], : squares.shape[-1]] += squares
            else:
                total.index_add_(1, columns, squares)
    assert total is not None
    return folded(folded(total, U_A).mT, U_G).mT
