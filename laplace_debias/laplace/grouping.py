"""Groups of blocks that are fitted one after the other, each within a bound of memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import SupportsIndex

import torch

from laplace_debias.curvature.fits.groups import Finished, fit_in_groups
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Batches, FirstBatchKnown, Pairs, source_of
from laplace_debias.laplace.plan import Pass, Plan, refusal
from laplace_debias.laplace.planned import Planned
from laplace_debias.laplace.planning import passes_of, plan_of, posterior_bytes
from laplace_debias.laplace.posterior_range import checked_at_once
from laplace_debias.laplace.schemes import Scheme
from laplace_debias.system.memory import MEMORY_BOUND, check_memory_bound

# Bytes are planned to within a quarter: so much of a bound is planned for.
_PLANNED = 0.8
# Of the bytes a chunk of a batch gets this share at most, before chunks are made smaller.
_OF_CHUNK = 4
# Of a chunk's bound its output gradients take this share.
_SHARE = 4


@dataclass(frozen=True)
class Room:
    """Where a fit's posterior and all that it works with shall find room.

    Attributes:
        memory_bound: Bytes of memory at most; None for no bound.
        store: A folder for finished blocks; None for memory.
        replicate: Whether each of several processes keeps all finished blocks.
    """

    memory_bound: int | None
    store: Path | None
    replicate: bool

    @classmethod
    def of(
        cls,
        memory_bound: SupportsIndex | None,
        store: str | os.PathLike[str] | None,
        replicate: bool,
    ) -> "Room":
        """As `Laplace.fit` takes it.

        Raises:
            TypeError: As `check_fit_bound`.
            ValueError: As `check_fit_bound`.
        """
        folder = None if store is None else Path(store)
        return cls(check_fit_bound(memory_bound), folder, replicate)


@dataclass(frozen=True)
class Grouping:
    """How a fit goes through its blocks.

    Attributes:
        planned: The fit, with the working memory of its chunks.
        sizes: How many blocks each group has, in the blocks' order.
        stages: Bytes at most in each stage, with what earlier groups leave in memory.
    """

    planned: Planned
    sizes: tuple[int, ...]
    stages: dict[str, int]

    @property
    def groups(self) -> list[Sequence[Block]]:
        """The blocks of each group."""
        blocks, found, start = self.planned.problem.blocks, [], 0
        for size in self.sizes:
            found.append(blocks[start : start + size])
            start += size
        return found


class _TooSmallError(ValueError):
    """No group of one block fits; the message is none for a user."""


def check_fit_bound(bound: SupportsIndex | None) -> int | None:
    """As `check_memory_bound`."""
    return check_memory_bound(bound)


def agreed(grouping: Grouping) -> tuple[Problem, Sequence[int]]:
    """The fit and the sizes of its groups, of several processes those with the smallest groups."""
    problem = grouping.planned.problem
    of_ranks = problem.ranks.exchange(list(grouping.sizes))
    return problem, max(of_ranks, key=len)


def check_rereadable(scheme: Scheme) -> None:
    """Require data that can be read once a group.

    Raises:
        TypeError: For an iterator.
    """
    if any(isinstance(source_of(d), Iterator) for d in (scheme.first_read, scheme.measured[0])):
        raise TypeError(
            "A fit under memory_bound reads the data once for every group of blocks, but an "
            "iterator can be read only once: pass a DataLoader or a list of batches."
        )


def fit_grouped(
    scheme: Scheme,
    known: FirstBatchKnown,
    problem: Problem,
    kind: CurvatureKind,
    sizes: Sequence[int],
    generator: torch.Generator | None,
    read: Callable[[torch.Generator | None, Batches, str], Pairs],
    finished: Finished,
) -> CurvatureFit:
    """Fit groups of blocks, each of which reads the batches that the first one read.

    Args:
        scheme: The way to fit.
        known: The data that it reads first.
        problem: The network and its blocks.
        kind: The curvature.
        sizes: How many blocks each group has.
        generator: What loaders draw from, as `Laplace.fit` takes it.
        read: From a generator, batches and what errors call them to the same, checked.
        finished: As `fit_in_groups` takes it.

    Raises:
        ValueError: As `fit_in_groups`.
    """
    replays = known.replays()
    state = None if generator is None else generator.get_state()

    def fit(of_group: Problem, number: int) -> CurvatureFit:
        if number == 0:
            return scheme.reading_first(known).fit(kind, of_group, partial(read, generator))
        again = None
        if generator is not None and state is not None:
            again = torch.Generator(generator.device).set_state(state)
        return scheme.reading_first(replays()).fit(kind, of_group, partial(read, again))

    return fit_in_groups(problem, sizes, fit, finished)


def grouped(planned: Planned, bound: int, is_stored: bool) -> Grouping:
    """The fewest groups of consecutive blocks that fit into a bound, each as large as it can be.

    Where a chunk of a batch takes much of the bound, chunks are made smaller.

    Args:
        planned: What is to be fitted.
        bound: Bytes that the fit may take beyond the model and the data.
        is_stored: Whether finished groups are written to files, and not held.

    Raises:
        ValueError: If a block by itself, with what is held of those before it, does not fit; it
            names what would do.
    """
    most = int(_PLANNED * bound)
    paced = _paced(planned, most)
    try:
        return _grouped(paced, most, is_stored)
    except _TooSmallError:
        raise _refusal(paced, bound, is_stored, planned.alternatives()) from None


def _paced(planned: Planned, most: int) -> Planned:
    """The fit with chunks that leave room in the bound, if they can be made so small."""
    room = most // _OF_CHUNK
    working = max(planned.workings(), key=lambda of: of.chunk)
    if working.chunk <= room:
        return planned
    # A chunk is proportional to its examples and to the cotangents that go back at once.
    at_once = working.examples * working.at_once
    fewer = max(1, at_once * room // working.chunk)
    bound = max(1, working.output_gradients // at_once) * fewer
    bound *= _SHARE if fewer >= working.at_once else 1
    bound = min(bound, planned.problem.memory_bound or MEMORY_BOUND)
    smaller = replace(planned, problem=replace(planned.problem, memory_bound=bound))
    try:
        smaller.workings()
    except ValueError:  # One cotangent of one example takes more.
        return planned
    return smaller


def _grouped(planned: Planned, most: int, is_stored: bool) -> Grouping:
    blocks, workings = planned.problem.blocks, planned.workings()
    sizes: list[int] = []
    stages: dict[str, int] = {}
    start = 0
    if planned.settings.kind.is_dense:
        stages = planned.stages(workings)
        if max(stages.values()) > most:
            raise _TooSmallError
        return Grouping(planned, (len(blocks),), stages)
    while start < len(blocks):
        held = 0 if is_stored else _kept(planned, blocks[:start])
        stop, found = start, dict[str, int]()
        while stop < len(blocks):
            of_group = _stages(planned, workings, blocks[start : stop + 1], held)
            if max(of_group.values()) > most:
                break
            stop, found = stop + 1, of_group
        if stop == start:
            raise _TooSmallError
        sizes.append(stop - start)
        for name, value in found.items():
            stages[name] = max(value, stages.get(name, 0))
        start = stop
    stages["check"] = _at_end(planned, is_stored)
    if stages["check"] > most:
        raise _TooSmallError
    return Grouping(planned, tuple(sizes), stages)


def _stages(
    planned: Planned, workings: tuple[Working, Working], blocks: Sequence[Block], held: int
) -> dict[str, int]:
    first, second = (of.of_group(blocks) for of in workings)
    stages = planned.of_group(blocks).stages((first, second))
    return {name: held + value for name, value in stages.items()}


def _at_end(planned: Planned, is_stored: bool) -> int:
    """Bytes when all groups are finished: what is kept, the mean, its squares and their order."""
    blocks = planned.problem.blocks
    size = sum(block.size for block in blocks)
    kept = 0 if is_stored else _kept(planned, blocks)
    mean = planned.problem.dtype.itemsize * size
    # On a device, too: the posterior has it there.
    return planned.order + kept + mean + 16 * checked_at_once(size)


def _kept(planned: Planned, blocks: Sequence[Block]) -> int:
    """Bytes of the curvature of finished blocks; of a sharded one the most on one process."""
    if not blocks:
        return 0
    of_group = planned.of_group(blocks).problem
    of_mean = of_group.dtype.itemsize * sum(block.size for block in blocks)
    return posterior_bytes(of_group, planned.settings.kind) - of_mean


def _refusal(planned: Planned, bound: int, is_stored: bool, others: dict[str, int]) -> ValueError:
    """What is raised where no groups fit: it names what would do, `others` besides."""
    kind, blocks = planned.settings.kind, planned.problem.blocks
    workings = planned.workings()
    if kind.is_dense:
        needed = _bound_for(max(planned.stages(workings).values()))
        what = f"curvature={kind.name!r}, which is one block of all parameters, takes"
        message = refusal(what, needed, bound, others)
        return ValueError(f"memory_bound: {message} Nothing was fitted.")
    at_end, in_files = _at_end(planned, is_stored), _at_end(planned, True)
    held, needed, largest = 0, 0, blocks[0]
    for block in blocks:
        of_block = max(_stages(planned, workings, [block], 0).values())
        in_files = max(in_files, of_block)
        if held + of_block > needed:
            needed, largest = held + of_block, block
        held += 0 if is_stored else _kept(planned, [block])
    alternatives = {} if is_stored else {"fit(store=folder)": _bound_for(in_files)}
    alternatives |= others
    what = f"A fit of one block at a time, with {largest.name} and what is kept before it, takes"
    message = refusal(what, _bound_for(max(needed, at_end)), bound, alternatives)
    return ValueError(f"memory_bound: {message} Nothing was fitted.")


def plan_within(
    planned: Planned, timed: bool, available: int | None, bound: int | None, is_stored: bool
) -> Plan:
    """The plan of a fit that may go through its blocks in groups.

    Args:
        planned: What is to be fitted.
        timed: As `plan_of` takes it.
        available: As `plan_of` takes it.
        bound: Bytes that the fit may take, which make the groups; None for one group. Where that
            is too large, the groups that would fit are among the alternatives.
        is_stored: As `grouped` takes it.

    Raises:
        ValueError: As `grouped`.
    """
    if bound is None:
        plan = replace(plan_of(planned, timed, available), groups=(_names(planned.problem.blocks),))
        if not plan.alternatives or plan.available is None or planned.settings.kind.is_dense:
            return plan
        return replace(plan, alternatives={**plan.alternatives, **_groups_instead(plan, planned)})
    grouping = grouped(planned, bound, is_stored)
    plan = plan_of(grouping.planned, timed, available)
    working = grouping.planned.workings()[0]
    passes: list[Pass] = []
    for number, blocks in enumerate(grouping.groups, start=1):
        of_group = grouping.planned.of_group(blocks)
        found = passes_of(of_group, working.of_group(blocks), timed)
        where = f", group {number}" if len(grouping.sizes) > 1 else ""
        passes += [replace(of, what=of.what + where) for of in found]
    fits = plan.available is None or max(grouping.stages.values()) <= plan.available
    return replace(
        plan,
        stages=grouping.stages,
        passes=tuple(passes),
        alternatives={} if fits else plan.alternatives,
        memory_bound=bound,
        groups=tuple(_names(blocks) for blocks in grouping.groups),
    )


def _names(blocks: Sequence[Block]) -> tuple[str, ...]:
    return tuple(block.name for block in blocks)


def _groups_instead(plan: Plan, planned: Planned) -> dict[str, int]:
    """The fit in groups that would fit where one in one go does not."""
    assert plan.available is not None
    for is_stored, store in ((False, ""), (True, ", store=folder")):
        try:
            stages = grouped(planned, plan.available, is_stored).stages
        except ValueError:
            continue
        return {f"fit(memory_bound={plan.available}{store})": max(stages.values())}
    return {}


def _bound_for(planned: int) -> int:
    """The least bound that a number of planned bytes is let pass with."""
    return -(-planned * 5 // 4) + 1
