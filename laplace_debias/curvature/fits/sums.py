"""Sums over data, block by block: factors, and the eigenbases that are made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Eigenpairs,
    Factor,
    Rows,
    eigh_of_each,
    moments,
)
from laplace_debias.curvature.fits.factors import measured_gradients, measured_inputs
from laplace_debias.curvature.fits.over_ranks import (
    factor_shape,
    owners_by_cost,
    shared_bases,
    to_owners,
)
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Pairs

Sums = dict[Block, Tensor]
# G and A of every block; a diagonal factor is a vector, one of few examples is their rows.
FactorSums = dict[Block, tuple[Factor, Factor]]
RowsOf = dict[Block, list[Tensor]]
# Small factors of so many numbers in all are decomposed together.
_TOGETHER = 2**20


class SideSums:
    """Factors of one side of the blocks, summed batch by batch: rows while they are few.

    Of streamed factors rows are kept whose number has a bound: see `Rows.most`. Side 0 is G, side 1
    is A.
    """

    def __init__(self, problem: Problem, side: int) -> None:
        self.problem, self.side = problem, side
        self.sums: Sums = {}
        self.rows: RowsOf = {}
        # The traces that compressed rows leave.
        self.rests: Sums = {}

    def add(self, block: Block, factor: Factor) -> None:
        """Add a batch's factor."""
        if not isinstance(factor, Rows):
            # The sum has the dtype of the first.
            is_first, dtype = block not in self.sums, self.problem.factor_dtype
            add_to(self.sums, block, factor.to(dtype) if is_first else factor)
            return
        kept, d = self.rows.setdefault(block, []), block.shape[self.side]
        if block.is_streamed(self.side):
            rows = factor.rows.to(self.problem.factor_dtype)
            check_finite_sums({block: [rows]})
            total = Rows(kept[0] if kept else rows[:0], self.rests.get(block, 0.0), block.most_rows)
            for part in rows.split(2 * (block.rank or 1)):
                total = Rows(torch.cat([total.rows, part]), total.rest, total.most).compressed()
            kept[:], self.rests[block] = [total.rows], torch.as_tensor(total.rest).to(rows)
            return
        kept.append(factor.rows)
        if sum(map(len, kept)) >= (d // 2 + 1 if self.side else d):
            self._multiply(block)

    def few(self) -> dict[Block, Rows]:
        """Factors of all processes' rows where these are so few that no matrix is made of them.

        What is left are matrices.
        """
        problem, side = self.problem, self.side
        own: dict[str, tuple[int | None, float]] = {}
        for block in problem.blocks:
            num_rows = None if block in self.sums else sum(map(len, self.rows.get(block, [])))
            own[block.name] = num_rows, float(self.rests.get(block, 0.0))
        of_ranks, few = problem.ranks.exchange(own), dict[Block, float]()
        for block in problem.blocks:
            counts, rests = zip(*(of_rank[block.name] for of_rank in of_ranks), strict=True)
            is_few = None not in counts and 0 < 2 * sum(counts) <= block.shape[side]
            if is_few or block.is_streamed(side):
                few[block] = sum(rests)
        joined = []
        for block in few:
            none = torch.zeros(0, *block.groups, block.shape[side], device=problem.device)
            joined.append(torch.cat([none.to(problem.dtype), *self.rows.pop(block, [])]))
        for block in list(self.rows):
            self._multiply(block)
        if not few:
            return {}
        of_all = problem.ranks.on_all(joined)
        assert of_all is not None
        factors = {}
        for (block, rest), rows in zip(few.items(), of_all, strict=True):
            most = block.most_rows if block.is_streamed(side) else None
            factors[block] = Rows(rows.to(problem.factor_dtype), rest, most)
        return factors

    def _multiply(self, block: Block) -> None:
        rows = torch.cat(self.rows.pop(block))
        add_to(self.sums, block, moments(rows).to(self.problem.factor_dtype))


def factor_pass(
    problem: Problem,
    batches: Pairs,
    first: int,
    add: Callable[[Block, int, Factor], None],
    as_rows: Callable[[Block, int], bool],
    sums: dict[str, Any],
) -> Seen:
    """A pass that hands over each chunk's G (side 0) and A (side 1) of every block.

    `as_rows` says which are wanted as rows, however many; the rest is as `Sweep` takes it.
    """

    def measure(
        layer: nn.Module, block: Block, uses: Uses, masks: Masks | None, xs: Sequence[Tensor] | None
    ) -> tuple[Factor, Iterable[Factor]]:
        G = measured_gradients(layer, block, uses, masks, as_rows(block, 0))
        # One after the other: rows may come in many parts.
        return G, () if xs is None else measured_inputs(layer, block, xs, masks, as_rows(block, 1))

    def add_both(block: Block, measured: tuple[Factor, Iterable[Factor]]) -> None:
        G, parts_of_A = measured
        add(block, 0, G)
        for A in parts_of_A:
            add(block, 1, A)

    sweep = Sweep(problem, measure, add_both, sums=sums, additive=True, with_inputs=True)
    return sweep.over(batches, first)


def factor_sums(problem: Problem, batches: Pairs, first: int = 0) -> tuple[FactorSums, Seen]:
    """Factors of every block, summed over the examples of all batches; `first` as in `Sweep.over`.

    On several processes they are those of all, and each block's are at its owner alone.
    """
    gradients, inputs = sides = SideSums(problem, 0), SideSums(problem, 1)

    def add(block: Block, side: int, factor: Factor) -> None:
        sides[side].add(block, factor)

    sums: dict[str, Any] = {"G": gradients.sums, "A": inputs.sums}
    sums |= {"rows": gradients.rows, "input rows": inputs.rows}
    sums |= {"rests": gradients.rests, "input rests": inputs.rests}
    seen = factor_pass(problem, batches, first, add, Block.is_streamed, sums)
    owned_G, owned_A = owned_factors(problem, gradients, inputs)
    # What an exact block is multiplied with, once an example.
    return {
        block: (G, _ones(problem, block, seen.weight) if block.is_exact else owned_A[block])
        for block, G in owned_G.items()
    }, seen


def owned_factors(problem: Problem, *sides: SideSums) -> list[dict[Block, Factor]]:
    """Sums of all processes, side by side, of the blocks that this process owns."""
    few = [of_side.few() for of_side in sides]
    found = {
        block: [of.sums[block] for of in sides if block in of.sums]
        + [of_few[block].rows for of_few in few if block in of_few]
        for block in problem.blocks
    }
    check_finite_sums({block: parts for block, parts in found.items() if parts})
    owners, owned = owners_by_cost(problem.blocks, problem.ranks.size), []
    for of_side, of_few in zip(sides, few, strict=True):
        of_sums = {b: factor_shape(b, of_side.side) for b in problem.blocks if b not in of_few}
        factors: dict[Block, Factor] = {**of_few, **to_owners(problem, of_side.sums, of_sums.get)}
        mine = [block for block, owner in owners.items() if owner == problem.ranks.rank]
        owned.append({block: factors[block] for block in mine if block in factors})
    return owned


def _ones(problem: Problem, block: Block, weight: float) -> Tensor:
    shape = (*block.groups, 1, 1)
    return torch.full(shape, weight, dtype=problem.factor_dtype, device=problem.device)


def check_finite_sums(sums: Mapping[Block, Sequence[Tensor]]) -> None:
    """Require what was summed over the data to be finite, block by block.

    What is not finite in one batch is not in the sum either, so that the host waits for the device
    once, behind the last batch.
    """
    extremes = [torch.stack(torch.aminmax(part)).double() for of in sums.values() for part in of]
    if not extremes:
        return
    is_finite = iter(torch.stack(extremes).isfinite().all(1).tolist())
    for block, of_block in sums.items():
        found = [next(is_finite) for _ in of_block]
        if not all(found):
            layer = f"layer {block.layer!r}" if block.layer else "the model"
            raise ValueError(
                f"The curvature of {block.name} holds NaN or Inf: the inputs of {layer}, or the "
                "gradients at its outputs, hold Inf or overflow when they are squared. Look for "
                "Inf in the data, rescale it, or convert the model to a wider dtype."
            )


def eigenbases(problem: Problem, sums: FactorSums, weight: float) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied, factor by factor, on the way.

    The sums are those of this process's blocks, over examples of this weight. Factors of one shape
    are decomposed together where they are small: the calls take longer than the work.
    """
    factors = {(block, side): sums[block][side] for block in sums for side in (0, 1)}
    sums.clear()
    alike: dict[Any, list[tuple[Block, int]]] = {}
    for place, factor in factors.items():
        kind = (None, factor) if isinstance(factor, Tensor) else (factor.most, factor.rows)
        alike.setdefault((type(factor), kind[0], kind[1].shape), []).append(place)
    pairs: dict[tuple[Block, int], Eigenpairs] = {}
    for (*_, shape), places in alike.items():
        step = max(1, _TOGETHER // max(1, shape.numel()))
        for start in range(0, len(places), step):
            some = places[start : start + step]
            names = ", ".join(f"factor {'GA'[side]} of {block.name}" for block, side in some)
            found = eigh_of_each([factors.pop(place) / weight for place in some], names)
            pairs.update(zip(some, found, strict=True))
    bases = {}
    for block in [block for block, side in pairs if side == 0]:
        (along_G, U_G), (along_A, U_A) = pairs.pop((block, 0)), pairs.pop((block, 1))
        bases[block] = Eigenbasis(U_G, U_A, along_G, along_A)
    return shared_bases(problem, bases) if problem.ranks.size > 1 else bases


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value
