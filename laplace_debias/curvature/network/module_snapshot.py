"""Snapshots of a model's modules, to detect that a copy of them is out of date."""

import types
from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.quantised import is_kept

# Values of these types never change, and `copy.deepcopy` returns them as they are.
_CONSTANTS = (
    types.NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.EllipsisType,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
_CONTAINERS = (OrderedDict, dict, list, set, tuple, torch.Size)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class UncomparableAttributeError(Exception):
    """A module has an attribute whose changes cannot be detected."""


class ModuleSnapshot:
    """The modules of a model: their types, attributes, hooks, and where their tensors lie.

    The values of the tensors are not part of it. As long as it is current, a copy of the modules
    around the same tensors is what a new copy would be.

    Args:
        model: The model.

    Attributes:
        buffers: The model's buffers.

    Raises:
        UncomparableAttributeError: If a module has an attribute other than numbers, strings,
            functions and containers of them, or a tensor that is not plain.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [_Attributes(module) for module in model.modules()]
        self.buffers = list(model.buffers())

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model's modules are still as they were."""
        if model is not self._attributes[0].module:
            return False
        try:
            return all(attributes.are_current() for attributes in self._attributes)
        except UncomparableAttributeError:
            return False


class _Attributes:
    """The attributes of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        attributes = vars(module)
        self._type = type(module)
        self._names = list(attributes)
        # Most containers are those of hooks that a module does not have.
        self._empty: dict[str, type] = {}
        self._constants: dict[str, Any] = {}
        self._contents: dict[str, Hashable] = {}
        for name, value in attributes.items():
            if type(value) in _CONTAINERS:
                if value:
                    self._contents[name] = _contents(name, value)
                else:
                    self._empty[name] = type(value)
            else:
                _constant(value)
                # The same object until it is assigned anew.
                self._constants[name] = value

    def are_current(self) -> bool:
        """Whether the module's attributes are still the same."""
        attributes = vars(self.module)
        if type(self.module) is not self._type or list(attributes) != self._names:
            return False
        for name, kind in self._empty.items():
            value = attributes[name]
            if type(value) is not kind or value:
                return False
        for name, constant in self._constants.items():
            if attributes[name] is not constant:
                return False
        for name, contents in self._contents.items():
            if _contents(name, attributes[name]) != contents:
                return False
        return True


def _contents(name: str, value: Any) -> Hashable:
    """Return what an attribute holds: tensors with their places, submodules, or constants."""
    return _registry(value) if name in _REGISTRIES else _constant(value)


def _constant(value: Any) -> Hashable:
    """Return a constant, or what a container holds, as a tuple."""
    kind = type(value)
    if kind is OrderedDict or kind is dict:
        return (kind, *map(_constant, value.keys()), *map(_constant, value.values()))
    if kind is set:
        return frozenset(map(_constant, value))
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind, *map(_constant, value))
    if kind is float or kind is bool:
        return (kind, value)  # 1, 1.0 and True are equal.
    if isinstance(value, _CONSTANTS):
        return value
    raise UncomparableAttributeError


def _registry(entries: dict[str, Any]) -> Hashable:
    """List the submodules or tensors of a module by name, tensors with their place in memory.

    The copy holds the tensors' storage, so that no new tensor can lie there.
    """
    contents: list[Hashable] = []
    for name, entry in entries.items():
        contents.append(name)
        if not isinstance(entry, Tensor):
            contents.append(id(entry))
            continue
        is_plain = type(entry) in (Tensor, nn.Parameter) and entry.is_leaf
        if not is_plain or entry.layout != torch.strided or is_kept(entry):
            raise UncomparableAttributeError
        place = (id(entry), entry.data_ptr(), entry.dtype, entry.shape, entry.stride())
        contents.append(place)
    return tuple(contents)
