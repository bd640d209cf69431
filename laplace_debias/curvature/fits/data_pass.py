"""One pass over data: batches become records of the blocks, and an accumulator sums them."""

from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.chunks import ChunkRunner
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.network.batches import FitData
from laplace_debias.curvature.network.outputs import Faults


class DataPass:
    """A pass over data, whose records of the blocks an accumulator sums.

    Args:
        accumulator: It has the sums of all processes when the pass has ended.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator

    def run(self, data: FitData, first: int = 0) -> DataTotals:
        """Read the data to its end, and return the totals over all processes.

        `first` is the index of the data's first example among all examples of the fit. Monte-Carlo
        labels depend on it, so that different data get different labels. A pass that was saved
        resumes after the batches that are in its sums.
        """
        checkpoint = self.accumulator.context.checkpoint
        totals = checkpoint.begin(self.accumulator)
        runner: ChunkRunner | None = None
        faults = Faults()
        num_read = 0
        for number, batch in enumerate(data):
            first_index = first + data.first_index(number, num_read)
            num_read += len(batch[1])
            if runner is None:
                runner = ChunkRunner(self.accumulator, batch[0])
            if checkpoint.has(batch):
                continue
            with faults.during_batch(data.batch_number(number)):
                runner.run(batch, first_index, totals)
            checkpoint.save(totals, faults.read)
        faults.read()
        checkpoint.end()
        totals = totals.over(self.accumulator.context.ranks)
        self.accumulator.reduce()
        return totals
