"""Fingerprints of a model besides its Bayesian parameters, a number a tensor: has it changed?"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def fingerprint(model: nn.Module, without: Collection[str]) -> dict[str, int]:
    """A number for every tensor of the model's state, the same wherever the model lies.

    It is the sum of the entries' bits, taken for integers: exact, so that no device rounds it
    otherwise, and read once. Training, another checkpoint or new statistics of a normalisation
    change it; exchanging entries does not. Buffers that checkpoints do not hold, such as caches
    that a forward pass fills, do not count.
    """
    sums = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and name not in without:
            sums[name] = sum_of_bits(value)
    return sums


def checksum(model: nn.Module) -> str:
    """A text that tells a model's state from another's."""
    return hashlib.sha256(json.dumps(fingerprint(model, ())).encode()).hexdigest()[:16]


def changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Names of what differs between the two, or is in only one of them."""
    names = []
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            names.append(name)
    return names


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of a tensor's entries, their bits taken for integers."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return int(bits(tensor.detach().flatten()).sum(dtype=torch.int64))


def bits(vector: Tensor) -> Tensor:
    """A vector's entries as integers of their size, or two for each complex one in float64."""
    return vector.contiguous().view(_INTEGERS.get(vector.element_size(), torch.int64))


# Entries of a tensor that are read: so many, or up to twice as many.
_SAMPLE = 1024


@dataclass
class Watch:
    """Watches what a model holds besides its Bayesian parameters.

    The first time everything is read. A copy, or what comes out of a pickle, begins anew.
    """

    marks: dict[str, tuple[tuple[Any, ...], Tensor]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

    def changed(
        self, model: nn.Module, without: Collection[str], sums: Mapping[str, int]
    ) -> list[str]:
        """Names of what is not as the fingerprint has it, as far as they are found."""
        gone = dict(sums)
        for name, x in model.state_dict().items():
            if not isinstance(x, Tensor) or name in without:
                continue
            if gone.pop(name, None) is None:
                return [name]
            # Where a tensor lies, how often torch has seen it change, and a sample of its entries.
            version = None if x.is_inference() else x._version
            dense = x.detach() if x.layout is torch.strided else x.detach().to_dense()
            place = dense.data_ptr(), version, x.dtype, tuple(x.shape), dense.stride()
            sample = bits(dense.flatten()[:: max(1, x.numel() // _SAMPLE)])
            before = self.marks.get(name)
            if before is not None and before[0] == place and before[1].equal(sample):
                continue
            if sum_of_bits(x) != sums[name]:
                return [name]
            self.marks[name] = place, sample.clone()
        return list(gone)
