"""Models in half precision: what is computed in single precision in their place."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.shadow import shadow

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which neither probabilities nor curvature are computed."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which curvature of parameters of a dtype is computed."""
    return torch.float32 if dtype in NARROW else dtype


def is_narrow(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether some of these parameters are in half precision."""
    return any(model.get_parameter(name).dtype in NARROW for name in names)


def widened(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """The model computed in single precision where some of its Bayesian parameters are narrower.

    The parameters keep their values, which single precision holds exactly. So curvature, directions
    and predictives are those of the function of these values, without the rounding of every
    activation and gradient to the 8 bits of bfloat16. It takes 4 bytes for each parameter of the
    model, Bayesian or not.

    Args:
        model: The model; it is left untouched.
        names: Its Bayesian parameters.

    Returns:
        The model itself if all of these are in single or double precision, whatever the frozen ones
        are; else a `shadow` whose narrow tensors are in single precision, as are its inputs.
    """
    if not is_narrow(model, names):
        return model
    twin = shadow(model)
    twin._apply(_widen)
    twin.register_forward_pre_hook(_widen_inputs, prepend=True, with_kwargs=True)
    return twin


def coarsest_eps(model: nn.Module) -> float:
    """The relative rounding of the model's coarsest floating-point tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(wide(value.dtype))
    if isinstance(value, Mapping):
        return {key: _widen(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_widen(part) for part in value)
    return value


def _widen_inputs(
    _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _widen(arguments), _widen(named)
