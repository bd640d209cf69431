"""What a pass over data has come to, so that another process can go on with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from laplace_debias.curvature.network.fingerprint import MIX, bits, mark_in_order
from laplace_debias.curvature.network.inputs import Inputs, tensors_of

# Where a pass keeps what it sums: from a key (a block, say) to a tensor that is added to, or to a
# list of tensors that are as good if they are concatenated along their first dimension.
Held = Sequence[dict[Any, Any]]


@dataclass(frozen=True)
class Entry:
    """One tensor of what a pass keeps.

    Attributes:
        table: Which of the pass's dictionaries holds it.
        key: Under what name.
        is_list: Whether a list of tensors is there, of which this is the concatenation.
        value: The tensor.
    """

    table: int
    key: str
    is_list: bool
    value: Tensor


@dataclass(frozen=True)
class PassState:
    """What a pass has come to.

    Attributes:
        num_batches: How many batches are in it.
        spans: Which examples are in it: the place of the first of some neighbours, and how many
            they are, `[k, 2]`, int64.
        marks: Their marks, in this order, `[n]`, int64.
        along: The mark of what was measured along, see `mark_of_all`.
        num_examples: As `Seen` has it; so are the next two.
        nll: The summed loss.
        num_outputs: How many numbers the network gave.
        entries: What was summed.
    """

    num_batches: int
    spans: Int[Tensor, "k 2"]
    marks: Int[Tensor, " n"]
    along: int
    num_examples: int
    nll: float
    num_outputs: int
    entries: list[Entry]


@runtime_checkable
class Store(Protocol):
    """Where the states of a fit's passes are kept, those of each process apart."""

    @property
    def place(self) -> str:
        """What messages call it."""

    def load(self, number: int) -> dict[int, PassState]:
        """The states of a pass that this process goes on with, by the processes that saved them.

        Those of each process that saved one fall to one of the processes that there are now.
        """

    def save(self, number: int, state: PassState) -> None:
        """Keep this process's state of a pass in the place of its last one."""

    def load_along(self, number: int) -> dict[str, Tensor] | None:
        """What rank 0 has saved for the others to measure a pass along; None if nothing."""

    def save_along(self, number: int, directions: Mapping[str, Tensor]) -> None:
        """Keep what a pass is measured along."""

    def forget(self, number: int, savers: Sequence[int]) -> None:
        """Remove the states of a pass that others saved, and that are in this process's own."""


def marks_of_examples(x: Inputs, y: Tensor) -> Int[Tensor, " n"]:
    """An integer for each example of a batch that changes with any of its entries.

    They are exact, and are left on the device: nothing waits for them.
    """
    marks = torch.zeros(len(y), dtype=torch.int64)
    for tensor in [*tensors_of(x), y]:
        if not tensor.numel():
            continue
        entries = bits(tensor.detach().flatten())
        # What is not of the examples is of all of them.
        rows = entries.reshape(len(y), -1) if entries.numel() % len(y) == 0 else entries[None]
        marks = marks.to(entries.device) * MIX + rows.sum(1, dtype=torch.int64)
    return marks


def mark_of_all(tensors: Sequence[Tensor | None]) -> int:
    """An integer that changes with any entry of some tensors, and if two change places; 0 for none.

    It is exact.
    """
    mark = 0
    for tensor in tensors:
        of_tensor = 0 if tensor is None else int(mark_in_order(tensor))
        mark = (mark * MIX + of_tensor) % 2**63
    return mark


def entries_of(held: Held) -> list[Entry]:
    """The tensors of what a pass keeps."""
    entries = []
    for table, values in enumerate(held):
        for key, value in values.items():
            name = key if isinstance(key, str) else key.name
            if not isinstance(value, list):
                entries.append(Entry(table, name, False, value))
            elif value:
                entries.append(Entry(table, name, True, torch.cat(value)))
    return entries


def put_back(
    entries: Sequence[Entry], held: Held, keys: Mapping[str, Any], device: torch.device
) -> None:
    """Restore what a pass kept, or several processes in the same one.

    Args:
        entries: As `entries_of` gave them; what has the same name is summed, or joined to a list.
        held: Where the pass keeps them.
        keys: The keys of `held` by their names; a text stands for itself.
        device: Where the tensors shall be.
    """
    begun = set()
    for entry in entries:
        values, key = held[entry.table], keys.get(entry.key, entry.key)
        value = entry.value.to(device)
        place = entry.table, entry.key
        if entry.is_list:
            # The list itself stays: the pass may hold it elsewhere, too.
            kept = values.setdefault(key, [])
            kept[:] = [*kept, value] if place in begun else [value]
        elif place in begun:
            values[key] = values[key] + value
        else:
            values[key] = value
        begun.add(place)
