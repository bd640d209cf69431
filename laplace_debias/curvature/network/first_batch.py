"""Data whose first batch is looked at before the work starts, and read no second time for it."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from laplace_debias.curvature.network.batches import Batches


class FirstBatchKnown:
    """Batches as the source has them, the first of which is fetched at once.

    The first pass goes on with the iterator that gave it: a loader that shuffles is not begun
    twice, and an iterator loses nothing.

    Args:
        batches: The source.

    Attributes:
        first: The first batch, a list of it alone; empty if there is none.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._begun: Iterator[Sequence[Any]] | None = iter(batches)
        self.first = list(islice(self._begun, 1))

    def __iter__(self) -> Iterator[Sequence[Any]]:
        begun, self._begun = self._begun, None
        return iter(self._batches) if begun is None else chain(self.first, begun)
