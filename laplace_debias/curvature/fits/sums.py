"""Sums over data, block by block: factors, and the eigenbases that are made of them.

Several processes sum each block's factors at one of them, its owner, which decomposes them for all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Eigenpairs,
    Factor,
    Rows,
    eigh_of_each,
    moments,
)
from laplace_debias.curvature.fits.factors import input_factors
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import Inputs, move
from laplace_debias.curvature.network.outputs import check_outputs

Sums = dict[Block, Tensor]
# G and A of every block; a diagonal factor is a vector, one of few examples is their rows.
FactorSums = dict[Block, tuple[Factor, Factor]]
# Small factors of so many numbers in all are decomposed together.
_TOGETHER = 2**20


class RunningSums:
    """Factors of the blocks, summed batch by batch: rows while they are few.

    Of streamed factors rows are kept whose number has a bound: see `Rows.most`. Everything is by
    side: 0 is G, 1 is A.
    """

    def __init__(self, problem: FitContext) -> None:
        self.problem = problem
        self.sums: tuple[Sums, Sums] = {}, {}
        self.rows: tuple[dict[Block, list[Tensor]], dict[Block, list[Tensor]]] = {}, {}
        # The traces that compressed rows leave.
        self.rests: tuple[Sums, Sums] = {}, {}

    @property
    def kept(self) -> dict[str, Any]:
        """The sums by name, as a checkpoint keeps them."""
        parts = {"sums": self.sums, "rows": self.rows, "rests": self.rests}
        return {
            f"{name} of {'GA'[side]}": of[side] for name, of in parts.items() for side in (0, 1)
        }

    def add(self, block: Block, side: int, factor: Factor) -> None:
        """Add a batch's factor."""
        sums, dtype = self.sums[side], self.problem.factor_dtype
        if not isinstance(factor, Rows):
            # The sum has the dtype of the first.
            add_to(sums, block, factor if block in sums else factor.to(dtype))
            return
        kept, d = self.rows[side].setdefault(block, []), block.shape[side]
        if block.is_streamed[side]:
            rows, rests = factor.rows.to(dtype), self.rests[side]
            check_finite_sums({block: rows})
            total = Rows(kept[0] if kept else rows[:0], rests.get(block, 0.0), block.most_rows)
            for part in rows.split(2 * (block.rank or 1)):
                total = Rows(torch.cat([total.rows, part]), total.rest, total.most).compressed()
            kept[:], rests[block] = [total.rows], torch.as_tensor(total.rest).to(rows)
            return
        kept.append(factor.rows)
        if sum(map(len, kept)) >= (d // 2 + 1 if side else d):
            add_to(sums, block, moments(torch.cat(self.rows[side].pop(block))).to(dtype))

    def owned(self, side: int) -> dict[Block, Factor]:
        """Sums of all processes, of the blocks that this process owns."""
        few, sums, problem = self._few(side), self.sums[side], self.problem
        of_some: dict[Block, Factor] = {**sums, **few}
        found = {block: of_some[block] for block in problem.blocks if block in of_some}
        check_finite_sums(found)
        if problem.ranks.size == 1:
            return found
        owners = owners_of(problem)
        found = {**few, **problem.ranks.sum_to_owners(of_all_blocks(problem, sums), owners)}
        own = [b for b in problem.blocks if b in found and owners[b] == problem.ranks.rank]
        return {block: found[block] for block in own}

    def _few(self, side: int) -> dict[Block, Rows]:
        """Factors of all processes' rows where these are so few that no matrix is made of them.

        What is left are matrices.
        """
        problem, rows_of, sums = self.problem, self.rows[side], self.sums[side]
        own: list[tuple[int | None, float]] = []
        for block in problem.blocks:
            num_rows = None if block in sums else sum(map(len, rows_of.get(block, [])))
            own.append((num_rows, float(self.rests[side].get(block, 0.0))))
        of_ranks, few, joined = problem.ranks.exchange(own), dict[Block, float](), []
        for block, of_block in zip(problem.blocks, zip(*of_ranks, strict=True), strict=True):
            counts, rests = zip(*of_block, strict=True)
            is_few = None not in counts and 0 < 2 * sum(counts) <= block.shape[side]
            if is_few or block.is_streamed[side]:
                few[block] = sum(rests)
                none = torch.zeros(0, *block.groups, block.shape[side], device=problem.device)
                joined.append(torch.cat([none.to(problem.dtype), *rows_of.pop(block, [])]))
            elif block in rows_of:
                add_to(sums, block, moments(torch.cat(rows_of.pop(block))).to(problem.factor_dtype))
        factors = {}
        of_all = problem.ranks.on_all(joined) if few else []
        for (block, rest), rows in zip(few.items(), of_all or [], strict=True):
            most = block.most_rows if block.is_streamed[side] else None
            factors[block] = Rows(rows.to(problem.factor_dtype), rest, most).compressed()
        return factors


def factor_sums(
    problem: FitContext, batches: Pairs, first: int = 0
) -> tuple[FactorSums, DataTotals]:
    """Factors of every block, summed over the examples of all batches; `first` as in `Sweep.over`.

    On several processes they are those of all, and each block's are at its owner alone.
    """
    running = RunningSums(problem)
    seen = Sweep(problem, running.add, sums=running.kept).over(batches, first)
    owned_G, owned_A = running.owned(0), running.owned(1)
    factors: FactorSums = {}
    for block, G in owned_G.items():
        if block.is_exact:
            # What it is multiplied with, once an example.
            owned_A[block] = torch.full(
                (*block.groups, 1, 1),
                seen.weight,
                dtype=problem.factor_dtype,
                device=problem.device,
            )
        factors[block] = G, owned_A[block]
    return factors, seen


class ForwardPasses:
    """Runs the network forward, and sums A of its weight blocks on the way."""

    def __init__(self, problem: FitContext) -> None:
        self._problem = problem
        self._blocks = [block for block in problem.blocks if not block.is_exact]
        self._tap = Tap(problem.network, self._blocks)
        self._positions: PositionFinder | None = None

    def __call__(self, x: Inputs, y: Tensor, running: RunningSums) -> Tensor:
        """The outputs for a batch, whose inputs of layers are added to `running`."""
        problem, tap = self._problem, self._tap
        outputs = tap.forward(move(x, problem.device, None), graph=False)
        check_outputs(outputs)
        uses = tap.uses
        tap.forget()
        if self._positions is None:
            self._positions = PositionFinder(
                problem.network, self._blocks, problem.cotangents, uses, outputs
            )
        masks = self._positions.find(x, y)
        for block in self._blocks:
            of_layer = [use.x for use in uses if use.layer == block.layer]
            layer, of_masks = tap.network.get_submodule(block.layer), masks.get(block.layer)
            for A in input_factors(layer, block, of_layer, of_masks, block.is_streamed[1]):
                running.add(block, 1, A)
        return outputs


def check_finite_sums(sums: Mapping[Block, Factor]) -> None:
    """Require what was summed over the data to be finite, block by block.

    A sum is finite only if each batch's part is. So the host waits for the device once, behind the
    last batch.
    """
    extremes = []
    for value in sums.values():
        entries = value.rows if isinstance(value, Rows) else value
        extremes.append(torch.stack(torch.aminmax(entries)).double())
    are_finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    for block, is_finite in zip(sums, are_finite, strict=True):
        if not is_finite:
            layer = f"layer {block.layer!r}" if block.layer else "the model"
            raise ValueError(
                f"The curvature of {block.name} holds NaN or Inf: the inputs of {layer}, or the "
                "gradients at its outputs, hold Inf or overflow when they are squared. Look for "
                "Inf in the data, rescale it, or convert the model to a wider dtype."
            )


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value


def eigenbases(problem: FitContext, sums: FactorSums, weight: float) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied, factor by factor, on the way.

    The sums are those of this process's blocks, over examples of this weight. Factors of one shape
    are decomposed together where they are small: the calls take longer than the work.
    """
    blocks, factors = list(sums), dict[tuple[Block, int], Factor]()
    alike: dict[Any, list[tuple[Block, int]]] = {}
    for block in blocks:
        for side, factor in enumerate(sums.pop(block)):
            most, entries = (
                (factor.most, factor.rows) if isinstance(factor, Rows) else (None, factor)
            )
            kind = (type(factor), most, entries.shape)
            alike.setdefault(kind, []).append((block, side))
            factors[block, side] = factor
    pairs: dict[tuple[Block, int], Eigenpairs] = {}
    for (*_, shape), places in alike.items():
        step = max(1, _TOGETHER // max(1, shape.numel()))
        for start in range(0, len(places), step):
            some, names, means = places[start : start + step], [], []
            for block, side in some:
                names.append(f"factor {'GA'[side]} of {block.name}")
                means.append(factors.pop((block, side)) / weight)
            found = eigh_of_each(means, ", ".join(names))
            pairs.update(zip(some, found, strict=True))
    bases = {}
    for block in blocks:
        (along_G, U_G), (along_A, U_A) = pairs.pop((block, 0)), pairs.pop((block, 1))
        bases[block] = Eigenbasis(U_G, U_A, along_G, along_A)
    return shared_bases(problem, bases)


def owners_of(problem: FitContext) -> dict[Block, int]:
    """The rank that decomposes each block: the longest first, each to the rank with least to do.

    A factor of d columns takes d³; a diagonal one nothing.

    Reference:
        Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    owners, loads = dict[Block, int](), [0] * problem.ranks.size
    costs = dict.fromkeys(problem.blocks, 0)
    for block in problem.blocks:
        for shape in block.factor_shapes:
            if len(shape) > 1:
                costs[block] += block.num_groups * shape[-1] ** 3
    for block in sorted(costs, key=costs.__getitem__, reverse=True):
        owners[block] = loads.index(min(loads))
        loads[owners[block]] += costs[block]
    return owners


def of_all_blocks(problem: FitContext, sums: Mapping[Block, Tensor]) -> dict[Block, Tensor]:
    """The blocks' sums on this process in the order of all; one without examples has zeros."""
    if problem.ranks.size == 1:
        return dict(sums)
    shapes: dict[str, tuple[int, ...]] = {}
    for of_rank in problem.ranks.exchange({b.name: tuple(of.shape) for b, of in sums.items()}):
        shapes |= of_rank
    complete, dtype = {}, problem.factor_dtype
    for block in problem.blocks:
        if block in sums:
            complete[block] = sums[block].contiguous()
        elif block.name in shapes:
            complete[block] = torch.zeros(shapes[block.name], dtype=dtype, device=problem.device)
    return complete


def to_all(problem: FitContext, sums: Mapping[Block, Tensor]) -> dict[Block, Tensor]:
    """The blocks' sums of all processes, on each."""
    complete = of_all_blocks(problem, sums)
    problem.ranks.sum(list(complete.values()))
    return complete


def shared_bases(problem: FitContext, bases: dict[Block, Eigenbasis]) -> dict[Block, Eigenbasis]:
    """The eigenbases of all blocks on every process, from those of each process's own blocks."""
    if problem.ranks.size == 1:
        return bases
    shared = problem.ranks.share(bases, owners_of(problem))
    return {block: Eigenbasis(*of) for block, of in shared.items()}  # type: ignore[arg-type]
