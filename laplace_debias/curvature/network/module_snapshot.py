"""Snapshots of a model's modules, to detect that a copy of them is out of date."""

import types
from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from operator import is_
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

    They are compared by identity first, which takes a microsecond per module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        attributes = vars(module)
        self._type = type(module)
        self._names = tuple(attributes)
        # The same objects until they are assigned anew.
        self._values = tuple(attributes.values())
        # Most containers are those of hooks that a module does not have.
        self._empty: list[Any] = []
        self._registries: list[_Registry] = []
        self._contents: list[tuple[Any, Hashable]] = []
        for name, value in attributes.items():
            if type(value) not in _CONTAINERS:
                _constant(value)
            elif not value:
                self._empty.append(value)
            elif name in _REGISTRIES:
                self._registries.append(_Registry(value))
            else:
                self._contents.append((value, _constant(value)))

    def are_current(self) -> bool:
        """Whether the module's attributes are still the same."""
        attributes = vars(self.module)
        if type(self.module) is not self._type or tuple(attributes) != self._names:
            return False
        if not all(map(is_, attributes.values(), self._values)) or any(self._empty):
            return False
        for registry in self._registries:
            if not registry.is_current():
                return False
        return all(_constant(container) == contents for container, contents in self._contents)


class _Registry:
    """A module's submodules or tensors, with the tensors' places in memory.

    The copy holds the tensors' storage, so that no new tensor can lie there.

    Args:
        entries: The module's own dictionary.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries
        self._names = tuple(entries)
        self._values = tuple(entries.values())
        self._places: list[tuple[Tensor, tuple[Any, ...]]] = []
        for entry in self._values:
            if not isinstance(entry, Tensor):
                continue
            is_plain = type(entry) in (Tensor, nn.Parameter) and entry.is_leaf
            if not is_plain or entry.layout != torch.strided or is_kept(entry):
                raise UncomparableAttributeError
            self._places.append((entry, _place(entry)))

    def is_current(self) -> bool:
        """Whether the entries are the same objects, and the tensors where they were."""
        entries = self._entries
        if tuple(entries) != self._names or not all(map(is_, entries.values(), self._values)):
            return False
        return all(_place(tensor) == place for tensor, place in self._places)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


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
