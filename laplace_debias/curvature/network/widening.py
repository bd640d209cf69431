"""Half precision: curvature and predictives are computed in single precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from laplace_debias.curvature.network.precision import NARROW, wide
from laplace_debias.curvature.network.sharded import gather_in_single_precision
from laplace_debias.system.gathering import is_sharded


def widened(network: nn.Module, names: Iterable[str]) -> nn.Module:
    """Make a working copy compute in single precision if any of the named parameters is narrower.

    The parameters keep their values, which single precision holds exactly. Therefore, curvature,
    directions and predictives describe the function with exactly these values, without the rounding
    of every activation and gradient to the 8 bits of bfloat16. The copy needs 4 bytes per parameter
    of the model, Bayesian or not.
    """
    dtypes = set[torch.dtype]()
    for name in names:
        dtypes.add(network.get_parameter(name).dtype)
    if not dtypes.isdisjoint(NARROW):
        _widen_tensors(network)
        network.register_forward_pre_hook(
            lambda _, arguments, named: tree_map_only(Tensor, _widen, (arguments, named)),
            prepend=True,
            with_kwargs=True,
        )
    return network


def _widen_tensors(network: nn.Module) -> None:
    """Replace each tensor in half precision by a new tensor; tied tensors stay tied.

    `nn.Module.to` would change a quantised parameter, which the copy shares with the user's model.
    """
    gather_in_single_precision(network)
    replaced: dict[int, Tensor] = {}
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            state: dict[str, Any] = tensors
            for name, tensor in state.items():
                if tensor is None or tensor.dtype not in NARROW or is_sharded(tensor):
                    continue
                if id(tensor) not in replaced:
                    values = _widen(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        values = nn.Parameter(values, requires_grad=False)
                    replaced[id(tensor)] = values
                state[name] = replaced[id(tensor)]


def _widen(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype))
