"""Sums of products of Jacobian rows, weighed by posterior variances, for a grid of precisions."""

import torch
from jaxtyping import Float
from torch import Tensor

# From so many prior precisions on, products of pairs of outputs are formed once for all of them.
_PAIRS_FROM = 3
# Numbers that a slice of weighed products holds.
_SLICE = 2**19


def weighted_squares(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, "*posteriors d"],
    deltas: Float[Tensor, "*posteriors grid"],
) -> Float[Tensor, "*posteriors grid batch outputs"]:
    r"""`Σ_i Ĵ_ci² / (curvature_i + δ_p)` for every δ, `[P, B, C]`, and every posterior."""
    squares = rows.flatten(0, 1)
    width = max(1, _SLICE // len(squares))
    sums = rows.new_zeros(len(squares), deltas.numel())
    for part, c in zip(squares.split(width, 1), curvature.split(width, -1), strict=True):
        variances = (c[..., None, :] + deltas[..., None]).reciprocal_()
        sums.addmm_(part.square(), variances.flatten(0, -2).T)
    return sums.T.reshape(*deltas.shape, *rows.shape[:2])


def weighted_gram(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    r"""`Σ_i Ĵ_ci Ĵ_ki / (curvature_i + δ_p)` for every δ, `[P, B, C, C]`.

    For a few δ each is a product of its own. For many, the products `Ĵ_ci Ĵ_ki` of each pair of
    outputs are formed once, and a single matrix product weighs them for the whole grid. Columns are
    taken in slices that stay in the processor's cache.
    """
    batch, num_outputs = rows.shape[:2]
    pairs = num_outputs * (num_outputs + 1) // 2
    as_pairs = len(deltas) > _PAIRS_FROM
    width = max(1, _SLICE // (batch * (pairs if as_pairs else num_outputs)))
    if not as_pairs:
        total = rows.new_zeros(len(deltas), batch, num_outputs, num_outputs)
        for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
            for point, delta in enumerate(deltas):
                total[point] += (part / (c + delta)) @ part.mT
        return total
    sums = rows.new_zeros(batch * pairs, len(deltas))
    for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
        products = part.new_empty(batch, pairs, part.shape[2])
        first = 0
        for output in range(num_outputs):
            last = first + num_outputs - output
            torch.mul(part[:, output, None], part[:, output:], out=products[:, first:last])
            first = last
        sums.addmm_(products.flatten(0, 1), (c[:, None] + deltas).reciprocal())
    upper = torch.triu_indices(num_outputs, num_outputs, device=rows.device)
    total = rows.new_empty(len(deltas), batch, num_outputs, num_outputs)
    by_pair = sums.unflatten(0, (batch, pairs)).permute(2, 0, 1)
    total[:, :, upper[0], upper[1]] = by_pair
    total[:, :, upper[1], upper[0]] = by_pair
    return total
