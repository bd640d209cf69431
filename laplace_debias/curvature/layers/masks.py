"""Masks of the positions that take part in layers whose positions share a weight."""

from collections.abc import Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from laplace_debias.curvature.data.batch import append_dims

# For each call of a layer, a mask [B, T] of the positions that take part; calls may differ in T.
Masks = Sequence[Tensor]


def select_positions(
    rows: Float[Tensor, "columns batch positions *d"], mask: Bool[Tensor, "batch positions"]
) -> Float[Tensor, "columns n *d"]:
    """Select the rows of the positions that take part, `[K, n, ...]`.

    On an accelerator, the host would have to wait for the number of these positions. Therefore, all
    positions are kept there, and the rows of the other positions are zero.
    """
    if mask.device.type == "cpu":
        return rows[:, mask]
    # Entries are replaced, not multiplied by the mask, because padded entries may be infinite.
    return rows.where(append_dims(mask, rows.ndim - 1), 0).flatten(1, 2)
