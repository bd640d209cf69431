"""A fit in groups of blocks: passes over the data for one group after the other.

While a group is fitted, the sums, eigenbases and working memory of its blocks alone are held. All
groups go through the data at the pace of all blocks, and labels of `fisher="mc"` are keyed by the
position of the example: the curvature is that of a fit in one go.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from laplace_debias.curvature.fits.problem import CurvatureFit, Problem, Seen
from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.operators import BlockDiagonal

Finished = Callable[[BlockDiagonal], BlockDiagonal]


def fit_in_groups(
    problem: Problem,
    sizes: Sequence[int],
    fit: Callable[[Problem, int], CurvatureFit],
    finished: Finished,
) -> CurvatureFit:
    """Fit groups of blocks, one after the other.

    Args:
        problem: The network and all its blocks.
        sizes: How many blocks each group has, in the blocks' order.
        fit: Fits the group of a number, from 0, reading all its data anew.
        finished: Takes a group's curvature, and gives what is kept of it.

    Raises:
        ValueError: If a group saw another number of examples than the first one.
    """
    found: dict = {}
    first: Seen | None = None
    for number, stop in enumerate(accumulate(sizes)):
        blocks = problem.blocks[stop - sizes[number] : stop]
        of_group = problem if len(sizes) == 1 else problem.of_group(blocks)
        seen = _fit_one(of_group, number, fit, finished, found)
        first = first or seen
        if seen.num_examples != first.num_examples:
            raise ValueError(
                f"The pass for group {number + 1} of {len(sizes)} of the blocks read "
                f"{seen.num_examples} examples, that for the first one {first.num_examples}. A fit "
                "in groups reads the data once a group, the same examples each time: pass such "
                "data, or leave out memory_bound."
            )
    assert first is not None
    if problem.is_sharded:
        ranks = problem.ranks
        of_all: BlockDiagonal = ShardedBlocks(found, rank=ranks.rank, num_ranks=ranks.size)
        return CurvatureFit(of_all, first)
    return CurvatureFit(BlockDiagonal(found), first)


def _fit_one(
    problem: Problem,
    number: int,
    fit: Callable[[Problem, int], CurvatureFit],
    finished: Finished,
    found: dict,
) -> Seen:
    """Fit one group; what is not kept of it is let go of when this returns."""
    of_group = fit(problem, number)
    found.update(finished(of_group.curvature).blocks)
    return of_group.seen
