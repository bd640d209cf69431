"""Rules for when to stop conjugate gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from laplace_debias.linalg.results import Iterate


def relative_progress(
    epsilon: float = 5e-4, fraction: float = 0.1, at_least: int = 10
) -> Callable[[Iterate], Tensor]:
    r"""Martens' stopping rule: stop when the quadratic has ceased to fall.

    With $w = \max(\text{at\_least}, \lceil\text{fraction}\cdot t\rceil)$, stop at iteration
    $t > w$ if $q_t < 0$ and $(q_t - q_{t-w}) / q_t < w\,\epsilon$.

    Args:
        epsilon: The relative progress per iteration below which to stop.
        fraction: The share of the iterations so far over which progress is averaged.
        at_least: The fewest iterations over which it is averaged.

    Returns:
        The rule, for the argument `stop` of `cg`.

    Raises:
        ValueError: If an argument is not positive.

    Reference:
        Martens (2010), Deep learning via Hessian-free optimization, Section 4.4.
    """
    if not (epsilon > 0 and fraction > 0 and at_least > 0):
        raise ValueError(
            f"epsilon, fraction and at_least must be positive, got {epsilon}, {fraction}, "
            f"{at_least}."
        )

    def rule(iterate: Iterate) -> Tensor:
        value = iterate.values[-1]
        window = max(at_least, -int(-fraction * iterate.iteration // 1))
        if iterate.iteration <= window:
            return torch.zeros_like(value, dtype=torch.bool)
        decrease = value - iterate.values[-1 - window]
        return (value < 0) & (decrease / value < window * epsilon)

    return rule
