"""A second device on the CPU: counts what would make the host wait for an accelerator.

Tensors on it hold a tensor of the CPU and say that they are elsewhere. As on an accelerator, what
goes to the host, a shape that depends on values, or a blocking copy is something to wait for; and
an operation between the two devices is an error.
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
# A device that automatic differentiation treats as the CPU.
NAME = "lazy"
GENERATOR = torch.Generator
DEVICE = torch.device(NAME, 0)
# A number or a truth value that goes to the host.
_VALUES = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose}
# Results whose shape depends on values.
_SHAPES = {
    *(aten.nonzero, aten.nonzero_numpy, aten.argwhere, aten.masked_select, aten.bincount),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
    *(aten.repeat_interleave, aten.masked_scatter_backward),
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten._to_copy, aten.copy_}
# What may take tensors of both devices.
_MIXED = _COPIES | _INDEXED


class Elsewhere(Tensor):
    """A tensor on the second device; `there` is what it holds."""

    @staticmethod
    def __new__(cls, there):
        return Tensor._make_wrapper_subclass(
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
        )

    def __init__(self, there):
        self.there = there

    def __repr__(self):
        return f"Elsewhere({self.there!r})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """While entered, the device can be made use of, and waiting for it is counted.

    Attributes:
        places: How often each line of the package waited, under `"file:line operation"`.
    """

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __enter__(self):
        # Numbers are drawn on the CPU, and torch knows no autocast of the device.
        self._left = ExitStack()
        self._left.enter_context(patch.object(torch, "Generator", lambda device=None: GENERATOR()))
        self._left.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind: False))
        self._left.enter_context(_Factories(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._left.close()

    def note(self, what):
        """Count that a line of the package waited."""
        self.places[f"{_line_of_package()} {what}"] += 1

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
    """Tensors made of numbers, which torch copies past the dispatcher."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.tolist and isinstance(args[0], Elsewhere):
            self._device.note("tolist")
            return args[0].there.tolist()
        if function not in (torch.tensor, torch.as_tensor) or not _is_there(kwargs.get("device")):
            return function(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return args[0].to(kwargs.get("dtype", args[0].dtype)).to(kwargs["device"])
        self._device.note(function.__name__)
        return Elsewhere(function(*args, **{**kwargs, "device": None}))


def moved(model):
    """The model, its parameters and buffers moved to the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = Elsewhere(parameter.detach().clone())
                module._parameters[name] = nn.Parameter(there, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Elsewhere(buffer.clone())
    return model


def _is_there(device):
    return device is not None and torch.device(device).type == NAME


def _tensors(x):
    """Those in what an operation takes; torch's own trees take most of a test's time."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return _tensors(list(x.values()))
    return [t for entry in x for t in _tensors(entry)] if isinstance(x, (list, tuple)) else []


def _mapped(kind, function, x):
    """The same with a function of each tensor of a kind."""
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
    # As in torch: a number may lie anywhere.
    strangers = [x for x in leaves if not isinstance(x, Elsewhere) and x.ndim > 0]
    if any(are_there) and strangers and packet not in _MIXED:
        shapes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(f"{operation} mixes devices: on the CPU are {shapes}.")
    inner_args, inner = _mapped(Elsewhere, lambda x: x.there, (args, kwargs))
    goes_there = any(are_there)
    if "device" in inner and inner["device"] is not None:
        goes_there = _is_there(inner["device"])
        inner = {**inner, "device": torch.device("cpu")}
    if packet is aten.copy_:
        goes_there = are_there[0]
    found = operation(*inner_args, **inner)
    if not goes_there:
        # A copy to the same device as far as torch sees: it must not be one tensor.
        return found
    found = _mapped(Tensor, Elsewhere, found)
    return return_and_correct_aliasing(operation, args, kwargs, found) if any(are_there) else found


def _waits(packet, args, kwargs):
    leaves = _tensors((args, kwargs))
    is_any_there = any(isinstance(x, Elsewhere) for x in leaves)
    if packet is aten._to_copy:
        crosses = is_any_there != _is_there(kwargs.get("device") or leaves[0].device)
        # To the host a copy that does not block is not there when it is read.
        return crosses and (is_any_there or not kwargs.get("non_blocking"))
    if packet is aten.copy_:
        crosses = isinstance(args[0], Elsewhere) != isinstance(args[1], Elsewhere)
        is_blocking = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        return crosses and args[1].ndim > 0 and is_blocking
    if not is_any_there:
        return False
    if packet in _INDEXED:
        # A mask of bools is turned into indices, and indices of the host are copied.
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
