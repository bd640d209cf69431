"""One pass over data: batches become records of the blocks, and an accumulator sums them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.chunks import ChunkRunner
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.network.batches import FitData
from laplace_debias.curvature.network.inputs import tensors_of, with_tensors
from laplace_debias.curvature.network.outputs import Faults


@dataclass(frozen=True)
class _NumberedBatch:
    """A batch of a pass.

    Attributes:
        tensors: The inputs, the targets, and the weights if there are any.
        number: The number of the batch in the user's data, from 1; None if it has none.
        first_index: The index of the first example among all examples of the fit.
    """

    tensors: tuple[Any, ...]
    number: int | None
    first_index: int

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self.tensors[1])

    def copied(self) -> "_NumberedBatch":
        """Copy the tensors, since a loader may write the next batch into the same memory."""
        copies = (with_tensors(part, map(torch.clone, tensors_of(part))) for part in self.tensors)
        return replace(self, tensors=tuple(copies))

    def precedes(self, batch: "_NumberedBatch") -> bool:
        """Whether the two batches can be concatenated.

        They are plain tensors without weights, and their examples have one shape and consecutive
        indices.
        """
        if self.first_index + self.num_examples != batch.first_index:
            return False
        if len(self.tensors) > 2 or len(batch.tensors) > 2:
            return False
        for own, following in zip(self.tensors, batch.tensors, strict=True):
            if type(own) is not Tensor or type(following) is not Tensor:
                return False
            if own.shape[1:] != following.shape[1:] or own.dtype != following.dtype:
                return False
        return True


class DataPass:
    """A pass over data, whose records of the blocks an accumulator sums.

    Small batches of small networks are run together, since a batch takes longer to prepare than to
    compute.

    Args:
        accumulator: It has the sums of all processes when the pass has ended.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator
        self._faults = Faults()
        self._totals = DataTotals()

    def run(self, data: FitData, first: int = 0) -> DataTotals:
        """Read the data to its end, and return the totals over all processes.

        `first` is the index of the data's first example among all examples of the fit. Monte-Carlo
        labels depend on it, so that different data get different labels. A pass that was saved
        resumes after the batches that are in its sums.
        """
        checkpoint = self.accumulator.context.checkpoint
        self._totals = checkpoint.begin(self.accumulator)
        runner: ChunkRunner | None = None
        waiting: list[_NumberedBatch] = []
        num_waiting = 0
        for batch in _numbered(data, first):
            if runner is None:
                runner = ChunkRunner(self.accumulator, batch.tensors[0])
            with self._faults.during_batch(batch.number):
                num_joined = runner.num_joined_examples(batch.tensors[0])
            is_small = num_waiting + batch.num_examples <= num_joined
            if waiting and not (is_small and waiting[-1].precedes(batch)):
                self._run_batches(runner, waiting)
                waiting = []
                num_waiting = 0
            # The checkpoint counts the batch from here on. A batch that waits is counted before it
            # is in the sums, but the sums are only saved when no batch waits.
            if checkpoint.has(batch.tensors):
                continue
            num_waiting += batch.num_examples
            if num_waiting < num_joined:
                waiting.append(batch.copied())
                continue
            self._run_batches(runner, [*waiting, batch])
            waiting = []
            num_waiting = 0
        if runner is not None and waiting:
            self._run_batches(runner, waiting)
        self._faults.read()
        checkpoint.end()
        totals = self._totals.over(self.accumulator.context.ranks)
        self.accumulator.reduce()
        return totals

    def _run_batches(self, runner: ChunkRunner, batches: list[_NumberedBatch]) -> None:
        """Run batches that can be concatenated, and let the checkpoint save the sums."""
        if len(batches) == 1:
            self._run_batch(runner, batches[0])
        else:
            self._run_joined(runner, batches)
        self.accumulator.context.checkpoint.save(self._totals, self._faults.read)

    def _run_joined(self, runner: ChunkRunner, batches: list[_NumberedBatch]) -> None:
        """Concatenate batches and run them.

        After an error they are run one after the other: its message has the number of the batch.
        """
        inputs = torch.cat([batch.tensors[0] for batch in batches])
        targets = torch.cat([batch.tensors[1] for batch in batches])
        joined = _NumberedBatch((inputs, targets), None, batches[0].first_index)
        try:
            self._run_batch(runner, joined)
        except Exception:
            for batch in batches:
                self._run_batch(runner, batch)
            raise

    def _run_batch(self, runner: ChunkRunner, batch: _NumberedBatch) -> None:
        with self._faults.during_batch(batch.number):
            runner.run(batch.tensors, batch.first_index, self._totals)


def _numbered(data: FitData, first: int) -> Iterator[_NumberedBatch]:
    """Number the batches of some data, whose first example has the index `first`."""
    num_read = 0
    for index, tensors in enumerate(data):
        first_index = first + data.first_index(index, num_read)
        batch = _NumberedBatch(tensors, data.batch_number(index), first_index)
        num_read += batch.num_examples
        yield batch
