"""One pass over data: every block is measured on every batch, within a bound of memory."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.checkpoint import State
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import Factor
from laplace_debias.curvature.fits.factors import gradient_factor, input_factors
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Fold, Pairs, weight_of
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.curvature.network.outputs import MOST_GRANTED, Faults, check_outputs, granted
from laplace_debias.system.memory import is_out_of_memory

# A chunk's output gradients take one of so many parts of the memory bound: larger chunks leave
# the processor's cache. On a GPU they take all of it.
_PARTS = defaultdict(lambda: 1, cpu=2)


class Sweep:
    """A pass over data: every batch's blocks are measured and added up.

    A batch is pushed through the network in chunks, to keep the output gradients of all columns
    within the memory bound; chunks that do not fit are halved.

    Args:
        problem: The network and its blocks, the processes, and where passes are saved.
        add: Takes what was measured of a block, `add(block, measured)`; its factors one by one,
            `add(block, side, factor)` with side 0 for G and 1 for A.
        measure: What to compute of a block on a chunk of a batch, `measure(layer, block, uses)`;
            None for its factors. Then measuring one cotangent after the other costs no more than
            all at once.
        as_rows: Whether G, and A, of a block are wanted as rows, however many; where they are
            streamed if None.
        sums: Where `add` keeps all that it remembers from batch to batch; None for a pass of which
            nothing is saved.
        row_bytes: Where `add` joins the blocks' parts to a row, and adds nothing before it was
            given all of them: the bytes of one, for every cotangent of an example.
    """

    def __init__(
        self,
        problem: FitContext,
        add: Callable[..., object],
        measure: Callable[[nn.Module, Block, Uses], Any] | None = None,
        *,
        as_rows: Mapping[Block, tuple[bool, bool]] | None = None,
        sums: State | None = None,
        row_bytes: int = 0,
    ) -> None:
        self.problem, self.add, self.measure, self.as_rows = problem, add, measure, as_rows
        self.sums, self.checkpoint = ({}, None) if sums is None else (sums, problem.checkpoint)
        self.row_bytes, self.seen = row_bytes, DataTotals()
        self.positions: PositionFinder | None = None
        # Of a chunk that was broken off: whether it was within a sum.
        self.is_adding = False

    def over(self, batches: Pairs, first: int = 0) -> DataTotals:
        """Go through data; of several processes each through its own, and what all saw is summed.

        `first` is the position of the first example in all data of the fit: Monte-Carlo labels are
        keyed by it, so that different data get different labels.
        """
        faults, num_read, place_of = Faults(), 0, getattr(batches, "place", None)
        if self.checkpoint is not None:
            keys = {block.name: block for block in self.problem.blocks}
            self.seen = self.checkpoint.begin(self.sums, keys)
        for number, pair in enumerate(batches, start=1):
            if self.positions is None:
                self._look(pair[0])
            place = first + (place_of(number - 1, num_read) if place_of else num_read)
            num_read += len(pair[1])
            if self.checkpoint is not None and self.checkpoint.has(pair):
                continue
            # The pairs of a fold are not the batches of the user.
            with faults.of_batch(None if isinstance(batches, (list, Fold)) else number):
                self._batch(place, pair)
            if self.checkpoint is not None:
                self.checkpoint.done(self.seen, faults.read)
        faults.read()
        if self.checkpoint is not None:
            self.checkpoint.end()
        return self.seen.over(self.problem.ranks)

    def _look(self, x: Inputs) -> None:
        """Find the chunk within the memory bound, and what finds padding, by one example."""
        problem, tap = self.problem, self.problem.tap
        outputs = tap.forward(move(take(x, slice(0, 1)), problem.device, None))
        check_outputs(outputs)
        self.positions = PositionFinder(
            problem.network, problem.blocks, problem.cotangents, tap.uses, outputs
        )
        fisher, num_outputs = problem.cotangents.fisher, outputs[0].numel()
        columns = num_outputs if fisher.kind == "exact" else fisher.mc_samples
        needed = columns * num_outputs * outputs.element_size()
        if needed > MOST_GRANTED:
            raise ValueError(
                f"One example has {num_outputs} outputs of shape {tuple(outputs.shape[1:])}, and "
                f"its exact loss Hessian has {columns} columns of as many numbers, {needed} bytes: "
                'use fisher="mc", a column for each of mc_samples labels that are drawn from the '
                'model, or fisher="empirical".'
            )
        size = tap.output_bytes + self.row_bytes
        bound = granted(problem.memory_bound, size, "one cotangent of one example", problem.device)
        self.columns = min(columns, bound // size)
        # Images are laid out so where a processor convolves: it takes less time.
        self.channels_last = tap.one_by_one and isinstance(x, Tensor) and x.ndim == 4
        if self.measure is None and tap.one_by_one:
            self.columns = 1
        self.examples = max(1, bound // (_PARTS[problem.device.type] * self.columns * size))
        tap.forget()

    def _batch(self, place: int, pair: tuple[Any, ...]) -> None:
        """Run a batch chunk by chunk, and a chunk for which there is not enough memory by halves.

        One that fails in `channels_last`, as a `view` does, is run as it is.
        Such a chunk may be in the sums of some blocks already: its halves are added to the others.
        Memory that runs out for one example, or within a sum, is an error.
        """
        for block in self.problem.blocks:
            if len(pair) > 2 and (block.is_joint or block.role == "table"):
                raise ValueError(
                    "Examples have weights, which neither joint=True nor an embedding's table "
                    'takes: leave out joint, or name other parameters (params="last_layer").'
                )
        # Examples that are left, and how often each block was added of them.
        left = [(slice(0, len(pair[1])), Counter[Block]())]
        while left:
            part, before = left.pop()
            chunk = slice(part.start, min(part.start + self.examples, part.stop))
            if chunk.stop < part.stop:
                left.append((slice(chunk.stop, part.stop), before))
            added, size = Counter[Block](), chunk.stop - chunk.start
            try:
                self._chunk(place, pair, chunk, before, added)
                continue
            except (RuntimeError, MemoryError) as error:
                is_too_large = is_out_of_memory(error)
                if not is_too_large and (self.is_adding or not self.channels_last):
                    raise
                if is_too_large and (self.is_adding or size == 1):
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    raise RuntimeError(
                        f"Not enough memory for {size} example(s) ({reason}). Nothing was fitted. "
                        'Pass a smaller memory_bound=, use fisher="mc", or fewer parameters '
                        '(params="last_layer"); la.plan(loader) tells what a fit takes.'
                    ) from error
            # Not within `except`, whose error holds what the chunk took.
            if is_too_large:
                self.examples = size // 2
            else:
                self.channels_last = False
            added |= before
            if self.row_bytes:
                least = min(added[block] for block in self.problem.blocks)
                added = Counter(dict.fromkeys(self.problem.blocks, least))
            left.append((chunk, added))
        self.seen.num_examples += len(pair[1])
        self.seen.weight += weight_of(pair)

    def _chunk(
        self,
        place: int,
        pair: tuple[Any, ...],
        part: slice,
        before: Counter[Block],
        added: Counter[Block],
    ) -> None:
        """Push a chunk through the network, forward and back, and add what is measured of it.

        `added` counts how often each block was reached; what was added `before` is left out.
        """
        problem, backend = self.problem, self.problem.backend
        x, y = take(pair[0], part), pair[1][part]
        weights = pair[2][part] if len(pair) > 2 else None
        masks: Mapping[str, Masks] = {}
        if self.measure is None:
            assert self.positions is not None
            # Before the batch is moved: what finds padding reads it on the CPU.
            masks = self.positions.find(x, y)
        x = move(x, problem.device, None)
        if self.channels_last and isinstance(x, Tensor):
            x = x.contiguous(memory_format=torch.channels_last)
        outputs = backend.forward(x)
        check_outputs(outputs)
        cotangents, nll = problem.cotangents(outputs.detach(), y, place + part.start, weights)
        roots = None if weights is None else weights.sqrt()
        if roots is not None:
            cotangents = by_example(cotangents, roots, 1)
        parts = cotangents.split(self.columns)
        for index, columns in enumerate(parts, start=1):
            for number, layer, uses in backend.backward(outputs, columns, index < len(parts)):
                block = problem.blocks[number]
                if added[block] >= before[block]:
                    # Further cotangents of the same examples come with the same inputs.
                    is_new = not (added[block] or block.is_exact)
                    self._add(layer, block, uses, masks.get(block.layer), roots, is_new)
                added[block] += 1
        self.seen.nll = self.seen.nll + nll
        size = len(y) if weights is None else float(weights.double().sum())
        self.seen.num_outputs += outputs[0].numel() * size

    def _add(
        self,
        layer: nn.Module,
        block: Block,
        uses: Uses,
        masks: Masks | None,
        roots: Tensor | None,
        is_new: bool,
    ) -> None:
        """Measure a block, and add that: of factors G, and A where the inputs are new."""
        parts_of_A: Iterable[Factor] = ()
        if self.measure is not None:
            measured: tuple[Any, ...] = (self.measure(layer, block, uses),)
        else:
            as_rows = block.is_streamed if self.as_rows is None else self.as_rows[block]
            measured = 0, gradient_factor(layer, block, uses, masks, as_rows[0])
            if is_new:
                inputs, _ = zip(*uses, strict=True)  # type: ignore[misc]
                if roots is not None:
                    inputs = tuple(by_example(x, roots, 0) for x in inputs)
                parts_of_A = input_factors(layer, block, inputs, masks, as_rows[1])
        self.is_adding = True
        self.add(block, *measured)
        for A in parts_of_A:
            self.add(block, 1, A)
        self.is_adding = False


def by_example(values: Tensor, factors: Tensor, dim: int) -> Tensor:
    """Values times a factor for each example, which are along a dimension."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return values * factors.to(values).view(shape)
