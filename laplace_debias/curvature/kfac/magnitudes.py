"""Curvature along given directions: the magnitudes of a block, measured on any data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.factors import Factors
from laplace_debias.curvature.kfac.layers import (
    Uses,
    activations,
    output_gradients,
    slices,
    summed_gradients,
)


@dataclass(frozen=True)
class Eigenbasis:
    """Directions of a block, and the mean factors' own curvature along them.

    Attributes:
        U_G: Eigenvectors of G as columns, by descending eigenvalue, `[d_out, d_out]`.
        U_A: Eigenvectors of A as columns, by descending eigenvalue, `[d_in, d_in]`.
        along_G: Eigenvalues of the mean G, `[d_out]`.
        along_A: Eigenvalues of the mean A, `[d_in]`.
    """

    U_G: Float[Tensor, "d_out d_out"]
    U_A: Float[Tensor, "d_in d_in"]
    along_G: Float[Tensor, " d_out"]
    along_A: Float[Tensor, " d_in"]


def eigenbasis(factors: Factors, num_examples: int) -> Eigenbasis:
    """The eigenbasis of a block's factors, which were summed over `num_examples`.

    Raises:
        ValueError: If a factor holds NaN or Inf.
    """
    U_G, along_G = _eigh(factors.G / num_examples)
    U_A, along_A = _eigh(factors.A / num_examples)
    return Eigenbasis(U_G, U_A, along_G, along_A)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    if factor.shape == (1, 1):
        return torch.ones_like(factor), factor[0]
    values, vectors = torch.linalg.eigh(factor)
    # The factors are positive semi-definite: what lies below zero is rounding.
    return vectors.flip(1), values.flip(0).clamp_min(0)


def along(factor: Float[Tensor, "d d"], U: Float[Tensor, "d d"]) -> Float[Tensor, " d"]:
    r"""Curvature of a factor along the columns of U, $\mathrm{diag}(U^\top F U)$ (Eq. 9)."""
    return ((factor @ U) * U).sum(0).clamp_min(0)


def ekfac_magnitudes(
    layer: nn.Module, block: Block, uses: Uses, basis: Eigenbasis
) -> Float[Tensor, "d_out d_in"]:
    r"""Exact curvature along a block's directions, summed over the batch's examples.

    $\Lambda_{ij} = \sum_n\sum_k \big((U_G^\top (\sum_t g_{kt} a_t^\top) U_A)_{ij}\big)^2$

    Reference: George et al. (2018), "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis".
    """
    total = uses[0][0].new_zeros(block.shape)
    for _, rotated in rotated_jacobians(layer, block, uses, basis.U_G, basis.U_A):
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
        block: Its weight or bias block.
        uses: Inputs `[B, ...]` and output gradients `[K, B, ...]` of the layer's uses.
        U_G: `[d_out, d_out]`.
        U_A: `[d_in, d_in]`.

    Yields:
        A slice of the batch's examples, and its Jacobians `[b, K, d_out, d_in]`.
    """
    if block.role == "bias":
        rows = (summed_gradients(layer, block, uses) @ U_G).movedim(0, 1)
        yield slice(0, rows.shape[0]), rows.unsqueeze(-1)
        return
    num_columns = uses[0][1].shape[0]
    for part in slices(layer, block, uses[0][0], extra=num_columns * block.size):
        total: Tensor | None = None
        for x, g in uses:
            a = activations(layer, block, x[part]) @ U_A
            rows = output_gradients(layer, block, g[:, part]) @ U_G
            # [K, b, T, d_out] → [b, K·d_out, T]: one batched product serves every column.
            rows = rows.permute(1, 0, 3, 2).flatten(1, 2)
            product = rows @ a
            total = product if total is None else total.add_(product)
        assert total is not None
        yield part, total.unflatten(1, (num_columns, block.shape[0]))
