"""One pass over data: batches become records of the blocks, and an accumulator sums them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.checkpoint import SavedPass, UnsavedPass
from laplace_debias.curvature.fits.chunks import ChunkRunner
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.network.outputs import DeferredChecks


def _can_be_joined(batch: Batch, following: Batch) -> bool:
    """Whether a batch and the following batch can be concatenated.

    This requires plain tensors without weights, and examples with the same shape and consecutive
    indices.
    """
    return (
        batch.first_index + batch.num_examples == following.first_index
        and batch.weights is None
        and following.weights is None
        and _have_one_form(batch.inputs, following.inputs)
        and _have_one_form(batch.targets, following.targets)
    )


def _have_one_form(first: Any, second: Any) -> bool:
    """Whether two values are plain tensors that can be concatenated."""
    if type(first) is not Tensor or type(second) is not Tensor:
        return False
    return first.shape[1:] == second.shape[1:] and first.dtype == second.dtype


def accumulate(accumulator: Accumulator, data: Iterable[Batch], first_index: int = 0) -> DataTotals:
    """Read the data once, and sum the records of its batches.

    Small batches of small networks are run together, because preparing such a batch takes longer
    than computing it. A saved pass resumes after the batches that its sums already include.

    Args:
        accumulator: The accumulator, which afterwards contains the sums over all processes.
        data: The batches of this process.
        first_index: The index of the data's first example among all examples of the fit. It is
            added to the indices of the batches, so that the data sets of one fit get different
            Monte Carlo labels.

    Returns:
        The totals over all processes.
    """
    return _DataPass(accumulator).run(data, first_index)


class _DataPass:
    """A pass over data, in which an accumulator sums the records of the blocks."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._runner = ChunkRunner(accumulator)
        self._checks = DeferredChecks()
        checkpoint = accumulator.context.checkpoint
        self._saved: SavedPass | UnsavedPass = UnsavedPass()
        if checkpoint is not None:
            self._saved = checkpoint.begin(accumulator)

    def run(self, data: Iterable[Batch], first_index: int) -> DataTotals:
        """Read the data to its end, and return the totals over all processes."""
        batches = (replace(batch, first_index=first_index + batch.first_index) for batch in data)
        for group in self._groups(batches):
            # A batch that `remaining` has read counts as summed, so a group is read as a whole, and
            # is saved before the next group is read.
            remaining = list(self._saved.remaining(group))
            if remaining:
                self._run_batches(remaining)
                self._saved.save(self._checks.read)
        self._checks.read()
        self._saved.end()
        totals = self._saved.totals.sum_over(self._accumulator.context.ranks)
        self._accumulator.reduce()
        return totals

    def _groups(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Group consecutive batches that are small and compatible, so that they are run together.

        A group that no further batch may join is yielded before the next batch is read. Batches
        that wait are copied, because the loader may overwrite them.
        """
        group: list[Batch] = []
        for batch in batches:
            max_examples = self._num_joined_examples(batch)
            num_examples = batch.num_examples + sum(waiting.num_examples for waiting in group)
            if group and not (num_examples <= max_examples and _can_be_joined(group[-1], batch)):
                yield group
                group = []
                num_examples = batch.num_examples
            if num_examples < max_examples:
                group.append(batch.copied())
            else:
                yield [*group, batch]
                group = []
        if group:
            yield group

    def _num_joined_examples(self, batch: Batch) -> int:
        """Return the maximum number of examples if the batch is run together with other batches."""
        with self._checks.during_batch(batch.number):
            return self._runner.num_joined_examples(batch.inputs)

    def _run_batches(self, batches: list[Batch]) -> None:
        """Run batches that can be concatenated."""
        if len(batches) == 1:
            self._run_batch(batches[0])
        else:
            self._run_joined(batches)

    def _run_joined(self, batches: list[Batch]) -> None:
        """Concatenate batches and run them.

        After an error, the batches are run one at a time, so that the error message gives the
        number of the batch.
        """
        try:
            self._run_batch(Batch.joined(batches))
        except Exception:
            for batch in batches:
                self._run_batch(batch)
            raise

    def _run_batch(self, batch: Batch) -> None:
        with self._checks.during_batch(batch.number):
            self._runner.run(batch, self._saved.totals)
