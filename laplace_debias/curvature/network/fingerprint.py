"""What a model holds besides its Bayesian parameters, in a number a tensor: has it changed?"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def fingerprint(model: nn.Module, without: Collection[str]) -> dict[str, int]:
    """A number for every tensor of the model's state, the same wherever the model lies.

    It is the sum of the entries' bits, taken for integers: exact, so that no device rounds it
    otherwise, and read once. Training, another checkpoint or new statistics of a normalisation
    change it; exchanging entries does not.

    Args:
        model: The model. Buffers that its checkpoints do not hold, such as caches that a forward
            pass fills, do not count.
        without: Names of parameters to leave out.
    """
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in without
    }
    return {name: _sum_of_bits(value) for name, value in state.items()}


def changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Names of what differs between the two, or is in only one of them."""
    names = dict.fromkeys([*before, *now])
    return [name for name in names if before.get(name) != now.get(name)]


def _sum_of_bits(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().contiguous().flatten()
    integers = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    return int(integers.sum(dtype=torch.int64))
