"""Modules whose parameters `fully_shard` (FSDP2) has split over processes.

A copy of the network has its own gathering hooks instead of FSDP's hooks, which require all
processes to run the same passes. The modules of a unit have whole parameters during the unit's
forward pass. The parameters that the backward pass needs are gathered again in that pass.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from laplace_debias.curvature.network.precision import wide
from laplace_debias.system.gathering import full_value, is_sharded

_HOOKS = ("torch.distributed.fsdp", "torch.distributed._composable.replicate")
_ENTERED = "_entered_gathering"
_IS_WIDE = "_gathers_single_precision"


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module, which changes the module's class.

    The new class is recognised by its methods, because importing it takes a second.
    """
    return hasattr(type(module), "unshard") and hasattr(type(module), "reshard")


def has_units(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on a part of the model."""
    return any(is_unit(module) for module in model.modules())


def is_replicated(module: nn.Module) -> bool:
    """Whether `torch.distributed._composable.replicate` was called on a module.

    Like `fully_shard`, this function changes the module's class, which then has other methods.
    """
    return hasattr(type(module), "set_requires_gradient_sync") and not is_unit(module)


def without_communication(module: Any) -> nn.Module:
    """Make a module of the original class, without the hooks of `fully_shard` or `replicate`.

    The parameters and submodules are the same objects.
    """
    if is_unit(module):
        # After a forward pass, FSDP may leave the parameters of the outermost unit unsharded.
        module.reshard()
    # The new class inherits from the class with the methods and then from the original class.
    return _shallow_copy(module, type(module).__bases__[-1])


def with_gathering(module: nn.Module) -> nn.Module:
    """Make a module with hooks that gather its sharded parameters, around the same parameters."""
    plain = _shallow_copy(module, type(module))
    plain.register_forward_pre_hook(_enter, prepend=True)
    plain.register_forward_hook(_leave, always_call=True)
    return plain


def _shallow_copy(module: nn.Module, kind: Any) -> nn.Module:
    """Make a module of a given class with its own hooks, without those for communication.

    The dictionaries of hooks and of submodules are copied, so that changes to the copy do not
    affect the original. All other attributes are the same objects.
    """
    copied: nn.Module = object.__new__(kind)
    attributes = vars(module).copy()
    for name in list(attributes):
        if name.startswith("__composable_api"):
            del attributes[name]
    attributes["_modules"] = module._modules.copy()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = OrderedDict(attributes[name])
        for key, hook in attributes[name].items():
            if _communicates(hook):
                del hooks[key]
        attributes[name] = hooks
    # These dictionaries contain options of the hooks.
    for name in vars(module):
        if name.startswith("_forward") and name.endswith(("_with_kwargs", "_always_called")):
            attributes[name] = OrderedDict(attributes[name])
    copied.__dict__ = attributes
    return copied


def gather_in_single_precision(network: nn.Module) -> None:
    """Make the units of a working copy gather parameters in single precision or a wider dtype."""
    for module in network.modules():
        if _is_plain_unit(module):
            setattr(module, _IS_WIDE, True)


def _communicates(hook: Any) -> bool:
    """Whether a hook belongs to `fully_shard` or `replicate`."""
    owner = type(getattr(hook, "__self__", hook))
    return any(str(part.__module__).startswith(_HOOKS) for part in (owner, hook))


def _is_plain_unit(module: nn.Module) -> bool:
    return _enter in module._forward_pre_hooks.values()


def _modules_of_unit(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit, except the modules of inner units."""
    yield unit
    for child in unit.children():
        if not _is_plain_unit(child):
            yield from _modules_of_unit(child)


def _enter(unit: nn.Module, _: Any) -> None:
    """Replace the sharded parameters of the unit's modules by whole parameters."""
    vars(unit)[_ENTERED] = _GatheredUnit(unit)


def _leave(unit: nn.Module, _: Any, __: Any) -> None:
    """Restore the sharded parameters of the unit's modules."""
    gathered_unit = vars(unit).pop(_ENTERED, None)
    if gathered_unit is not None:
        gathered_unit.restore()


class _GatheredUnit:
    """A unit whose modules have whole parameters, from its construction until `restore`."""

    def __init__(self, unit: nn.Module) -> None:
        self._sharded: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in _modules_of_unit(unit):
            for name, parameter in module._parameters.items():
                if parameter is not None and is_sharded(parameter):
                    self._sharded.append((module, name, parameter))
        is_wide = getattr(unit, _IS_WIDE, False)
        gathered: dict[int, Any] = {}
        for module, name, parameter in self._sharded:
            value = _value(parameter, is_wide)
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
            gathered[value.untyped_storage().data_ptr()] = parameter
        self._hooks: _RegatheredTensors | None = None
        # Within transforms of torch.func, these hooks are forbidden.
        autograd: Any = torch._C._autograd
        if autograd._saved_tensors_hooks_is_enabled():
            self._hooks = _RegatheredTensors(gathered, is_wide)
            self._hooks.__enter__()

    def restore(self) -> None:
        """Restore the sharded parameters."""
        if self._hooks is not None:
            self._hooks.__exit__()
        for module, name, parameter in self._sharded:
            module._parameters[name] = parameter


def _value(parameter: Tensor, is_wide: bool) -> Tensor:
    value = full_value(parameter).contiguous()
    return value.to(wide(value.dtype)) if is_wide else value


class _RegatheredTensors(saved_tensors_hooks):
    """Hooks that keep gathered parameters out of the graph; the backward pass gathers them again.

    Args:
        gathered: The sharded parameters by the addresses of their whole values.
        is_wide: Whether the values are in single precision or wider.
    """

    def __init__(self, gathered: dict[int, Tensor], is_wide: bool) -> None:
        def pack(tensor: Tensor) -> Any:
            if type(tensor) not in (Tensor, nn.Parameter):
                return tensor
            parameter = gathered.get(tensor.untyped_storage().data_ptr())
            if parameter is None:
                return tensor
            return parameter, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            parameter, shape, stride, offset = packed
            return _value(parameter, is_wide).as_strided(shape, stride, offset)

        super().__init__(pack, unpack)
