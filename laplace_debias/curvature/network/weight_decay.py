"""Which parameters weight decay acts on: one rule for training and for quadratics (Eq. 1)."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn


def is_decayed(parameter: Tensor) -> bool:
    """Whether β of Eq. 1 acts on a parameter: on weights, which have more than one dimension.

    Biases have none, nor have the scales of normalisations, which are no weights of a sum.
    """
    return parameter.dim() > 1


def decay_mask(parameters: Iterable[Tensor]) -> Bool[Tensor, " dim"]:
    """For every entry of the parameters, flattened one behind the other, whether β acts on it."""
    return torch.cat([torch.full((p.numel(),), is_decayed(p), device=p.device) for p in parameters])


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: the weights with weight decay, then all others without.

    Args:
        parameters: The parameters.
        weight_decay: Of the weights.

    Returns:
        One group or two; none is empty.
    """
    every = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in every if is_decayed(p)], "weight_decay": weight_decay},
        {"params": [p for p in every if not is_decayed(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
