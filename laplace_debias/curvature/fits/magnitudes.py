"""Curvature along given directions: the magnitudes of a block, measured on any data."""

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.jacobians import rotate_rows, rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses, activations, output_gradients


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
        a = rotate_rows(activations(layer, block, x)[:, 0], U_A)
        rows = rotate_rows(output_gradients(layer, block, g)[..., 0], U_G)
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
