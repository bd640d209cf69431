"""A posterior's spectrum by block, and how much of it is the prior's."""

from typing import Any

import torch

from laplace_debias.laplace import Laplace
from laplace_debias.operators import EigenKronecker, LowRankPlusDiagonal

NUM_QUANTILES = 101


def spectrum_of(la: Laplace) -> dict[str, Any]:
    """Quantiles of N Λ, and the mean of δ / (N Λ + δ), of every block.

    The last is the share of the posterior's precision that the prior has, averaged over directions:
    1 where the data tell nothing, 0 where they tell everything. Directions without curvature, of
    which a low-rank block has most, count as magnitudes of zero.

    Args:
        la: A fitted posterior.

    Returns:
        As `spectra/METHOD.json` has it.
    """
    posterior = la.posterior
    deltas = posterior.prior_precision.double().expand(len(posterior.curvature.blocks))
    blocks = []
    for (name, block), delta in zip(posterior.curvature.blocks.items(), deltas, strict=True):
        assert isinstance(block, (EigenKronecker, LowRankPlusDiagonal))
        magnitudes = block.magnitudes.double().flatten() * posterior.data_weight
        size = block.shape[0]
        values = torch.cat([magnitudes, magnitudes.new_zeros(size - magnitudes.numel())])
        values = values.sort().values
        at = torch.linspace(0, size - 1, NUM_QUANTILES, dtype=torch.float64)
        below = at.long()
        above = (below + 1).clamp_max(size - 1)
        share = (at - below).to(values.device)
        quantiles = values[below] * (1 - share) + values[above] * share
        blocks.append(
            {
                "name": name,
                "num_parameters": size,
                "quantiles": quantiles.tolist(),
                "prior_share": (delta / (values + delta)).mean().item(),
            }
        )
    return {"blocks": blocks}
