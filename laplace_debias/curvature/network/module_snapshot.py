"""Snapshots of a model's modules, to detect that a copy of them is out of date."""

import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.frozen_tensors import place
from laplace_debias.curvature.network.quantised import is_never_copied

# Values of these types never change, and `copy.deepcopy` returns them unchanged.
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
# Attributes that torch sets, and on which no forward pass depends.
_NOTES_OF_TORCH = ("training", "_is_full_backward_hook")
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _UncomparableAttributeError(Exception):
    """A module has an attribute whose changes cannot be detected."""


class ModuleSnapshot:
    """The modules of a model: their types, attributes and hooks, and the places of their tensors.

    The values of the tensors are not part of the snapshot. As long as the snapshot is current, an
    earlier copy of the modules around the same tensors equals a new copy.

    Objects are compared by identity, all of them in a few calls, which takes a microsecond per
    module.

    Args:
        model: The model, whose changes must be detectable; `of` accepts any model.

    Attributes:
        buffers: The model's buffers.
    """

    @classmethod
    def of(cls, model: nn.Module) -> "ModuleSnapshot | None":
        """Take a snapshot, or return None if changes of the modules cannot be detected.

        Changes can be detected if the attributes of all modules are numbers, strings, functions,
        containers of these, or plain tensors.
        """
        try:
            return cls(model)
        except _UncomparableAttributeError:
            return None

    def __init__(self, model: nn.Module) -> None:
        self.buffers = list(model.buffers())
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._attributes = Entries(list(map(vars, self._modules)))
        # Most containers are empty, because they are meant for hooks, and most modules have none.
        self._empty: list[Any] = []
        registries: list[dict[str, Any]] = []
        self._contents: list[tuple[Any, Hashable]] = []
        for name, value in self._attributes.items():
            if type(value) not in _CONTAINERS:
                _constant(value)
            elif not value:
                self._empty.append(value)
            elif name in _REGISTRIES:
                registries.append(value)
            else:
                self._contents.append((value, _constant(value)))
        self._registries = Entries(registries)
        self._tensors: list[Tensor] = []
        for _, entry in self._registries.items():
            if isinstance(entry, Tensor):
                _check_comparable(entry)
                self._tensors.append(entry)
        # The copy keeps the tensors' storage alive, so that no new tensor can have the same
        # address.
        self._places = list(map(place, self._tensors))

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model's modules are unchanged."""
        modules = self._modules
        if model is not modules[0] or list(map(type, modules)) != self._types:
            return False
        if not self._attributes.are_in(list(map(vars, modules))):
            return False
        # The containers are the same objects, so only their contents may have changed.
        if any(self._empty) or not self._registries.are_in(self._registries.dictionaries):
            return False
        if list(map(place, self._tensors)) != self._places:
            return False
        try:
            return all(_constant(value) == contents for value, contents in self._contents)
        except _UncomparableAttributeError:
            return False


class Entries:
    """The entries of dictionaries at the time of construction.

    Args:
        dictionaries: The dictionaries.
    """

    def __init__(self, dictionaries: list[dict[str, Any]]) -> None:
        self.dictionaries = dictionaries
        self._names = list(map(tuple, dictionaries))
        self._values = [value for entries in dictionaries for value in entries.values()]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the names and values."""
        return zip(chain.from_iterable(self._names), self._values, strict=True)

    def are_in(self, dictionaries: list[dict[str, Any]]) -> bool:
        """Whether dictionaries have the same names in the same order and the same objects."""
        if list(map(tuple, dictionaries)) != self._names:
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, dictionaries)), self._values))


def _check_comparable(tensor: Tensor) -> None:
    """Require a plain tensor, whose changes are visible in its place or its values."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_leaf
    if not is_plain or tensor.layout != torch.strided or is_never_copied(tensor):
        raise _UncomparableAttributeError


def _constant(value: Any) -> Hashable:
    """Return a constant, or the contents of a container, as a tuple."""
    kind = type(value)
    if kind is OrderedDict or kind is dict:
        return (kind, *map(_constant, value.keys()), *map(_constant, value.values()))
    if kind is set:
        return frozenset(map(_constant, value))
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind, *map(_constant, value))
    if kind is float or kind is bool:
        return (kind, value)  # The type distinguishes 1, 1.0 and True, which compare equal.
    if isinstance(value, _CONSTANTS):
        return value
    raise _UncomparableAttributeError


def numbers_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the attributes that are numbers or strings, by the module's path and their name.

    Two attributes are left out: the mode, because working copies are in eval mode, and torch's flag
    for hooks.
    """
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name not in _NOTES_OF_TORCH
    }
