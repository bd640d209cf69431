"""Half precision: curvature and predictives are computed in single precision."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which neither probabilities nor curvature are computed."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the curvature of parameters of some dtype is computed."""
    return torch.float32 if dtype in NARROW else dtype


def widened(network: nn.Module, names: Iterable[str]) -> nn.Module:
    """Make a working copy compute in single precision if some of its parameters are narrower.

    The parameters keep their values, which single precision holds exactly. So curvature, directions
    and predictives are those of the function of these values, without the rounding of every
    activation and gradient to the 8 bits of bfloat16. It takes 4 bytes for each parameter of the
    model, Bayesian or not.
    """
    dtypes = set[torch.dtype]()
    for name in names:
        dtypes.add(network.get_parameter(name).dtype)
    if not dtypes.isdisjoint(NARROW):
        network._apply(_widen)
        network.register_forward_pre_hook(
            lambda _, arguments, named: tree_map_only(Tensor, _widen, (arguments, named)),
            prepend=True,
            with_kwargs=True,
        )
    return network


def coarsest_eps(model: nn.Module) -> float:
    """Return the machine epsilon of the model's narrowest floating-point tensor."""
    coarsest = 0.0
    for x in (*model.parameters(), *model.buffers()):
        if x.is_floating_point():
            coarsest = max(coarsest, torch.finfo(x.dtype).eps)
    return coarsest


def _widen(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype))
