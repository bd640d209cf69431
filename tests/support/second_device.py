"""A pretended second device, which counts the operations that make the host wait for it.

A tensor on this device contains a tensor on the CPU, but has a different device. As with an
accelerator, the host waits for values that it reads, for shapes that depend on values, and for
blocking copies. An operation with tensors of both devices is an error.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
# A device type that automatic differentiation treats like the CPU.
NAME = "lazy"
GENERATOR = torch.Generator
DEVICE = torch.device(NAME, 0)
# Operations that return a number or a truth value to the host.
_VALUES = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose}
# Operations whose result has a shape that depends on values.
_SHAPES = {
    *(aten.nonzero, aten.nonzero_numpy, aten.argwhere, aten.masked_select, aten.bincount),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
    *(aten.repeat_interleave, aten.masked_scatter_backward),
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten._to_copy, aten.copy_}
# Operations that may have tensors of both devices.
_MIXED = _COPIES | _INDEXED


class Elsewhere(Tensor):
    """A tensor on the second device.

    Attributes:
        contents: The tensor on the CPU that contains its values.
    """

    @staticmethod
    def __new__(cls, contents):
        return Tensor._make_wrapper_subclass(
            cls,
            contents.size(),
            strides=contents.stride(),
            storage_offset=contents.storage_offset(),
            dtype=contents.dtype,
            device=DEVICE,
        )

    def __init__(self, contents):
        self.contents = contents

    def __repr__(self):
        return f"Elsewhere({self.contents!r})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """A context in which the device can be used, and in which waiting for it is counted.

    Attributes:
        places: How often each line of the package waited, by `"file:line operation"`.
    """

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __enter__(self):
        # Random numbers are drawn on the CPU, and torch has no autocast for the device.
        self._patches = ExitStack()
        self._patches.enter_context(
            patch.object(torch, "Generator", lambda device=None: GENERATOR())
        )
        self._patches.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind: False))
        self._patches.enter_context(_Factories(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def note(self, operation):
        """Count that a line of the package waited."""
        self.places[f"{_line_of_package()} {operation}"] += 1

    @property
    def total(self):
        return sum(self.places.values())

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = operation.overloadpacket
        if _waits(packet, args, kwargs):
            self.note(packet.__name__)
        return _run(operation, args, kwargs)


class _Factories(TorchFunctionMode):
    """Functions that make tensors from numbers, which torch copies without the dispatcher."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.tolist and isinstance(args[0], Elsewhere):
            self._device.note("tolist")
            return args[0].contents.tolist()
        if function not in (torch.tensor, torch.as_tensor) or not _is_there(kwargs.get("device")):
            return function(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return args[0].to(kwargs.get("dtype", args[0].dtype)).to(kwargs["device"])
        self._device.note(function.__name__)
        return Elsewhere(function(*args, **{**kwargs, "device": None}))


def moved(model):
    """Move the parameters and buffers of a model to the device, and return the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved_values = Elsewhere(parameter.detach().clone())
                module._parameters[name] = nn.Parameter(moved_values, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Elsewhere(buffer.clone())
    return model


def _is_there(device):
    return device is not None and torch.device(device).type == NAME


def _tensors(x):
    """Return the tensors in the arguments of an operation; torch's pytrees would be slower."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return _tensors(list(x.values()))
    if isinstance(x, (list, tuple)):
        return [tensor for entry in x for tensor in _tensors(entry)]
    return []


def _mapped(kind, function, x):
    """Apply a function to each tensor of a type in nested lists, tuples and dictionaries."""
    if isinstance(x, kind):
        return function(x)
    if isinstance(x, dict):
        return {key: _mapped(kind, function, value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([_mapped(kind, function, entry) for entry in x])
    return x


def _run(operation, args, kwargs):
    leaves = _tensors((args, kwargs))
    are_there = [isinstance(x, Elsewhere) for x in leaves]
    packet = operation.overloadpacket
    # As in torch, a tensor without dimensions may be on any device.
    cpu_tensors = [x for x in leaves if not isinstance(x, Elsewhere) and x.ndim > 0]
    if any(are_there) and cpu_tensors and packet not in _MIXED:
        shapes = [tuple(x.shape) for x in cpu_tensors]
        raise RuntimeError(f"{operation} mixes devices: on the CPU are {shapes}.")
    cpu_args, cpu_kwargs = _mapped(Elsewhere, lambda x: x.contents, (args, kwargs))
    goes_there = any(are_there)
    if cpu_kwargs.get("device") is not None:
        goes_there = _is_there(cpu_kwargs["device"])
        cpu_kwargs = {**cpu_kwargs, "device": torch.device("cpu")}
    if packet is aten.copy_:
        goes_there = are_there[0]
    result = operation(*cpu_args, **cpu_kwargs)
    if not goes_there:
        return result
    result = _mapped(Tensor, Elsewhere, result)
    if not any(are_there):
        return result
    return return_and_correct_aliasing(operation, args, kwargs, result)


def _waits(packet, args, kwargs):
    leaves = _tensors((args, kwargs))
    is_any_there = any(isinstance(x, Elsewhere) for x in leaves)
    if packet is aten._to_copy:
        crosses = is_any_there != _is_there(kwargs.get("device") or leaves[0].device)
        # A copy to the host is waited for even if it does not block, because it is read next.
        return crosses and (is_any_there or not kwargs.get("non_blocking"))
    if packet is aten.copy_:
        crosses = isinstance(args[0], Elsewhere) != isinstance(args[1], Elsewhere)
        is_blocking = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        return crosses and args[1].ndim > 0 and is_blocking
    if not is_any_there:
        return False
    if packet in _INDEXED:
        # A boolean mask is turned into indices, and indices on the host are copied.
        indices = [i for i in args[1] if isinstance(i, Tensor)]
        return any(i.dtype in (torch.bool, torch.uint8) or not _is_there(i.device) for i in indices)
    return packet in _VALUES or packet in _SHAPES


def _line_of_package():
    frame = sys._getframe(2)
    while frame is not None and "/laplace_debias/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.rpartition('/laplace_debias/')[2]}:{frame.f_lineno}"
