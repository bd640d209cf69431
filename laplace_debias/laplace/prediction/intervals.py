"""Central intervals of distributions of numbers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Independent


def single_targets(predictive: Distribution) -> Any:
    """Return the distributions of the single targets.

    If several targets form one event, the result differs from `predictive`.
    """
    return predictive.base_dist if isinstance(predictive, Independent) else predictive


def interval_ends(
    predictive: Any, level: float
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]] | None:
    """Return both ends of the central interval, or None if the distribution has no quantiles."""
    mean = predictive.mean
    try:
        lower = predictive.icdf(mean.new_tensor((1 - level) / 2))
        upper = predictive.icdf(mean.new_tensor((1 + level) / 2))
    except NotImplementedError:
        return None
    return lower, upper


def interval_levels(predictive: Any, targets: Float[Tensor, "*n"]) -> Float[Tensor, "*n"] | None:
    """Compute the smallest level of a central interval that contains each target.

    The ends of a central interval of level q are the smallest values at which the distribution
    function F is at least (1 − q)/2 and (1 + q)/2. The interval contains y if 1 − 2 F(y) ≤ q and 2
    F(y⁻) − 1 < q, where F(y⁻) is the probability of values less than y.

    Returns:
        The levels, in float64; None if there is no distribution function.
    """
    try:
        up_to = predictive.cdf(targets).double()
        below = up_to
        if predictive.support.is_discrete:
            below = predictive.cdf(targets - 1).double()
    except NotImplementedError:
        return None
    return torch.maximum(1 - 2 * up_to, 2 * below - 1).clamp_min(0)
