"""One pass over data: every block is measured on every batch, within a bound of memory."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.checkpoint import UNSAVED, Progress, Sums
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.layers.backends import Consume, HookStream, Measure
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.network.batches import Pairs, Placed, weight_of
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take
from laplace_debias.curvature.network.outputs import Faults, check_outputs
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.memory import MOST_GRANTED, granted, is_out_of_memory


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


# From a layer, its block, its inputs (a part of the batch, a use), and which positions take part.
ConsumeInputs = Callable[
    [nn.Module, Block, Sequence[Sequence[Tensor]], Sequence[Masks | None]], None
]
MOST_KEPT = 2**30
"""Bytes of layers' inputs that are kept until A is computed from them."""


class KeptInputs:
    """Inputs of the layers of weight blocks, kept until the end of a batch.

    Args:
        network: The network that is swept.
        blocks: The curvature blocks.
        consume: As `sweep` takes it.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[Block], consume: ConsumeInputs) -> None:
        self._network = network
        self._blocks = [block for block in blocks if not block.is_exact]
        self._consume = consume
        self._parts: dict[Block, list[tuple[list[Tensor], Masks | None]]] = {}
        self._of_chunk: list[Block] = []
        self._num_bytes = 0

    def and_measure(
        self, measure: Measure, masks: Mapping[str, Masks], roots: Tensor | None = None
    ) -> Measure:
        """`measure`, which keeps the inputs of a chunk's blocks on the way.

        Args:
            measure: What to compute of a block.
            masks: Which positions take part, of the layers where not all do.
            roots: Those of the examples' weights, by which inputs are multiplied; None for one.
        """
        # Further cotangents of the same examples come with the same inputs.
        fresh = set(self._blocks)
        self._of_chunk.clear()

        def keep_and_measure(layer: nn.Module, block: Block, uses: Uses) -> Any:
            mask = masks.get(block.layer)
            if block in fresh and not isinstance(uses, CallUses):
                fresh.discard(block)
                inputs = [x if roots is None else by_example(x, roots, 0) for x, _ in uses]
                self._parts.setdefault(block, []).append((inputs, mask))
                self._of_chunk.append(block)
                self._num_bytes += _num_bytes(inputs)
            return (
                measure(layer, block, uses) if mask is None else measure(layer, block, uses, mask)
            )

        return keep_and_measure

    def forget_chunk(self) -> None:
        """Let go of what was kept of the last chunk, which is run again."""
        for block in self._of_chunk:
            inputs, _ = self._parts[block].pop()
            self._num_bytes -= _num_bytes(inputs)
            if not self._parts[block]:
                del self._parts[block]
        self._of_chunk.clear()

    def hand_over_if_full(self) -> None:
        """Hand over what is kept if it takes much memory."""
        if self._num_bytes > MOST_KEPT:
            self.hand_over()

    def hand_over(self) -> None:
        """Hand over what is kept, one block after the other, and forget it."""
        while self._parts:
            block, parts = self._parts.popitem()
            self._consume(self._network.get_submodule(block.layer), block, *_joined(parts))
        self._num_bytes = 0


def by_example(values: Tensor, factors: Tensor, dim: int) -> Tensor:
    """Values times a factor for each example, which are along a dimension."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return values * factors.to(values).view(shape)


def _num_bytes(inputs: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in inputs)


def _joined(
    parts: list[tuple[list[Tensor], Masks | None]],
) -> tuple[list[list[Tensor]], list[Masks | None]]:
    """The parts of a batch in one, where they are alike."""
    inputs, masks = [part for part, _ in parts], [mask for _, mask in parts]
    is_masked = any(mask is not None for mask in masks)
    if is_masked or len({tuple(x.shape[1:] for x in part) for part in inputs}) > 1:
        return inputs, masks
    return [[torch.cat(uses) for uses in zip(*inputs, strict=True)]], [None]


# A chunk's output gradients take this share of the memory bound: larger chunks are slower, as they
# leave the processor's cache.
_SHARE = 4


class Sweep:
    """A pass over data: every batch's blocks are measured and added up.

    A batch is pushed through the network in chunks, to keep the output gradients of all columns
    within the memory bound; see `run_by_halves` for those that do not fit.

    Args:
        problem: The network and its blocks, the processes, and where passes are saved.
        measure: What to compute of a block on a chunk of a batch.
        add: Takes what was measured of a block.
        add_inputs: If given, takes at the end of every batch (of a very large one also within) the
            layer of one weight block after the other, what went into it, chunk by chunk, and which
            positions take part. Then `measure` is told them too, where not all do.
        sums: Where `add` and `add_inputs` keep all that they remember from batch to batch; None for
            a pass of which nothing is saved.
        additive: Whether measuring one cotangent after the other costs no more than all at once.
        extra_bytes: What is made for every cotangent of an example besides its output gradients.
        joins_blocks: Whether `add` adds nothing before it was given all blocks.
    """

    def __init__(
        self,
        problem: Problem,
        measure: Measure,
        add: Consume,
        add_inputs: ConsumeInputs | None = None,
        *,
        sums: Sums | None = None,
        additive: bool = False,
        extra_bytes: int = 0,
        joins_blocks: bool = False,
    ) -> None:
        self.problem, self.measure, self.add = problem, measure, add
        self.sums = {} if sums is None else sums
        self.checkpoint = UNSAVED if sums is None else problem.checkpoint
        self.additive, self.extra_bytes = additive, extra_bytes
        self.together = problem.blocks if joins_blocks else None
        network = shadow(problem.model)
        self.stream = problem.backend(network, problem.blocks)
        self.kept = add_inputs and KeptInputs(network, problem.blocks, add_inputs)

    def over(self, batches: Pairs, first: int = 0) -> Seen:
        """Go through data; of several processes each through its own, and what all saw is summed.

        Args:
            batches: `(x, y)` pairs, on the model's device or the CPU.
            first: Position of the first example in all data of the fit: Monte-Carlo labels are
                keyed by it, so that different data get different labels. `Placed` pairs say the
                rest.

        Raises:
            ValueError: If there is no batch, or the network's outputs are not finite or not
                `[B, C]`, or targets do not fit.
            RuntimeError: As `run_by_halves`.
        """
        placed = batches if isinstance(batches, Placed) else Placed(batches)
        keys = {block.name: block for block in self.problem.blocks}
        progress, faults = self.checkpoint.begin(self.sums, keys), Faults()
        pace, num_read = None, 0
        for number, pair in enumerate(placed, start=1):
            pace = pace or self._pace(pair[0])
            place = first + placed.place(number - 1, num_read)
            num_read += len(pair[1])
            if self.checkpoint.has(pair):
                continue
            # The batches of a list are folds, and not those of the user.
            with faults.of_batch(None if placed.are_folds else number):
                self._batch(*pair, place=place, pace=pace, progress=progress)
            progress.num_batches += 1
            self.checkpoint.done(progress, faults.read)
        faults.read()
        self.checkpoint.end()
        own = [*(progress.num_examples, float(progress.nll), progress.num_outputs, progress.weight)]
        seen = reduce(operator.add, (Seen(*of) for of in self.problem.ranks.exchange(own)))
        if seen.num_examples == 0:
            raise ValueError("The data holds no example: pass a loader with at least one batch.")
        if not seen.weight:
            raise ValueError("The weights of all examples are zero: give some of them a weight.")
        return seen

    def _pace(self, x: Inputs) -> "Pace":
        """The chunk that fits into the memory bound, found by running one example.

        Raises:
            ValueError: If one cotangent of one example does not fit.
        """
        problem, device = self.problem, self.problem.device
        stream, blocks = self.stream, problem.blocks
        tap = (
            stream.tap if isinstance(stream, HookStream) else Tap.on(shadow(problem.model), blocks)
        )
        outputs = tap.forward(move(take(x, slice(0, 1)), device, None))
        check_outputs(outputs, num_examples(x))
        positions = PositionFinder(
            problem.model, blocks, problem.cotangents, tap.network, tap.uses, outputs
        )
        columns = problem.cotangents.num_columns(outputs)
        _check_columns(columns, outputs)
        size = tap.output_bytes() + self.extra_bytes
        bound = granted(problem.memory_bound, size, "one cotangent of one example")
        at_once = min(columns, bound // size)
        if self.additive and tap.one_by_one and isinstance(stream, HookStream):
            at_once = 1
        examples = bound // (_SHARE * at_once * size)
        tap.forget()
        return Pace(max(1, examples), at_once, positions, device)

    def _batch(
        self,
        x: Inputs,
        y: Tensor,
        weights: Tensor | None = None,
        *,
        place: int,
        pace: "Pace",
        progress: Progress,
    ) -> None:
        """Measure a batch and add it up, chunk by chunk.

        Raises:
            ValueError: For weights where a block takes none.
        """
        if weights is not None and any(
            b.is_joint or b.role == "table" for b in self.problem.blocks
        ):
            raise ValueError(
                "Examples have weights, which neither joint=True nor an embedding's table takes: "
                'leave out joint, or name other parameters (params="last_layer").'
            )

        def run(part: slice, adding: Adding) -> None:
            before = progress.nll, progress.num_outputs
            try:
                of_part = None if weights is None else weights[part]
                pairs = take(x, part), y[part], place + part.start
                self._chunk(*pairs, pace, progress, adding, of_part)
            except BaseException:
                progress.nll, progress.num_outputs = before
                if self.kept is not None:
                    self.kept.forget_chunk()
                raise
            if self.kept is not None:
                self.kept.hand_over_if_full()

        everything = slice(0, len(y))
        pace.examples = run_by_halves(everything, pace.examples, run, self.add, self.together)
        progress.num_examples += len(y)
        progress.weight += weight_of((x, y) if weights is None else (x, y, weights))
        if self.kept is not None:
            self.kept.hand_over()

    def _chunk(
        self,
        x: Inputs,
        y: Tensor,
        key: int,
        pace: "Pace",
        progress: Progress,
        adding: Adding,
        weights: Tensor | None,
    ) -> None:
        """Push a chunk through the network, forward and back."""
        roots = None if weights is None else weights.sqrt()

        def columns(outputs: Tensor) -> Tensor:
            check_outputs(outputs)
            cotangents, value = self.problem.cotangents(outputs, y, key, weights)
            progress.nll = progress.nll + value
            per_example = outputs[0].numel()
            progress.num_outputs += per_example * (
                len(y) if weights is None else float(weights.double().sum())
            )
            return cotangents if roots is None else by_example(cotangents, roots, 1)

        moved, measure = move(x, pace.device, None), self.measure
        if self.kept is not None:
            # It asks about what still lies on the CPU there.
            measure = self.kept.and_measure(measure, pace.positions.find(x, y), roots)
        self.stream(moved, columns, measure, adding, pace.columns)


@dataclass
class Pace:
    """How many examples and cotangents go through the network at once, and what finds padding."""

    examples: int
    columns: int
    positions: PositionFinder
    device: torch.device


def _check_columns(columns: int, outputs: Tensor) -> None:
    """Require the cotangents of one example to be few enough to be made.

    Raises:
        ValueError: Otherwise, as with the exact loss Hessian of a language model.
    """
    needed = columns * outputs[0].numel() * outputs.element_size()
    if needed > MOST_GRANTED:
        raise ValueError(
            f"One example has {outputs[0].numel()} outputs of shape {tuple(outputs.shape[1:])}, "
            f"and its exact loss Hessian has {columns} columns of as many numbers, {needed} bytes: "
            'use fisher="mc", a column for each of mc_samples labels that are drawn from the '
            'model, or fisher="empirical".'
        )
