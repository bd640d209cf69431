"""Detection of changes in tensors without reading all of their entries."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.network.fingerprints import as_integers

# The minimum number of entries that are compared for a larger tensor; the actual number is less
# than twice as large.
_SAMPLE_SIZE = 1024


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the address of a tensor's entries, their dtype, and their layout in memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return torch's count of each tensor's changes, or None for a tensor from inference mode."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


class FrozenTensors:
    """Tensors that should not change, with their places, their versions, and some of their entries.

    If a tensor's storage is replaced, its place changes. torch counts changes in place in the
    tensor's version. Writing through `.data` or NumPy changes neither the place nor the version, so
    a sample of the entries is compared too.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._places = list(map(place, tensors))
        self._versions = versions(tensors)
        # The entries of all tensors are compared at once, which is faster on a GPU. They are views,
        # which keep the storages alive, so that no new tensor can have the same address.
        entries = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
        for tensor in tensors:
            sampled = _sampled_entries(tensor)
            entries[sampled.device, sampled.dtype].append(sampled)
        self._samples = [(views, torch.cat(views)) for views in entries.values()]

    def are_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the given tensors are in the same places as these, and have not changed."""
        # A new parameter around the same storage counts its changes separately.
        is_same = list(map(place, tensors)) == self._places and versions(tensors) == self._versions
        return is_same and self.are_unchanged()

    def are_unchanged(self) -> bool:
        """Whether nothing has been written to these tensors."""
        if versions(self._tensors) != self._versions:
            return False
        return all(torch.cat(views).equal(values) for views, values in self._samples)


def _sampled_entries(tensor: Tensor) -> Tensor:
    """View entries at equal distances in a tensor's memory as integers."""
    integers = as_integers(tensor.detach())
    length = 0
    if integers.numel():
        last = [size - 1 for size in integers.shape]
        length = 1 + sum(i * stride for i, stride in zip(last, integers.stride(), strict=True))
    distance = max(1, length // _SAMPLE_SIZE)
    return integers.as_strided((-(-length // distance),), (distance,))
