"""Fingerprints of a model's tensors, which are used to detect changes."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.adapters import unused_originals
from laplace_debias.curvature.network.module_snapshot import (
    ModuleSnapshot,
    UncomparableAttributeError,
)
from laplace_debias.curvature.network.quantised import plain_parts
from laplace_debias.system.files import bytes_of
from laplace_debias.system.gathering import full_value, is_sharded

# Integers with as many bytes as an entry. An entry of 16 bytes is read as two integers of 8 bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def fingerprint(model: nn.Module, excluded: Collection[str]) -> dict[str, int]:
    """Compute a number for each tensor of the model's state, the same on every device.

    The number is the sum of the entries' bits, read as integers. The sum is exact, so it does not
    depend on a device's rounding. Training, a different checkpoint or new statistics of a
    normalisation change the number, but exchanging entries does not. Buffers that are not in
    checkpoints, such as caches that a forward pass fills, are not included.
    """
    sums = {}
    for name, tensor in _state(model):
        if name not in excluded:
            sums[name] = sum_of_bits(tensor)
    return sums


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under every name that they have.

    These are the tensors of `state_dict`, except for modules that PEFT has replaced. `state_dict`
    itself is not called, because quantised layers change during its call.
    """
    replaced = unused_originals(model)
    modules = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if not f"{path}.".startswith(replaced)
    ]
    for path, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{key}".lstrip("."), parameter
    for path, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}".lstrip("."), buffer


def checksum(model: nn.Module) -> str:
    """Hash a model's state."""
    return hashlib.sha256(json.dumps(fingerprint(model, ())).encode()).hexdigest()[:16]


def sum_of_bits(tensor: Tensor) -> int:
    """Sum the entries of a tensor, reading their bits as integers."""
    total = 0
    if is_sharded(tensor):
        tensor = full_value(tensor)
    for values in plain_parts(tensor):
        integer = _INTEGERS.get(values.element_size(), torch.int64)
        total += int(values.flatten().contiguous().view(integer).sum(dtype=torch.int64))
    return total


def digests(model: nn.Module) -> dict[str, str]:
    """Hash each tensor of the model's state; unlike `fingerprint`, the order of entries counts."""
    return {name: digest_of([tensor]) for name, tensor in _state(model)}


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Hash tensors; the result depends on the shapes, the entries and the order of the entries.

    This takes one to two seconds per GB, on the CPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if is_sharded(tensor):
            tensor = full_value(tensor)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        for values in plain_parts(tensor):
            digest.update(bytes_of(values))
    return digest.hexdigest()


# The number of entries of a tensor that are compared; the actual number is up to twice this.
_SAMPLE_SIZE = 1024


@dataclass(frozen=True, eq=False)
class _Trace:
    """A tensor's place in memory, the number of torch's changes to it, and some of its entries.

    Attributes:
        place: The address, version, dtype, shape and strides.
        entries: The sampled entries as a view of the tensor's storage, as integers; None if they
            cannot be a view.
        sample: The values of these entries at the time of the trace.
    """

    place: tuple[Any, ...]
    entries: Tensor | None
    sample: Tensor

    @classmethod
    def of_values(cls, values: Tensor) -> "_Trace":
        """Take a trace of a tensor."""
        entries = _sampled_entries(values)
        sample = entries.clone()
        is_view = entries.data_ptr() == values.data_ptr()
        return cls(_place(values), entries if is_view else None, sample)

    def is_current(self, values: Tensor) -> bool:
        """Whether the tensor has not changed since the trace."""
        if _place(values) != self.place:
            return False
        # Writing through `.data` does not change the version.
        entries = _sampled_entries(values) if self.entries is None else self.entries
        return self.sample.equal(entries)


@dataclass(frozen=True, eq=False)
class _CheckedModel:
    """A model that was found unchanged, with the data for checking that it still is unchanged.

    Attributes:
        snapshot: The modules, and the places of their tensors in memory.
        mean: The posterior's mean.
        parameters: The Bayesian parameters, each with the matching part of the mean.
        versions: The other tensors, each with its version.
        samples: Sampled entries of the other tensors, in one list per dtype, with their values.
    """

    snapshot: ModuleSnapshot
    mean: Tensor
    parameters: list[tuple[Tensor, Tensor]]
    versions: list[tuple[Tensor, int]]
    samples: list[tuple[list[Tensor], Tensor]]

    @classmethod
    def build(
        cls,
        model: nn.Module,
        names: Collection[str],
        mean: Tensor,
        traces: Mapping[str, list[_Trace]],
    ) -> "_CheckedModel | None":
        """Prepare the comparison; None if the whole model has to be read every time."""
        try:
            snapshot = ModuleSnapshot(model)
        except UncomparableAttributeError:
            return None
        values = [model.get_parameter(name).detach() for name in names]
        parts = mean.split([parameter.numel() for parameter in values])
        parameters = []
        for parameter, part in zip(values, parts, strict=True):
            if parameter.dtype != mean.dtype or not parameter.is_contiguous():
                return None
            parameters.append((parameter.view(-1), part))
        versions = []
        entries = defaultdict[torch.dtype, list[Tensor]](list)
        sampled_values = defaultdict[torch.dtype, list[Tensor]](list)
        for name, tensor in _state(model):
            if name in names:
                continue
            if tensor.is_inference():
                return None
            versions.append((tensor, tensor._version))
            for trace in traces[name]:
                if trace.entries is None:
                    return None
                entries[trace.entries.dtype].append(trace.entries)
                sampled_values[trace.entries.dtype].append(trace.sample)
        samples = [(part, torch.cat(sampled_values[dtype])) for dtype, part in entries.items()]
        return cls(snapshot, mean, parameters, versions, samples)

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model is still the same."""
        if not self.snapshot.is_current(model):
            return False
        if any(tensor._version != version for tensor, version in self.versions):
            return False
        # Writing through `.data` does not change the version.
        if not all(torch.cat(entries).equal(values) for entries, values in self.samples):
            return False
        return all(parameter.equal(values) for parameter, values in self.parameters)


@dataclass
class ChangeDetector:
    """A detector of changes in a model's state outside the Bayesian parameters.

    The first call reads the whole model. A copied or unpickled detector starts from the beginning.
    """

    traces: dict[str, list[_Trace]] = field(default_factory=dict, repr=False)
    _checked: _CheckedModel | None = field(default=None, repr=False)

    def unchanged_modules(self, model: nn.Module, mean: Tensor) -> ModuleSnapshot | None:
        """Return the modules' snapshot if nothing has changed since `remember` was called.

        The modules' attributes and the versions of the tensors are compared. The values are
        compared only for the Bayesian parameters and for a sample of each other tensor.

        Args:
            model: The model.
            mean: The posterior's mean.

        Returns:
            The snapshot; None after a change, or if nothing is remembered.
        """
        checked = self._checked
        if checked is None or checked.mean is not mean or not checked.is_current(model):
            return None
        return checked.snapshot

    def remember(
        self, model: nn.Module, names: Collection[str], mean: Tensor
    ) -> ModuleSnapshot | None:
        """Remember that a model was found unchanged.

        Args:
            model: The model, which `changed` has compared.
            names: The Bayesian parameters, whose values are the posterior's mean.
            mean: The posterior's mean.

        Returns:
            A snapshot of the model's modules; None if the whole model has to be read every time.
        """
        self._checked = _CheckedModel.build(model, names, mean, self.traces)
        return None if self._checked is None else self._checked.snapshot

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangeDetector, ()

    def changed(
        self, model: nn.Module, excluded: Collection[str], sums: Mapping[str, int]
    ) -> list[str]:
        """Return the names of tensors that differ from the fingerprint or are missing."""
        missing = dict(sums)
        for name, tensor in _state(model):
            if name in excluded:
                continue
            if missing.pop(name, None) is None:
                return [name]
            parts = list(plain_parts(tensor))
            if _are_current(self.traces.get(name), parts):
                continue
            traces = [_Trace.of_values(values) for values in parts]
            if sum_of_bits(tensor) != sums[name]:
                return [name]
            self.traces[name] = traces
        return list(missing)


def _place(values: Tensor) -> tuple[Any, ...]:
    version = None if values.is_inference() else values._version
    return values.data_ptr(), version, values.dtype, values.shape, values.stride()


def _sampled_entries(values: Tensor) -> Tensor:
    """Take some of the entries at equal distances, as integers."""
    entries = values.detach().flatten()[:: max(1, values.numel() // _SAMPLE_SIZE)]
    return entries.view(_INTEGERS.get(values.element_size(), torch.int64))


def _are_current(traces: list[_Trace] | None, parts: list[Tensor]) -> bool:
    if traces is None or len(traces) != len(parts):
        return False
    return all(trace.is_current(values) for trace, values in zip(traces, parts, strict=True))
