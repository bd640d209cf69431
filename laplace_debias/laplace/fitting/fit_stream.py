"""Streams of batches with example indices; at least one target must contribute to the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.data.shards import FAR
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.system.ranks import process_group


@dataclass(frozen=True, eq=False)
class FitStream:
    """The batches of a fit.

    Attributes:
        stream: The batches.
        likelihood: The likelihood, which decides which targets contribute to the loss.
        description: The name of the data in error messages.
        first_indices: The index of each batch's first example among the examples of all processes.
            If None, the examples of each process count as coming before the examples of the next
            process.
    """

    stream: Stream
    likelihood: Likelihood
    description: str = "data"
    first_indices: Sequence[int] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Read the data once.

        Raises:
            ValueError: At the end, if no target of any process contributes to the loss.
        """
        ranks = process_group()
        num_batches = 0
        any_counts = False
        for batch in self.stream:
            if self.first_indices is None:
                first_index = FAR * ranks.rank + batch.first_index
            else:
                first_index = self.first_indices[num_batches]
            num_batches += 1
            any_counts = any_counts or self.likelihood.counts_any(batch.targets)
            yield replace(batch, first_index=first_index)
        by_rank = ranks.exchange((num_batches, any_counts))
        has_batches = any(number > 0 for number, _ in by_rank)
        has_targets = any(any_counts for _, any_counts in by_rank)
        if has_batches and not has_targets:
            description = self.description
            ignored = getattr(self.likelihood, "ignore_index", None)
            if ignored is not None:
                description += f" (ignore_index={ignored})"
            raise ValueError(
                f"All targets of the {description} are ignored, so there is no "
                "curvature to compute. Pass batches in which at least one target "
                "contributes to the loss."
            )
