"""What a pass over data has come to, so that another process can go on with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from laplace_debias.curvature.network.fingerprint import bits
from laplace_debias.curvature.network.inputs import Inputs, tensors_of

# An odd number without a pattern: the marks of batches in another order add up to another one.
MIX = -7046029254386353131
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
        first_mark: The mark of the first one.
        mark: The mark of all of them, in their order.
        num_examples: As `Seen` has it; so are the next two.
        nll: The summed loss.
        num_outputs: How many numbers the network gave.
        entries: What was summed.
    """

    num_batches: int
    first_mark: int
    mark: int
    num_examples: int
    nll: float
    num_outputs: int
    entries: list[Entry]


@runtime_checkable
class Store(Protocol):
    """Where the states of a fit's passes are kept."""

    @property
    def place(self) -> str:
        """What messages call it."""

    def load(self, number: int) -> PassState | None:
        """The state of a pass; None if there is none."""

    def save(self, number: int, state: PassState) -> None:
        """Keep the state of a pass in the place of the last one."""


def mark_of_batch(x: Inputs, y: Tensor) -> Tensor:
    """An integer that changes with any entry of a batch and with the order of its examples, 0-d.

    It is exact, and is left on the device: nothing waits for it.
    """
    mark = torch.zeros((), dtype=torch.int64)
    for tensor in [*tensors_of(x), y]:
        if not tensor.numel():
            continue
        entries = bits(tensor.detach().flatten())
        rows = entries.reshape(len(y), -1) if entries.numel() % len(y) == 0 else entries[None]
        of_rows = rows.sum(1, dtype=torch.int64)
        places = torch.arange(1, 2 * len(of_rows), 2, device=of_rows.device) * MIX
        mark = mark.to(of_rows.device) * MIX + (of_rows * places).sum()
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
    """Restore what a pass kept.

    Args:
        entries: As `entries_of` gave them.
        held: Where the pass keeps them.
        keys: The keys of `held` by their names; a text stands for itself.
        device: Where the tensors shall be.
    """
    for entry in entries:
        values, key = held[entry.table], keys.get(entry.key, entry.key)
        value = entry.value.to(device)
        if entry.is_list:
            values.setdefault(key, [])[:] = [value]
        else:
            values[key] = value
