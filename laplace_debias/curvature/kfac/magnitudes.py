"""Curvature along given directions: the magnitudes of a block, measured on any data."""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.layers import (
    Uses,
    activations,
    output_gradients,
    slices,
    vector_rows,
)


def along(factor: Float[Tensor, "d d"], U: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
    r"""Curvature of a factor along the columns of U, $\mathrm{diag}(U^\top F U)$ (Eq. 9)."""
    return ((factor @ U) * U).sum(0).clamp_min(0)


def ekfac_magnitudes(
    layer: nn.Module, block: Block, uses: Uses, U_G: Tensor, U_A: Tensor
) -> Float[Tensor, "d_out d_in"]:
    r"""Exact curvature along a block's directions, summed over the batch's examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    total = uses[0][0].new_zeros(block.shape)
    for _, rotated in rotated_jacobians(layer, block, uses, U_G, U_A):
        total += rotated.square().sum((0, 1))
    return total


def rotated_jacobians(
    layer: nn.Module, block: Block, uses: Uses, U_G: Tensor, U_A: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "part columns d_out d_in"]]]:
    r"""A block's Jacobian in its eigenbasis, $U_G^\top(\sum_t g_t a_t^\top)U_A$, slice by slice.

    Activations and output gradients are rotated, never their product: the cost is that of the
    Jacobian itself plus one rotation of each row.

    Args:
        layer: The layer.
        block: One of its blocks.
        uses: Inputs `[B, ...]` and output gradients `[K, B, ...]` of the layer's uses.
        U_G: `[d_out, d_out]`.
        U_A: `[d_in, d_in]`.

    Yields:
        A slice of the batch's examples, and its Jacobians `[b, K, d_out, d_in]`.
    """
    if block.is_vector:
        rows = (vector_rows(layer, block, uses) @ U_G).movedim(0, 1)
        yield slice(0, rows.shape[0]), rows.unsqueeze(-1)
        return
    num_columns = uses[0][1].shape[0]
    for part in slices(layer, block, uses[0][0], extra=num_columns * block.size):
        total: Tensor | None = None
        for x, g in uses:
            a = activations(layer, block, x[part]) @ U_A
            rows = U_G.T @ output_gradients(layer, block, g[:, part])
            # [K, b, d_out, T] → [b, K·d_out, T]: one batched product serves every column.
            product = rows.movedim(0, 1).flatten(1, 2) @ a
            total = product if total is None else total.add_(product)
        assert total is not None
        yield part, total.unflatten(1, (num_columns, block.shape[0]))
