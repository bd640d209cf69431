r"""Kronecker factors of one block, in the project's units.

In the `expand` approximation for T positions, $G = \tfrac1T\sum_n\sum_t\sum_k g g^\top$ over the
columns k of the loss Hessian's root, and $A = \sum_n\sum_t a a^\top$, both summed over examples:
the block of the mean loss over N of them is $\tfrac1N G \otimes \tfrac1N A$. A bias is exact (and
a scale, with its rows in the place of `Σ_t g`):
$G = \sum_n\sum_k (\sum_t g)(\sum_t g)^\top$, with 1 for A.

Reference: Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern neural
network architectures".
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.layers import (
    Uses,
    activations,
    group_of,
    output_gradients,
    slices,
    vector_rows,
)
from laplace_debias.curvature.kfac.patches import has_fast_patches, patch_moments

# Matrices of fewer columns are multiplied whole; wider ones gain from their symmetry.
_SYMMETRIC_FROM = 256


def gradient_factor(layer: nn.Module, block: Block, uses: Uses) -> Float[Tensor, "d_out d_out"]:
    """G of one block on one batch, summed over its examples.

    Args:
        layer: The layer.
        block: One of its blocks.
        uses: For every use of the layer the input `[B, ...]` and the gradients at the output
            `[K, B, ...]`, one for each column of the loss Hessian's root. Several uses count as
            further positions.
    """
    if block.is_vector:
        rows = vector_rows(layer, block, uses).flatten(0, 1)
        return rows.T @ rows
    parts = [output_gradients(layer, block, g).flatten(0, 1) for _, g in uses]
    positions = sum(part.shape[-1] for part in parts)
    return sum((_gram(part) for part in parts[1:]), start=_gram(parts[0])) / positions


def _gram(columns: Float[Tensor, "n d positions"]) -> Float[Tensor, "d d"]:
    """`Σ_n Σ_t g gᵀ`."""
    if columns.shape[2] > columns.shape[1]:
        # The products of all examples are smaller than a copy with the positions as rows.
        return (columns @ columns.mT).sum(0)
    rows = columns.mT.flatten(0, 1)
    return rows.T @ rows


def input_factor(
    layer: nn.Module, block: Block, inputs: Sequence[Tensor]
) -> Float[Tensor, "d_in d_in"]:
    """A of one weight block on one batch, summed over its examples.

    Args:
        layer: The layer.
        block: Its weight block.
        inputs: What went into the layer, use by use or part by part, each `[B, ...]`.
    """
    total: Tensor | None = None
    for x in inputs:
        if has_fast_patches(layer):
            moments = patch_moments(layer, group_of(layer, block, x))  # type: ignore[arg-type]
            total = moments if total is None else total.add_(moments)
            continue
        for part in slices(layer, block, x):
            rows = activations(layer, block, x[part]).flatten(0, 1)
            if total is None:
                total = rows.new_zeros(rows.shape[1], rows.shape[1])
            _add_moments(total, rows)
    assert total is not None
    return total


def _add_moments(total: Float[Tensor, "d d"], rows: Float[Tensor, "n d"]) -> None:
    """Add `rowsᵀ rows`, computing one of each two symmetric halves where that pays."""
    size = rows.shape[1]
    if size < _SYMMETRIC_FROM:
        total.addmm_(rows.T, rows)
        return
    step = -(-size // 8)
    for start in range(0, size, step):
        stop = min(start + step, size)
        product = rows[:, start:stop].T @ rows[:, start:]
        total[start:stop, start:] += product
        total[stop:, start:stop] += product[:, stop - start :].T
