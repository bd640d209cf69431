"""Halves of a chunk for which memory runs out."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from laplace_debias.curvature.layers.backends import Consume
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.system.memory import is_out_of_memory


class Adding:
    """Takes what is measured of a chunk, and leaves out what was added of it before.

    Args:
        add: Takes what was measured of a block.
        before: How often each block was added before.

    Attributes:
        is_within: Whether it was broken off while it added.
    """

    def __init__(self, add: Consume, before: Counter[Block]) -> None:
        self._add, self._before, self._calls = add, before, Counter[Block]()
        self.is_within = False

    def __call__(self, block: Block, measured: Any) -> None:
        """Add what was measured of a block."""
        self._calls[block] += 1
        if self._calls[block] <= self._before[block]:
            return
        self.is_within = True
        self._add(block, measured)
        self.is_within = False

    def added(self, together: Sequence[Block] | None) -> Counter[Block]:
        """How often each block was added; blocks that are added `together` all equally often."""
        added = self._calls | self._before
        if together is None:
            return added
        return Counter(dict.fromkeys(together, min(added[block] for block in together)))


def run_by_halves(
    part: slice,
    size: int,
    run: Callable[[slice, Adding], None],
    add: Consume,
    together: Sequence[Block] | None,
    before: Counter[Block] | None = None,
) -> int:
    """Run examples chunk by chunk, and a chunk for which there is not enough memory by halves.

    Such a chunk may be in the sums of some blocks already: its halves are added to the others.

    Args:
        part: Which examples.
        size: How many make a chunk.
        run: Runs a chunk.
        add: Takes what was measured of a block.
        together: Blocks that are added once all of them are there; None if each is by itself.
        before: How often blocks were added of these examples.

    Returns:
        How many examples make a chunk from now on.

    Raises:
        RuntimeError: If memory runs out for one example, or within a sum: it is not known what that
            has come to.
    """
    start = part.start
    while start < part.stop:
        chunk = slice(start, min(start + size, part.stop))
        adding = Adding(add, before or Counter())
        if not _runs(run, chunk, adding):
            half = (chunk.stop - start) // 2
            size = run_by_halves(chunk, half, run, add, together, adding.added(together))
        start = chunk.stop
    return size


def _runs(run: Callable[[slice, Adding], None], chunk: slice, adding: Adding) -> bool:
    """Whether there was enough memory for a chunk; if not, what it held is let go of here."""
    try:
        run(chunk, adding)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if adding.is_within or chunk.stop - chunk.start == 1:
            raise _refused(chunk.stop - chunk.start, error) from error
        return False
    return True


def _refused(length: int, error: BaseException) -> RuntimeError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return RuntimeError(
        f"Not enough memory for {length} example(s) ({reason}). Nothing was fitted. Pass a smaller "
        'memory_bound=, use fisher="mc", or fewer parameters (params="last_layer"); '
        "la.plan(loader) tells what a fit takes."
    )
