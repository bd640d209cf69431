r"""Kronecker factors of one block, in the project's units.

For T positions that share a weight, over the columns k of the loss Hessian's root and summed over
examples (the block of the mean loss over N of them is $\tfrac1N G \otimes \tfrac1N A$):

- `expand`: $G = \tfrac1T\sum_n\sum_t\sum_k g g^\top$ and $A = \sum_n\sum_t a a^\top$;
- `reduce`: $G = \sum_n\sum_k \hat g\hat g^\top$ with $\hat g = \sum_t g$, and
  $A = \sum_n \bar a\bar a^\top$ with $\bar a = \tfrac1T\sum_t a$.

Where not all positions take part (see `positions`), t runs over those that do, and T is their
number, example by example: $G = \sum_n\tfrac1{T_n}\sum_t\sum_k g g^\top$.

A bias is exact (and a scale, and the kernel of a depthwise convolution, each with its Jacobian rows
in the place of `Σ_t g`): $G = \sum_n\sum_k (\sum_t g)(\sum_t g)^\top$, with 1 for A. The groups of
a convolution have factors of their own, computed all at once. An embedding's activations are unit
vectors, so its A is diagonal and kept as a vector of counts; it is always `expand`. Of a factor
wider than `blocks.WIDE` the diagonal is kept, as a vector too, and nothing else is computed.

Reference: Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern neural
network architectures".
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.patches import LARGE, has_displacements, patch_moments
from laplace_debias.curvature.layers.uses import (
    Masks,
    Uses,
    activations,
    chosen,
    exact_rows,
    output_gradients,
    slices,
    token_gradients,
    tokens,
)
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS

# From so many columns on, a factor is not written for every few rows.
_WIDE = 256
# Matrices of fewer columns are multiplied whole; wider ones gain from their symmetry.
_SYMMETRIC_FROM = 256

# A layer's inputs: for every part of the data, use by use, each [B, ...].
Inputs = Sequence[Sequence[Tensor]]


def gradient_factor(
    layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None
) -> Float[Tensor, "*groups d_out d_out"] | Float[Tensor, " d_out"]:
    """G of one block on one batch, summed over its examples; of a diagonal block as a vector.

    Args:
        layer: The layer.
        block: One of its blocks.
        uses: For every use of the layer the input `[B, ...]` and the gradients at the output
            `[K, B, ...]`, one for each column of the loss Hessian's root. Several uses count as
            further positions.
        masks: For every use the positions that take part, `[B, T]`; None for all.
    """
    if block.is_exact:
        slices_of_rows = (rows.flatten(0, 1) for _, rows in exact_rows(layer, block, uses))
        if block.has_diagonal_G:
            # One after the other: a slice of a large parameter may be a single example's.
            return reduce(torch.add, map(_squares, slices_of_rows))
        products = [moments(rows) for rows in slices_of_rows]
        return products[0] if len(products) == 1 else torch.stack(products).sum(0)
    assert not isinstance(uses, CallUses)
    if block.role == "table":
        parts = [token_gradients(layer, block, x, g).flatten(0, 1) for x, g in uses]
    else:
        parts = [output_gradients(layer, block, g).flatten(0, 1) for _, g in uses]
    if block.sharing == "reduce" and block.role == "weight":
        rows = torch.stack([part.sum(-1) for part in parts]).sum(0)
        return _squares(rows) if block.has_diagonal_G else moments(rows)
    masks = _counted(layer, block, [x for x, _ in uses], masks)
    if masks is not None:
        weights = _num_positions(masks).to(parts[0]).clamp_min(1).rsqrt()
        of_G = [block.shape[0]] * (1 if block.has_diagonal_G else 2)
        G = parts[0].new_zeros(*block.groups, *of_G)
        for part, mask in zip(parts, masks, strict=True):
            rows = chosen(part.unflatten(0, (-1, len(mask))).movedim(-1, 2), mask)
            of_rows = chosen(weights[:, None].expand_as(mask)[None], mask)[0]
            rows = rows * of_rows.view(-1, *[1] * (rows.ndim - 2))
            rows = rows.flatten(0, 1)
            if block.has_diagonal_G:
                G += _squares(rows)
                continue
            G = G.addmm_(rows.T, rows) if rows.ndim == 2 else G + moments(rows)
        return G
    positions = sum(part.shape[-1] for part in parts)
    if block.has_diagonal_G:
        return torch.stack([part.square().sum((0, 2)) for part in parts]).sum(0) / positions
    return sum((_gram(part) for part in parts[1:]), start=_gram(parts[0])) / positions


def few_gradient_rows(
    layer: nn.Module, block: Block, uses: Uses, masks: Masks | None = None
) -> Float[Tensor, "n d_out"] | None:
    """Rows with `rowsᵀ rows = G`, if they are fewer than G's and G is wide; None otherwise.

    Several chunks of a batch are cheaper to multiply together: writing G costs more than they do.
    Arguments as `gradient_factor` takes them.
    """
    d_out = block.shape[0]
    is_plain = masks is None and block.role == "weight" and block.sharing == "expand"
    if block.groups or block.has_diagonal_G or d_out < _WIDE or not (block.is_exact or is_plain):
        return None
    if isinstance(uses, CallUses):
        return None
    if block.is_exact:
        rows = torch.cat([rows.flatten(0, 1) for _, rows in exact_rows(layer, block, uses)])
        return rows if len(rows) < d_out else None
    parts = [output_gradients(layer, block, g) for _, g in uses]
    if sum(part.numel() for part in parts) >= d_out**2:
        return None
    positions = sum(part.shape[-1] for part in parts)
    rows = torch.cat([part.flatten(0, 1).mT.flatten(0, 1) for part in parts])
    return rows * positions**-0.5


def few_input_rows(
    layer: nn.Module, block: Block, inputs: Inputs, masks: Sequence[Masks | None]
) -> Float[Tensor, "n d_in"] | None:
    """Rows with `rowsᵀ rows = A`, if they are at most half as many as A's and A is wide.

    Arguments as `input_factor` takes them.
    """
    d_in = block.shape[1]
    is_masked = any(of_part is not None for of_part in masks)
    if block.groups or block.has_diagonal_A or d_in < _WIDE or is_masked:
        return None
    uses = [x for part in inputs for x in part]
    if block.sharing == "reduce":
        if 2 * sum(len(part[0]) for part in inputs) > d_in:
            return None
        return torch.cat([_mean_activations(layer, block, part, None) for part in inputs])
    num_rows = sum(len(x) * activations(layer, block, x[:1]).shape[1] for x in uses)
    if 2 * num_rows > d_in:
        return None
    return torch.cat([activations(layer, block, x).flatten(0, 1) for x in uses])


def _counted(
    layer: Any, block: Block, inputs: Sequence[Tensor], masks: Masks | None
) -> Masks | None:
    """The positions that take part; of an embedding those of its `padding_idx` do not."""
    if block.role != "table" or layer.padding_idx is None:
        return masks
    real = [tokens(x).ne(layer.padding_idx) for x in inputs]
    return real if masks is None else [a & b for a, b in zip(real, masks, strict=True)]


def _num_positions(masks: Masks) -> Int[Tensor, " batch"]:
    """T of every example."""
    return torch.stack([mask.sum(1) for mask in masks]).sum(0)


def _gram(columns: Float[Tensor, "n *groups d positions"]) -> Float[Tensor, "*groups d d"]:
    """`Σ_n Σ_t g gᵀ`."""
    if columns.shape[-1] > columns.shape[-2]:
        # The products of all examples are smaller than a copy with the positions as rows.
        return (columns @ columns.mT).sum(0)
    return moments(columns.movedim(-1, 1).flatten(0, 1))


def input_factor(
    layer: Any, block: Block, inputs: Inputs, masks: Sequence[Masks | None] | None = None
) -> Float[Tensor, "*groups d_in d_in"] | Float[Tensor, " d_in"]:
    """A of one weight block on one batch, summed over its examples; a diagonal one as a vector.

    Args:
        layer: The layer.
        block: Its weight block.
        inputs: What went into the layer, for every part of the batch the inputs of all uses, each
            `[B, ...]`.
        masks: For every part of the batch the positions that take part, for all uses `[B, T]`; None
            for all.
    """
    masks = [None] * len(inputs) if masks is None else masks
    if block.role == "table":
        counts = layer.weight.new_zeros(block.shape[1], dtype=torch.long)
        for part, counted in zip(inputs, masks, strict=True):
            counted = _counted(layer, block, part, counted)
            for index, x in enumerate(part):
                ids = tokens(x).flatten().long()
                ones = counts.new_ones(len(ids)) if counted is None else counted[index].flatten()
                counts.index_add_(0, ids, ones.long())
        return counts.to(layer.weight.dtype)
    of_A = [block.shape[1]] * (1 if block.has_diagonal_A else 2)
    A = layer.weight.new_zeros(*block.groups, *of_A)
    for part, counted in zip(inputs, masks, strict=True):
        if block.sharing == "reduce":
            A = _add_moments(A, _mean_activations(layer, block, part, counted))
            continue
        for index, x in enumerate(part):
            A = _add_positions(A, layer, block, x, None if counted is None else counted[index])
    return A


def _add_positions(
    A: Tensor,
    layer: nn.Module,
    block: Block,
    x: Tensor,
    mask: Bool[Tensor, "batch positions"] | None,
) -> Tensor:
    if mask is not None:
        for part in slices(layer, block, x):
            A = _add_moments(A, chosen(activations(layer, block, x[part])[None], mask[part])[0])
        return A
    is_convolution = isinstance(layer, CONVOLUTIONS)
    of_groups = x.chunk(block.num_groups, dim=1) if is_convolution else [x]
    is_large = of_groups[0].numel() * of_groups[0].shape[1] >= LARGE
    is_fast = is_convolution and has_displacements(layer) and is_large
    if block.has_diagonal_A or not is_fast:
        for part in slices(layer, block, x):
            A = _add_moments(A, activations(layer, block, x[part]).flatten(0, 1))
        return A
    found = [patch_moments(layer, channels) for channels in of_groups]  # type: ignore[arg-type]
    of_patches = torch.stack(found) if block.groups else found[0]
    if not block.is_joint:
        return A.add_(of_patches)
    A[..., :-1, :-1] += of_patches
    # Patches are linear in the image: one image stands for the sum of all.
    rows = activations(layer, block, x.sum(0, keepdim=True))[0]
    total = rows.sum(0)
    total[..., -1] *= len(x)
    A[..., -1, :] += total
    A[..., :-1, -1] += total[..., :-1]
    return A


def _mean_activations(
    layer: nn.Module, block: Block, uses: Sequence[Tensor], masks: Masks | None
) -> Float[Tensor, "batch *groups d_in"]:
    """ā, the mean over the positions of all uses."""
    sums, positions = [], 0
    for index, x in enumerate(uses):
        of_slices, num_positions = [], 0
        for part in slices(layer, block, x):
            rows = activations(layer, block, x[part])
            num_positions = rows.shape[1]
            if masks is not None:
                # Not a product: what is padded may be infinite.
                mask = masks[index][part].view(*rows.shape[:2], *[1] * (rows.ndim - 2))
                rows = rows.where(mask, 0)
            of_slices.append(rows.sum(1))
        positions += num_positions
        sums.append(torch.cat(of_slices))
    total = torch.stack(sums).sum(0)
    if masks is None:
        return total / positions
    counts = _num_positions(masks).clamp_min(1)
    return total / counts.view(-1, *[1] * (total.ndim - 1))


def _squares(rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """The diagonal of `rowsᵀ rows`."""
    return rows.square().sum(0)


def moments(rows: Float[Tensor, "n *groups d"]) -> Float[Tensor, "*groups d d"]:
    """`rowsᵀ rows`."""
    of_groups = rows.movedim(0, -2)
    return of_groups.mT @ of_groups


def _add_moments(
    total: Float[Tensor, "*groups d d"] | Float[Tensor, " d"], rows: Float[Tensor, "n *groups d"]
) -> Float[Tensor, "*groups d d"] | Float[Tensor, " d"]:
    """Add `rowsᵀ rows` to a sum, or its diagonal to a vector.

    Of each two symmetric halves one is computed where that pays.
    """
    if total.ndim == 1:
        return total.add_(_squares(rows))
    if rows.ndim == 3:
        return total.add_(moments(rows))
    size = rows.shape[1]
    if size < _SYMMETRIC_FROM:
        return total.addmm_(rows.T, rows)
    step = -(-size // 8)
    for start in range(0, size, step):
        stop = min(start + step, size)
        product = rows[:, start:stop].T @ rows[:, start:]
        total[start:stop, start:] += product
        total[stop:, start:stop] += product[:, stop - start :].T
    return total
