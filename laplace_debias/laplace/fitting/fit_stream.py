"""A stream as a fit reads it: its examples have indices, and some of its targets count."""

from collections.abc import Iterator
from dataclasses import dataclass

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.batches import FirstIndex, Stream
from laplace_debias.system.ranks import process_group


def first_index_in_process(_: int, num_read: int) -> int:
    """Return the index of a batch's first example among those of this process."""
    return num_read


@dataclass(frozen=True, eq=False)
class FitStream:
    """The batches of a fit.

    Attributes:
        stream: The batches.
        likelihood: Decides which targets contribute to the loss.
        description: The data's name in errors.
        first_index_among_all: Returns the index of a batch's first example among those of all
            processes. The default is for a fit that does not need to know which example is which
            in the data of other processes.
    """

    stream: Stream
    likelihood: Likelihood
    description: str = "data"
    first_index_among_all: FirstIndex = first_index_in_process

    def __iter__(self) -> Iterator[Batch]:
        """Read the data once.

        Raises:
            ValueError: At the end, if no target of any process contributes to the loss.
        """
        num_batches = 0
        any_counts = False
        for batch in self.stream:
            num_batches += 1
            any_counts = any_counts or self.likelihood.counts_any(batch.targets)
            yield batch
        by_rank = process_group().exchange((num_batches, any_counts))
        if any(number for number, _ in by_rank) and not any(counts for _, counts in by_rank):
            description = self.description
            ignored = getattr(self.likelihood, "ignore_index", None)
            if ignored is not None:
                description += f" (ignore_index={ignored})"
            raise ValueError(
                f"All targets of the {description} are ignored, so there is no "
                "curvature to compute. Pass batches in which at least one target "
                "contributes to the loss."
            )

    def first_index(self, batch: int, num_read: int) -> int:
        """Return the index of a batch's first example among those of all processes."""
        return self.first_index_among_all(batch, num_read)

    def batch_number(self, batch: int) -> int:
        """Return the number of a batch, from 1."""
        return batch + 1
