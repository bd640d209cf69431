"""What wraps a module: the module inside, and the hooks that `fully_shard` sets."""

from typing import Any

from torch import nn

FSDP = "torch.distributed.fsdp"
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
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not all(map(is_of_fsdp, hooks)):
        raise ValueError(
            f"The {type(module).__name__} around {type(inside).__name__} has forward hooks, which "
            "would be lost with it: register them on the module inside."
        )
    return inside


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook or a method of a module is one that `fully_shard` has put there."""
    # torch wraps the hooks of a state_dict once more.
    function = getattr(hook, "hook", hook)
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", "").startswith(FSDP)
