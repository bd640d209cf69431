"""Models inside wrappers: DataParallel, DistributedDataParallel, torch.compile."""

import copy
from collections.abc import Sequence

from torch import nn

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def inner(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper; None for anything else.

    Raises:
        ValueError: If the wrapper has forward hooks of its own.
    """
    # A compiled module by its attribute: to import torch's compiler for its class takes a second.
    key = "module" if isinstance(module, _PARALLEL) else "_orig_mod"
    inside = module._modules.get(key)
    if inside is None:
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"The {type(module).__name__} around {type(inside).__name__} has forward hooks, which "
            "would be lost with it: register them on the module inside."
        )
    return inside


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without what was wrapped around it or around a part of it.

    Its parameters are the user's own tensors, under the names that they have in the plain model. A
    wrapper computes what the model in it computes, but neither hooks nor derivatives of any order
    can be relied on through it.

    Args:
        model: The user's model.

    Returns:
        The model itself where nothing is wrapped; the model in the wrapper; or, where parts of it
        are wrapped, a copy of the modules around these. The copy does not see the modes that are
        set later: ask for it where it is needed, and do not keep it.

    Raises:
        ValueError: If a wrapper has forward hooks of its own.
    """
    return _plain(model, {})


def plain_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of parameters as the plain model has them, such as `0.weight` for `module.0.weight`.

    Args:
        model: The user's model, wrapped or not.
        names: Names in either form; one that the model does not have comes back as it is.
    """
    inside = _plain(model, {})
    plain = {id(p): name for name, p in inside.named_parameters()}
    known = set(plain.values())
    wrapped = {n: plain[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    return [name if name in known else wrapped.get(name, name) for name in names]


def _plain(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    while (inside := inner(module)) is not None:
        module = inside
    if id(module) in seen:
        return seen[id(module)]
    if all(inner(part) is None for part in module.modules()):
        seen[id(module)] = module
        return module
    twin = seen[id(module)] = copy.copy(module)
    twin.__dict__["_modules"] = {
        name: None if child is None else _plain(child, seen)
        for name, child in module._modules.items()
    }
    return twin
