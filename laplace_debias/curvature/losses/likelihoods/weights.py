"""Weights of classes and labels: what a user passes, checked."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Weights = Sequence[float] | Tensor


def checked_weights(weights: Weights | float | None, name: str) -> Float[Tensor, " n"] | None:
    """Weights as a float64 vector on the CPU; None for None.

    Args:
        weights: One number or one per output, not negative, not all zero.
        name: What errors call them.

    Raises:
        ValueError: Otherwise.
    """
    if weights is None:
        return None
    values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().clone().reshape(-1)
    is_vector = torch.as_tensor(weights).ndim <= 1 and len(values) > 0
    if not is_vector or not (values.isfinite() & (values >= 0)).all() or not values.any():
        raise ValueError(
            f"{name} must be finite numbers, none negative and not all zero, got {weights}."
        )
    return values


def check_length(weights: Tensor | None, num_outputs: int, name: str, single: bool = False) -> None:
    """Require one weight per output.

    Args:
        weights: As `checked_weights` gives them.
        num_outputs: C.
        name: What errors call them.
        single: Whether one weight serves all outputs.

    Raises:
        ValueError: Otherwise.
    """
    if weights is None or len(weights) == num_outputs or (single and len(weights) == 1):
        return
    raise ValueError(
        f"{name} has {len(weights)} entries, the model has {num_outputs} outputs: give one for "
        "each."
    )
