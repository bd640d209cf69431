"""Fingerprints of a model's tensors, which are the same in every process and in files."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.adapters import unused_prefixes
from laplace_debias.curvature.network.quantised import plain_parts
from laplace_debias.system.files import bytes_of
from laplace_debias.system.gathering import full_value, is_sharded

# The integer dtype for each entry size in bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def fingerprint(model: nn.Module, excluded: Collection[str]) -> dict[str, int]:
    """Compute a number for each tensor of the model's state that is the same on every device.

    The number is the sum of the entries' bits, read as integers. The sum is exact, so it does not
    depend on a device's rounding. Training, a different checkpoint or new statistics of a
    normalisation change the number, but swapping entries does not. Buffers that are not in
    checkpoints, such as caches that a forward pass fills, are not included.
    """
    sums = {}
    for name, tensor in state_tensors(model):
        if name not in excluded:
            sums[name] = sum_of_bits(tensor)
    return sums


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under every name that they have.

    The tensors are those in `state_dict`, without PEFT's tensors on which the outputs do not
    depend. `state_dict` itself is not called, because quantised layers change during its call.
    """
    unused = unused_prefixes(model)
    modules = list(model.named_modules(remove_duplicate=False))
    for path, module in modules:
        for key, parameter in module._parameters.items():
            name = f"{path}.{key}".lstrip(".")
            if parameter is not None and not f"{name}.".startswith(unused):
                yield name, parameter
    for path, module in modules:
        for key, buffer in module._buffers.items():
            name = f"{path}.{key}".lstrip(".")
            is_saved = buffer is not None and key not in module._non_persistent_buffers_set
            if is_saved and not f"{name}.".startswith(unused):
                yield name, buffer


def checksum(model: nn.Module) -> str:
    """Hash the fingerprint of a model; this identifies the model of a run in its `run.json`."""
    return hashlib.sha256(json.dumps(fingerprint(model, ())).encode()).hexdigest()[:16]


def sum_of_bits(tensor: Tensor) -> int:
    """Sum the entries of a tensor, reading their bits as integers."""
    total = 0
    if is_sharded(tensor):
        tensor = full_value(tensor)
    for values in plain_parts(tensor):
        total += int(as_integers(values.flatten().contiguous()).sum(dtype=torch.int64))
    return total


def as_integers(values: Tensor) -> Tensor:
    """View the bits of a tensor's entries as integers; an entry of 16 bytes as two integers."""
    if values.element_size() == 16:
        values = torch.view_as_real(values)
    return values.view(_INTEGERS.get(values.element_size(), torch.int64))


def digests(model: nn.Module) -> dict[str, str]:
    """Hash each tensor of the model's state; unlike in `fingerprint`, the entries' order counts."""
    return {name: digest_of([tensor]) for name, tensor in state_tensors(model)}


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Hash tensors; the result depends on their dtypes, shapes and entries, and on the order.

    The hash takes one to two seconds per GB on the CPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if is_sharded(tensor):
            tensor = full_value(tensor)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        for values in plain_parts(tensor):
            digest.update(bytes_of(values))
    return digest.hexdigest()
