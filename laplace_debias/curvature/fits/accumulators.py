"""Accumulators: the sums over data that a pass computes, record by record."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord


class UnfinishedSumError(RuntimeError):
    """A record was added to a sum only in part, because of an error."""

    def __init__(self, cause: RuntimeError | MemoryError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Accumulator(ABC):
    """Sums over the records of one pass over data.

    Attributes:
        context: The network, its blocks and the processes that share the data.
        needs_positions: Whether records must have the positions that take part.
        takes_single_columns: Whether measuring one column after the other takes no longer than
            measuring all at once.
        row_bytes: Bytes of the row that the records of all blocks are joined to, for one column of
            one example. An accumulator that joins rows adds nothing before it has the records of
            all blocks; 0 for one that adds each record by itself.
    """

    needs_positions: ClassVar[bool] = False
    takes_single_columns: ClassVar[bool] = False
    row_bytes: int = 0

    def __init__(self, context: FitContext) -> None:
        self.context = context

    def update(self, record: BlockRecord) -> None:
        """Measure a record and add it to the sums.

        Raises:
            UnfinishedSumError: If the addition fails. An error before leaves the sums unchanged.
        """
        measured = self.measure(record)
        try:
            self.add(record.block, measured)
        except (RuntimeError, MemoryError) as error:
            raise UnfinishedSumError(error) from error

    def skip(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Account for a block whose Jacobian is zero for a chunk: no output depends on it."""
        try:
            self.add_zero(block, num_examples, num_columns)
        except (RuntimeError, MemoryError) as error:
            raise UnfinishedSumError(error) from error

    @abstractmethod
    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Add zero to a block's sum, which may not exist yet."""

    @abstractmethod
    def measure(self, record: BlockRecord) -> Any:
        """Compute what is added for a record, which changes no sum."""

    @abstractmethod
    def add(self, block: Block, measured: Any) -> None:
        """Add what was measured of a block."""

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """Everything that is remembered from batch to batch: by name, tables with a key per sum.

        A sum is a tensor, or a list of tensors that may be joined along their first dimension.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums by name: `table/block`, or `table//block` for a list, joined."""
        state: dict[str, Tensor] = {}
        for table, values in self.tables.items():
            for key, value in values.items():
                name = getattr(key, "name", key)
                if not isinstance(value, list):
                    state[f"{table}/{name}"] = value
                elif value:
                    state[f"{table}//{name}"] = torch.cat(value)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put the sums of `state_dict` back, on the model's device.

        The tensors are used themselves, not copied.
        """
        blocks: dict[str, Any] = {block.name: block for block in self.context.blocks}
        tables = self.tables
        for name, saved in state.items():
            table, _, key = name.partition("/")
            is_list = key.startswith("/")
            key = key.removeprefix("/")
            value = saved.to(self.context.device)
            if is_list:
                tables[table].setdefault(blocks.get(key, key), [])[:] = [value]
            else:
                tables[table][blocks.get(key, key)] = value

    @abstractmethod
    def reduce(self) -> None:
        """Check that the sums are finite, and add those of all processes."""
