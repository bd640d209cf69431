"""Chunks: parts of a batch whose output gradients fit the memory bound."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.accumulators import Accumulator, UnfinishedSumError
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factors import input_weight
from laplace_debias.curvature.fits.presence import ChunkPresence, Presence
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.backends import SequentialPass
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.several_columns import has_python_functions
from laplace_debias.curvature.network.inputs import Inputs, example_shapes, move, take, tensors_of
from laplace_debias.curvature.network.outputs import (
    LARGEST_DEFAULT_BYTES,
    check_outputs,
    checked_memory_bound,
)
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.system.memory import is_out_of_memory
from laplace_debias.system.shown import counted

# The memory bound divided by the memory of a chunk's output gradients, by device type. A GPU uses
# the full bound, but on a CPU, larger chunks would not fit in the cache.
_BOUND_OVER_CHUNK = defaultdict(lambda: 1, cpu=2)

# On a CPU, small batches are run together, up to this many bytes of activations. More would not fit
# in the cache.
_JOINED_BYTES = 6 * 2**20
_MOST_JOINED_EXAMPLES = 1024


class RecordKey(NamedTuple):
    """One record of a chunk, whose columns are pushed back in groups."""

    block: Block
    group_index: int


@dataclass
class Chunk:
    """Examples of a batch that are run together.

    Attributes:
        batch: The batch.
        examples: The examples.
        added: The keys of the records of these examples that the sums contain. If memory runs out
            in the middle of a chunk, its parts are run again, but these records are not added
            again.
    """

    batch: Batch
    examples: slice
    added: set[RecordKey] = field(default_factory=set)

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.examples.stop - self.examples.start

    def split(self, size: int) -> "tuple[Chunk, Chunk | None]":
        """Split off the first `size` examples; the second chunk is None if none remain."""
        if size >= self.size:
            return self, None
        middle = self.examples.start + size
        first = slice(self.examples.start, middle)
        remaining = slice(middle, self.examples.stop)
        return (
            Chunk(self.batch, first, self.added.copy()),
            Chunk(self.batch, remaining, self.added.copy()),
        )


class _Outcome(Enum):
    """The outcome of running a chunk."""

    COMPLETE = "complete"
    OUT_OF_MEMORY = "out of memory"
    WRONG_LAYOUT = "failed in the layout channels_last"


@dataclass(frozen=True)
class _ExampleSize:
    """The memory that an example needs, and how many examples are run together.

    Attributes:
        num_columns: The number of columns of output gradients that are computed together.
        num_bytes: The bytes of these columns.
        num_examples: The number of examples in a chunk.
        num_joined_examples: The maximum number of examples in batches that are run together; 0 if
            batches are not run together.
    """

    num_columns: int
    num_bytes: int
    num_examples: int
    num_joined_examples: int


class ChunkRunner:
    """A runner that passes batches forward and back through the network, chunk by chunk.

    Chunks are sized so that their output gradients stay within the memory bound, for which one
    example of each shape is run to measure its memory. If memory still runs out, the chunk is run
    again in halves, but every record is added only once.

    Args:
        accumulator: The accumulator that receives the records.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        # An example of each new shape adds its size; the first example also makes the search for
        # positions, if the accumulator needs it.
        self._sizes: dict[tuple[torch.Size, ...], _ExampleSize] = {}
        self._presence: Presence | None = None
        # The largest number of bytes of output gradients in a chunk; smaller after memory ran out.
        self._most_bytes = sys.maxsize
        # On a CPU, images are converted to `channels_last`, because convolutions are then faster.
        # This ends at the first example or chunk for which the network does not support it.
        self._is_channels_last = True

    @property
    def _context(self) -> FitContext:
        return self._accumulator.context

    def num_joined_examples(self, x: Inputs) -> int:
        """Return the maximum number of examples in joined batches; 0 if batches are not joined."""
        return self._size_of(x).num_joined_examples

    def _size_of(self, x: Inputs) -> _ExampleSize:
        """Return the memory that one example needs; an example of each new shape is run."""
        shapes = example_shapes(x)
        if shapes not in self._sizes:
            try:
                forward_pass, num_joined_examples = run_example(self._context, x)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise _not_enough_memory(1, error) from error
                raise
            if self._accumulator.needs_positions and self._presence is None:
                self._presence = Presence(self._context, forward_pass)
            self._sizes[shapes] = self._size(forward_pass, num_joined_examples)
            if self._is_channels_last:
                self._is_channels_last = _supports_channels_last(self._context, x, forward_pass)
        return self._sizes[shapes]

    def _size(self, forward_pass: ForwardPass, num_joined_examples: int) -> _ExampleSize:
        """Compute the memory of an example from its forward pass.

        Args:
            forward_pass: The forward pass.
            num_joined_examples: The maximum number of examples in batches that are run together,
                before the size of a chunk limits it.
        """
        context = self._context
        num_columns = _num_columns(context, forward_pass.outputs)
        column_bytes = forward_pass.output_bytes + self._accumulator.row_bytes
        bound = checked_memory_bound(
            context.memory_bound,
            column_bytes,
            "a column of output gradients of one example",
            context.device,
        )
        # The columns of a single example may fill the whole bound.
        num_columns = min(num_columns, bound // column_bytes)
        # A call of a module is run again for each group of columns, so single columns take longer.
        runs_calls_again = any(site.is_call for site in context.tap.layers)
        takes_single_columns = self._accumulator.takes_single_columns and not runs_calls_again
        if takes_single_columns and context.tap.differentiates_one_by_one:
            num_columns = 1
        num_bytes = num_columns * column_bytes
        chunk_bound = bound // _BOUND_OVER_CHUNK[context.device.type]
        num_examples = max(1, chunk_bound // num_bytes)
        return _ExampleSize(
            num_columns=num_columns,
            num_bytes=num_bytes,
            num_examples=num_examples,
            num_joined_examples=min(num_joined_examples, num_examples),
        )

    def run(self, batch: Batch, totals: DataTotals) -> None:
        """Run a batch and add it to the totals.

        A chunk that fails in the layout `channels_last`, for example because of a `view`, is run
        again without this layout.

        Raises:
            RuntimeError: If memory runs out for one example, or while a record is added.
        """
        size = self._size_of(batch.inputs)
        pending = [Chunk(batch, slice(0, batch.num_examples))]
        while pending:
            num_fitting = max(1, self._most_bytes // size.num_bytes)
            chunk, remaining = pending.pop().split(min(size.num_examples, num_fitting))
            if remaining is not None:
                pending.append(remaining)
            outcome = self._attempt(chunk, size.num_columns, totals)
            if outcome is _Outcome.COMPLETE:
                continue
            if outcome is _Outcome.OUT_OF_MEMORY:
                self._most_bytes = chunk.size // 2 * size.num_bytes
            else:
                self._is_channels_last = False
            if self._accumulator.row_bytes:
                # Rows are added once all blocks have theirs, so no other record is in the sums.
                chunk.added = _complete_groups(self._context.blocks, chunk.added)
                self._accumulator.drop_waiting()
            pending.append(chunk)
        totals.num_examples += batch.num_examples

    def _attempt(self, chunk: Chunk, num_columns: int, totals: DataTotals) -> _Outcome:
        """Run a chunk, and return whether and why the chunk has to be run again.

        The exception of a failed run does not outlive this method, so the chunk's tensors are
        freed.
        """
        try:
            self._run_chunk(chunk, num_columns, totals)
        except UnfinishedSumError as error:
            if not is_out_of_memory(error.cause):
                raise error.cause from None
            raise _not_enough_memory(chunk.size, error.cause) from error.cause
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                if chunk.size == 1:
                    raise _not_enough_memory(chunk.size, error) from error
                return _Outcome.OUT_OF_MEMORY
            if not self._is_channels_last:
                raise
            return _Outcome.WRONG_LAYOUT
        return _Outcome.COMPLETE

    def _run_chunk(self, chunk: Chunk, num_columns: int, totals: DataTotals) -> None:
        """Run a chunk forward and back, and pass its records to the accumulator.

        Every record's key is put into `chunk.added` immediately, because memory may run out before
        the next record.

        Args:
            chunk: The examples that are run.
            num_columns: The number of columns of output gradients that are computed together.
            totals: The totals of the pass, to which the chunk is added.
        """
        context = self._context
        chunk_batch = chunk.batch.take(chunk.examples)
        presence: ChunkPresence | None = None
        if self._presence is not None:
            # Positions are found before the inputs are moved, so that the search for padding runs
            # on the CPU.
            presence = self._presence.in_chunk(chunk_batch)
        forward_pass = self._forward(chunk_batch.inputs)
        outputs = forward_pass.outputs
        cotangents = context.cotangents(
            outputs.detach(),
            chunk_batch.targets,
            chunk.batch.first_index + chunk.examples.start,
            chunk_batch.weights,
        )
        gated_layers: set[str] = set()
        if presence is not None:
            gated_layers = forward_pass.gated_layers()
        column_groups = cotangents.columns.split(num_columns)
        for group_index, columns in enumerate(column_groups):
            is_first = group_index == 0
            is_last = group_index == len(column_groups) - 1
            records = forward_pass.backward(columns, keep_graph=not is_last)
            if is_first and presence is not None and gated_layers:
                waiting = list(records)
                presence.find_missing_gradients(waiting, gated_layers)
                records = _take_all(waiting)
            for record in records:
                key = RecordKey(record.block, group_index)
                if key not in chunk.added:
                    # A further group of columns repeats the inputs, which are counted once.
                    record = replace(
                        record, input_weights=cotangents.input_weights, has_new_inputs=is_first
                    )
                    self._add(record, presence, totals)
                    chunk.added.add(key)
            self._add_zeros(chunk, group_index, len(columns), totals)
        totals.nll = totals.nll + cotangents.loss
        totals.weight += chunk_batch.total_weight
        totals.num_outputs += outputs[0].numel() * chunk_batch.total_weight

    def _forward(self, inputs: Inputs) -> ForwardPass | SequentialPass:
        """Run the network forward on the device of the fit, and check its outputs."""
        x = move(inputs, self._context.device, None)
        if self._is_channels_last and isinstance(x, Tensor):
            x = x.contiguous(memory_format=torch.channels_last)
        forward_pass = self._context.backend.forward(x)
        check_outputs(forward_pass.outputs)
        return forward_pass

    def _add_zeros(
        self, chunk: Chunk, group_index: int, num_columns: int, totals: DataTotals
    ) -> None:
        """Account for the blocks without a record in a group of columns; they count as zero."""
        for block in self._context.blocks:
            key = RecordKey(block, group_index)
            if key in chunk.added:
                continue
            self._accumulator.skip(block, chunk.size, num_columns)
            if group_index == 0 and self._presence is not None and not block.is_vector:
                totals.add_input_weight(block, 0.0)
            chunk.added.add(key)

    def _add(self, record: BlockRecord, presence: ChunkPresence | None, totals: DataTotals) -> None:
        """Pass a record to the accumulator, and the weight of its examples in A to the totals.

        If memory runs out before the record is in the sums, the totals do not change.
        """
        if presence is None:
            self._accumulator.update(record)
            return
        record = presence.masked(record)
        if record.block.is_vector or not record.has_new_inputs:
            self._accumulator.update(record)
            return
        weight = input_weight(record)
        self._accumulator.update(record)
        totals.add_input_weight(record.block, weight)


def _take_all(waiting: list[BlockRecord]) -> Iterator[BlockRecord]:
    """Empty a list of records from the front, so that each is freed as soon as it is used."""
    while waiting:
        yield waiting.pop(0)


def run_example(context: FitContext, x: Inputs) -> tuple[ForwardPass, int]:
    """Run the first example of the given inputs.

    Returns:
        The forward pass, and the maximum number of examples in batches that are run together.
    """
    tap = context.tap
    example = move(take(x, slice(0, 1)), context.device, None)
    with _bytes_of_modules(context.network) as activation_bytes:
        forward_pass = tap.forward(example)
    check_outputs(forward_pass.outputs)
    # Models that run some layers only for some batches receive the user's batches unchanged.
    if context.device.type != "cpu" or tap.conditional:
        return forward_pass, 0
    input_bytes = sum(tensor.nbytes for tensor in tensors_of(example))
    num_fitting = _JOINED_BYTES // (input_bytes + sum(activation_bytes))
    return forward_pass, min(num_fitting, _MOST_JOINED_EXAMPLES)


def _supports_channels_last(context: FitContext, x: Inputs, forward_pass: ForwardPass) -> bool:
    """Whether images may be converted to `channels_last` and do not have this layout yet.

    A model that reads entries in memory order (`as_strided`) would compute different values, so the
    first example is run again in this layout for comparison. A `torch.autograd.Function` may read
    gradients in memory order, which a forward pass does not reveal, so models with such a function
    are not converted.

    Args:
        context: The fit.
        x: The inputs.
        forward_pass: The forward pass of the first example.
    """
    tap = context.tap
    outputs = forward_pass.outputs
    if not tap.differentiates_one_by_one or has_python_functions(outputs):
        return False
    example = move(take(x, slice(0, 1)), context.device, None)
    if not isinstance(example, Tensor) or example.ndim != 4:
        return False
    if example.is_contiguous(memory_format=torch.channels_last):
        return False
    try:
        converted_pass = tap.forward(example.contiguous(memory_format=torch.channels_last))
    # Catch every exception, because a forward pass may raise any error.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    values = [outputs, *(call.x for call in forward_pass.layer_calls)]
    converted_values = [converted_pass.outputs, *(call.x for call in converted_pass.layer_calls)]
    eps = max(coarsest_eps(context.network), torch.finfo(outputs.dtype).eps)
    return len(values) == len(converted_values) and all(
        _are_close(value, converted_value, tolerance=eps**0.5)
        for value, converted_value in zip(values, converted_values, strict=True)
    )


def _are_close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return True  # A layer's outputs are compared where they are used.
    x, y = x.detach(), y.detach()
    return bool((x - y).norm() <= tolerance * x.norm())


@contextmanager
def _bytes_of_modules(network: nn.Module) -> Iterator[list[int]]:
    """Collect the bytes of the outputs of a network's modules."""
    num_bytes: list[int] = []

    def count(_: nn.Module, __: Any, outputs: Any) -> None:
        num_bytes.extend(tensor.nbytes for tensor in tensors_of(outputs))

    handles = [module.register_forward_hook(count) for module in network.modules()]
    try:
        yield num_bytes
    finally:
        for handle in handles:
            handle.remove()


def _num_columns(context: FitContext, outputs: Tensor) -> int:
    """Return the number of columns of one example's loss Hessian, from one example's outputs.

    Raises:
        ValueError: If these columns take more memory than the limit.
    """
    num_outputs = outputs[0].numel()
    num_columns = context.cotangents.num_columns(num_outputs)
    num_bytes = num_columns * num_outputs * outputs.element_size()
    if num_bytes > LARGEST_DEFAULT_BYTES:
        raise ValueError(
            f"The outputs of one example have shape {tuple(outputs.shape[1:])}. The "
            f"square root of the loss Hessian consists of {num_columns} columns, each "
            f"of this shape, which together need {num_bytes} bytes. Use "
            '`fisher="signs"` or "mc", which need only one column, or '
            '`fisher="empirical"`.'
        )
    return num_columns


def _complete_groups(blocks: Sequence[Block], added: set[RecordKey]) -> set[RecordKey]:
    """Keep only the records of those column groups for which every block has a record."""
    complete_groups = {
        group_index
        for group_index in {key.group_index for key in added}
        if all(RecordKey(block, group_index) in added for block in blocks)
    }
    return {key for key in added if key.group_index in complete_groups}


def _not_enough_memory(num_examples: int, error: BaseException) -> RuntimeError:
    """Return the error for a chunk that cannot be made smaller; the message contains advice."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return RuntimeError(
        f"Not enough memory for {counted(num_examples, 'example')} ({reason}). Nothing was fitted. "
        'Use `fisher="signs"` or "mc", select fewer parameters, such as `params="last_layer"`, or '
        "pass a smaller `memory_bound=` (only in Python). To see how much memory a fit needs, call "
        "`la.plan(loader)` (command line: fit --plan)."
    )
