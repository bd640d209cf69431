"""The chunks of a batch, of which halves are tried where memory runs out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.stream import Consume


class Chunks:
    """Goes through a batch chunk by chunk.

    A chunk for which memory runs out may be in the sums of some blocks already. Its halves are
    added to those of the others alone.

    Args:
        runs: Neighbouring examples of the batch that are wanted, one run of them after the other.
    """

    def __init__(self, runs: Sequence[slice]) -> None:
        self._runs = list(runs)
        self._start = self._end = 0
        # Where a chunk that failed ends, and how often each block of it was added; inner ones last.
        self._failed: list[tuple[int, Counter[Block]]] = []

    def next(self, num_examples: int) -> slice | None:
        """The next examples, of which there are so many at most; None behind the last one."""
        if self._start == self._end:
            if not self._runs:
                return None
            run = self._runs.pop(0)
            self._start, self._end = run.start, run.stop
        end = self._failed[-1][0] if self._failed else self._end
        return slice(self._start, min(self._start + num_examples, end))

    def adding(self, consume: Consume) -> "Adding":
        """What adds the next chunk."""
        return Adding(consume, self._failed[-1][1] if self._failed else Counter())

    def done(self, part: slice) -> None:
        """Go on behind some examples."""
        self._start = part.stop
        while self._failed and self._failed[-1][0] <= part.stop:
            self._failed.pop()

    def again(self, part: slice, added: Counter[Block]) -> None:
        """Go through some examples once more.

        Args:
            part: Which.
            added: How often each of their blocks was added.
        """
        self._failed.append((part.stop, added))


class Adding:
    """A `consume` that counts what it adds, and leaves out what was added before.

    Args:
        consume: Takes what was measured of a block.
        before: How often each block was added before.

    Attributes:
        is_within: Whether it was broken off while it added.
    """

    def __init__(self, consume: Consume, before: Counter[Block]) -> None:
        self._consume = consume
        self._before = before
        self._calls: Counter[Block] = Counter()
        self.is_within = False

    def __call__(self, block: Block, measured: Any) -> None:
        """Add what was measured of a block."""
        self._calls[block] += 1
        if self._calls[block] <= self._before[block]:
            return
        self.is_within = True
        self._consume(block, measured)
        self.is_within = False

    def added(self, together: Sequence[Block] | None) -> Counter[Block]:
        """How often each block was added.

        Args:
            together: Blocks that are added once all of them are there; None if each is by itself.
        """
        added = self._calls | self._before
        if together is None:
            return added
        return Counter(dict.fromkeys(together, min(added[block] for block in together)))
