"""Accumulators, which sum the records of a pass over data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord


class UnfinishedSumError(RuntimeError):
    """An error interrupted the addition of a record to a sum."""

    def __init__(self, cause: RuntimeError | MemoryError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Accumulator(ABC):
    """Sums over the records of one pass over data.

    Attributes:
        context: The network, its blocks and the processes that share the data.
        needs_positions: Whether the accumulator needs to know which positions take part; see
            `layers.positions`.
        takes_single_columns: Whether measuring one column at a time takes no longer than measuring
            all columns at once.
        row_bytes: Bytes of one column of one example, in an accumulator that joins the records of
            all blocks into rows; 0 if each record is added separately. An accumulator that joins
            rows adds nothing until it has the records of all blocks.
    """

    needs_positions: ClassVar[bool] = False
    takes_single_columns: ClassVar[bool] = False
    row_bytes: int = 0

    def __init__(self, context: FitContext) -> None:
        self.context = context

    def update(self, record: BlockRecord) -> None:
        """Measure a record and add it to the sums.

        Raises:
            UnfinishedSumError: If the addition fails, which may leave the sums incomplete. Other
                errors leave the sums unchanged.
        """
        measured = self.measure(record)
        try:
            self.add(record.block, measured)
        except (RuntimeError, MemoryError) as error:
            raise UnfinishedSumError(error) from error

    def skip(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Account for a block on which no output of a chunk depends."""
        try:
            self.add_zero(block, num_examples, num_columns)
        except (RuntimeError, MemoryError) as error:
            raise UnfinishedSumError(error) from error

    @abstractmethod
    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Add zero to the sum of a block, or start the sum at zero."""

    @abstractmethod
    def measure(self, record: BlockRecord) -> Any:
        """Compute the contribution of a record without changing any sum."""

    @abstractmethod
    def add(self, block: Block, measured: Any) -> None:
        """Add the contribution of a record to the sum of its block."""

    def drop_waiting(self) -> None:  # noqa: B027 (most accumulators add each record at once)
        """After an error, drop records that still wait for the records of other blocks.

        Their chunk is run again.
        """

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The tables of sums by name. An accumulator keeps nothing else between batches.

        A sum is a tensor, or a list of tensors that may be joined along their first dimension.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums as tensors, under the names `TABLE/KEY`, or `TABLE//KEY` for a list."""
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
        """Restore the sums of a `state_dict`, on the model's device.

        The tensors are used without a copy.
        """
        blocks: dict[str, Any] = {block.name: block for block in self.context.blocks}
        tables = self.tables
        for name, saved in state.items():
            table, _, key = name.partition("/")
            is_list = key.startswith("/")
            key = key.removeprefix("/")
            value = saved.to(self.context.device)
            tables[table][blocks.get(key, key)] = [value] if is_list else value

    @abstractmethod
    def reduce(self) -> None:
        """Check that the sums are finite, and add the sums of all processes."""
