"""Directions: the eigenbases of Kronecker factors, and which of their vectors data determine."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses, activations, output_gradients
from laplace_debias.operators import eigh as decomposition
from laplace_debias.operators.structures.eigen_kronecker import coordinates

# Eigenvalues nearer than this share of the largest one belong to directions that rounding mixes:
# the angle between two such is off by rounding over their distance.
_RESOLUTION = 1e-7
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclass(frozen=True)
class Eigenbasis:
    """Directions of a block, and the factors' own curvature along them.

    Attributes:
        U_G: Eigenvectors of G as columns, by descending eigenvalue, `[*groups, d_out, d_out]`; None
            for the coordinate axes.
        U_A: Likewise of A, `[*groups, d_in, d_in]`.
        along_G: Eigenvalues of G, `[*groups, d_out]`.
        along_A: Eigenvalues of A, `[*groups, d_in]`.
    """

    U_G: Float[Tensor, "*groups d_out d_out"] | None
    U_A: Float[Tensor, "*groups d_in d_in"] | None
    along_G: Float[Tensor, "*groups d_out"]
    along_A: Float[Tensor, "*groups d_in"]

    @property
    def magnitudes(self) -> Float[Tensor, "*groups d_out d_in"]:
        """The factors' own curvature along every direction, `λ_i(G) λ_j(A)`."""
        return outer(self.along_G, self.along_A)

    def pooled(
        self, measured: Float[Tensor, "*groups d_out d_in"], precision: torch.dtype
    ) -> Float[Tensor, "*groups d_out d_in"]:
        """Curvature along the directions, averaged over those that data cannot tell apart.

        Args:
            measured: Curvature measured along every pair of directions.
            precision: As `pooled` takes it.
        """
        # In units of the block's curvature, not of one factor's.
        along_G = self.along_G * self.along_A.amax(-1, keepdim=True)
        along_A = self.along_A * self.along_G.amax(-1, keepdim=True)
        if self.U_G is not None:
            measured = pooled(measured, along_G, precision)
        if self.U_A is not None:
            measured = pooled(measured.mT, along_A, precision).mT
        return measured


def outer(
    along_G: Float[Tensor, "*groups d_out"], along_A: Float[Tensor, "*groups d_in"]
) -> Float[Tensor, "*groups d_out d_in"]:
    """All products of two factors' curvatures, group by group."""
    return along_G.unsqueeze(-1) * along_A.unsqueeze(-2)


def eigenbasis(G: Tensor, A: Tensor, block: str) -> Eigenbasis:
    """The eigenbasis of `G ⊗ A`; of a diagonal factor, given as a vector, the coordinate axes.

    Args:
        G: `[*groups, d_out, d_out]`, or `[d_out]`.
        A: `[*groups, d_in, d_in]`, or `[d_in]`.
        block: Name of the block, for messages.

    Raises:
        ValueError: As `eigh`.
        torch.linalg.LinAlgError: As `eigh`.
    """
    along_G, U_G = eigh(G, f"factor G of {block}")
    along_A, U_A = eigh(A, f"factor A of {block}")
    return Eigenbasis(U_G, U_A, along_G, along_A)


def eigh(
    factor: Tensor, what: str = "the factor"
) -> tuple[Float[Tensor, "*groups d"], Float[Tensor, "*groups d d"] | None]:
    """Eigenvalues, descending, and eigenvectors; of a diagonal factor its entries and None.

    An eigenvector's sign is LAPACK's choice, and a sample depends on it. Here every eigenvector has
    a positive product with one fixed vector, so that other machines draw the same samples.

    Args:
        factor: A positive semi-definite matrix `[d, d]`, one for each group `[g, d, d]`, or the
            diagonal of one, `[d]`.
        what: What it is, for messages.

    Raises:
        ValueError: If it holds NaN or Inf.
        torch.linalg.LinAlgError: If it cannot be decomposed.
    """
    if factor.ndim == 1:
        return factor, None
    # A factor of few examples has few rows behind it.
    low_rank = decomposition.low_rank_eigh(factor, what) if factor.ndim == 2 else None
    values, vectors = low_rank or decomposition.eigh(factor, what)
    vectors = vectors.flip(-1)
    # The entries follow no pattern that eigenvectors have: a vector of ones would be orthogonal to
    # every [1, -1], and rounding would choose the sign.
    at = torch.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype, device=vectors.device)
    products = (at * _GOLDEN_RATIO).frac() @ vectors
    signs = torch.where(products < 0, -1.0, 1.0).to(vectors).unsqueeze(-2)
    # Below zero there is nothing but rounding.
    return values.flip(-1).clamp_min(0), vectors * signs


def resolution(precision: torch.dtype) -> float:
    """How far apart eigenvalues must be for their eigenvectors to be determined.

    Args:
        precision: What the matrix was computed in.

    Returns:
        A share of the largest eigenvalue.
    """
    return max(_RESOLUTION, 8 * torch.finfo(precision).eps)


def pooled(
    measured: Float[Tensor, "*entries"], values: Float[Tensor, "*groups d"], precision: torch.dtype
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

    Args:
        measured: Curvature along the eigenvectors, on any data, `[*groups, d]` or `[*groups, d,
            columns]`; columns are averaged one by one.
        values: The eigenvalues, descending, in the units of `measured`.
        precision: What the eigenvalues' matrix was computed in.
    """
    if values.shape[-1] == 0:
        return measured
    if values.ndim > 1 and measured.ndim == values.ndim:
        return pooled(measured.unsqueeze(-1), values, precision).squeeze(-1)
    largest = values[..., :1]
    over = tuple(range(values.ndim - 1, measured.ndim))
    is_one_space = largest.squeeze(-1) <= resolution(precision) ** 2 * measured.amax(over)
    mean = measured.mean(values.ndim - 1, keepdim=True).expand_as(measured)
    if bool(is_one_space.all()):
        return mean
    width = resolution(precision) * largest
    if not bool((is_one_space | (values[..., :-1] - values[..., 1:] < width).any(-1)).any()):
        return measured
    distances = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs() / width.unsqueeze(-1)
    weights = (2 - 2 * distances).clamp(0, 1)
    averaged = ((weights / weights.sum(-1, keepdim=True)) @ measured.to(values)).to(measured)
    if values.ndim == 1:
        return averaged
    return torch.where(is_one_space[..., None, None], mean, averaged)


def directional_curvature(
    factor: Tensor, U: Float[Tensor, "*groups d d"] | None
) -> Float[Tensor, "*groups d"]:
    r"""Curvature of a factor along the columns of U, $\mathrm{diag}(U^\top F U)$ (Eq. 9).

    Args:
        factor: `[*groups, d, d]`, or `[d]` for a diagonal one.
        U: `[*groups, d, d]`; None for the coordinate axes.
    """
    if factor.ndim == 1:
        return factor if U is None else U.square().T @ factor
    if U is None:
        return factor.diagonal(dim1=-2, dim2=-1)
    return ((factor @ U) * U).sum(-2).clamp_min(0)


def ekfac_magnitudes(
    layer: nn.Module, block: Block, uses: Uses, U_G: Tensor | None, U_A: Tensor | None
) -> Float[Tensor, "*groups d_out d_in"]:
    r"""Exact curvature along a block's directions, summed over the batch's examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    if block.role == "weight" and _has_one_position(layer, uses):
        # One position: the square of the outer product is the outer product of the squares.
        x, g = uses[0]  # type: ignore[index]
        a = coordinates(activations(layer, block, x)[:, 0], U_A)
        rows = coordinates(output_gradients(layer, block, g)[..., 0], U_G)
        return rows.square().sum(0).T @ a.square()
    total: Tensor | None = None
    for _, J, columns in rotated_jacobians(layer, block, uses, U_G, U_A):
        squares = J.square().sum((0, 1))
        total = squares.new_zeros(*block.groups, *block.shape) if total is None else total
        if columns is None:
            total += squares
        else:
            total.index_add_(1, columns, squares)
    assert total is not None
    return total


def _has_one_position(layer: nn.Module, uses: Uses) -> bool:
    if isinstance(uses, CallUses) or not isinstance(layer, nn.Linear):
        return False
    return len(uses) == 1 and uses[0][0].ndim == 2
