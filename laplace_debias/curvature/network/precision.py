"""The floating-point precision of a network and of its parameters' curvature."""

import torch
from torch import nn

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which neither probabilities nor curvature are computed."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the curvature of parameters of the given dtype is computed."""
    return torch.float32 if dtype in NARROW else dtype


def coarsest_eps(model: nn.Module) -> float:
    """Return the machine epsilon of the model's narrowest floating-point tensor."""
    coarsest = 0.0
    for x in (*model.parameters(), *model.buffers()):
        if x.is_floating_point():
            coarsest = max(coarsest, torch.finfo(x.dtype).eps)
    return coarsest
