"""Whether what a model holds is still what it was, without reading all of it every time.

torch counts the changes of a tensor, and a tensor that is replaced lies in another memory. Where
neither counter nor memory has changed, few entries are read instead of all. For some changes torch
does not count: those through `.data`, NumPy, DLPack or the storage, and the steps of fused
optimizers. They show in the entries that are read, evenly spread over every tensor, unless they are
few in a large one. For these each check reads one tensor in full, in turn.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from laplace_debias.curvature.network.fingerprint import bits, state_of, sum_of_bits

# Entries of a tensor that are read: so many, or up to twice as many.
_SAMPLE = 1024


@dataclass(frozen=True, eq=False)
class _Mark:
    """How a tensor was found.

    Attributes:
        memory: Its storage; while this is kept, no other storage is taken for it.
        place: Which part of the storage it is, as what.
        version: How often it was changed, as torch counts.
        sample: Some of its entries, as integers.
    """

    memory: StorageWeakRef
    place: tuple[Any, ...]
    version: int
    sample: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Mark | None":
        """The mark of a tensor; None where torch does not count or few entries cannot be read."""
        if not _is_plain(x):
            return None
        return cls(StorageWeakRef(x.untyped_storage()), _place(x), x._version, _sample(x).clone())

    def fits(self, x: Tensor) -> bool:
        """Whether memory and counter of a tensor are those of the mark."""
        return (
            _is_plain(x)
            and self.version == x._version
            and self.place == _place(x)
            and not self.memory.expired()
            and self.memory == StorageWeakRef(x.untyped_storage())
        )


class Watch:
    """Watches what a model holds besides its Bayesian parameters.

    The first time everything is read. A copy, or what comes out of a pickle, begins anew.
    """

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._turn = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

    def changed(
        self, model: nn.Module, without: Collection[str], sums: Mapping[str, int]
    ) -> list[str]:
        """Names of what is not as the fingerprint has it, as far as they are found.

        Args:
            model: The model.
            without: As `fingerprint` takes it.
            sums: What `fingerprint` gave.
        """
        state = state_of(model, without)
        wrong = [
            name for name in dict.fromkeys([*sums, *state]) if (name in sums) != (name in state)
        ]
        if wrong:
            return wrong
        marks = self._marks
        known = [name for name, x in state.items() if name in marks and marks[name].fits(x)]
        in_full = set(state).difference(known)
        if known:
            self._turn += 1
            in_full.add(known[self._turn % len(known)])
        new = {name: _Mark.of(state[name]) for name in in_full}
        wrong = [
            name for name in state if name in in_full and sum_of_bits(state[name]) != sums[name]
        ]
        wrong += _with_other_samples({name: state[name] for name in known}, marks)
        if not wrong:
            found = {name: mark for name, mark in new.items() if mark is not None}
            self._marks = {**{name: marks[name] for name in known}, **found}
        return wrong


def _with_other_samples(state: Mapping[str, Tensor], marks: Mapping[str, _Mark]) -> list[str]:
    """Names of tensors whose samples have changed; all of a dtype and device are read at once."""
    alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, x in state.items():
        sample = _sample(x)
        alike.setdefault((sample.dtype, sample.device), {})[name] = sample
    wrong = []
    for samples in alike.values():
        before = [marks[name].sample for name in samples]
        if not torch.cat(list(samples.values())).equal(torch.cat(before)):
            wrong += [name for name, now in samples.items() if not now.equal(marks[name].sample)]
    return wrong


def _sample(x: Tensor) -> Tensor:
    """Entries at even distances in memory, as integers."""
    in_memory = x.detach().as_strided((x.numel(),), (1,))
    return bits(in_memory[:: max(1, x.numel() // _SAMPLE)])


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor lies in memory of its own without gaps, and torch counts its changes."""
    if x.layout is not torch.strided or x.is_inference() or x.is_meta:
        return False
    if type(x).__torch_dispatch__ != Tensor.__torch_dispatch__:
        return False
    size = 1
    for step, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1 and step != size:
            return False
        size *= length
    return True
