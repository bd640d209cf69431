"""Counts what makes the host wait for an accelerator, on any machine.

Where a value of a tensor decides what the host does next (a branch, a shape, a Python number), the
host waits until the device has computed it. On the CPU the same calls happen and cost nothing, so
that they can be counted here, without an accelerator.
"""

import sys
from collections import Counter
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# A number or a truth value that goes to the host.
_VALUES = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose}
# Results whose shape depends on values.
_SHAPES = {
    *(aten.nonzero, aten.nonzero_numpy, aten.argwhere, aten.masked_select, aten.bincount),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
    *(aten.unique_dim_consecutive, aten.repeat_interleave, aten.masked_scatter_backward),
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# What copies a tensor to the host past the dispatcher.
_COPIES = ("tolist", "numpy", "cpu", "__array__")


class DeviceReads(TorchDispatchMode):
    """Counts reads of the device while it is entered.

    Attributes:
        places: How often each line of the package read, under `"file:line operation"`.
    """

    def __init__(self):
        super().__init__()
        self.places = Counter()

    @property
    def total(self):
        return sum(self.places.values())

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if _reads(operation.overloadpacket, args):
            self.note(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))

    def note(self, what):
        """Count a read by the line of the package that asked for it."""
        frame = sys._getframe(1)
        while frame is not None and "laplace_debias/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            self.places[f"elsewhere {what}"] += 1
            return
        path = frame.f_code.co_filename.rpartition("laplace_debias/")[2]
        self.places[f"{path}:{frame.f_lineno} {what}"] += 1


def _reads(packet, args):
    if packet in _INDEXED:
        # A mask of bools is turned into indices, as many as it has ones.
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return packet in _VALUES or packet in _SHAPES


@contextmanager
def counted_reads():
    """Counts within the block; yields the `DeviceReads`."""
    reads = DeviceReads()
    kept = {name: getattr(Tensor, name) for name in _COPIES}

    def counting(name):
        def method(self, *args, **kwargs):
            reads.note(name)
            with torch.utils._python_dispatch._disable_current_modes():
                return kept[name](self, *args, **kwargs)

        return method

    for name in _COPIES:
        setattr(Tensor, name, counting(name))
    try:
        with reads:
            yield reads
    finally:
        for name, method in kept.items():
            setattr(Tensor, name, method)
