"""One pass over data: every block is measured on every batch, within a bound of memory."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from laplace_debias.curvature.fits.chunks import Chunks
from laplace_debias.curvature.fits.kept_inputs import ConsumeInputs, KeptInputs
from laplace_debias.curvature.fits.out_of_memory import out_of_memory
from laplace_debias.curvature.fits.pass_state import Held
from laplace_debias.curvature.fits.passes import Sums
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.stream import Consume, HookStream, Measure
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.faults import Faults
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.curvature.network.shards import Placed
from laplace_debias.system.memory import MOST_GRANTED, granted
from laplace_debias.system.out_of_memory import is_out_of_memory

# A chunk's output gradients take this share of the memory bound: larger chunks are slower, as they
# leave the processor's cache.
_SHARE = 4


def sweep(
    problem: Problem,
    batches: Pairs,
    measure: Measure,
    consume: Consume,
    consume_inputs: ConsumeInputs | None = None,
    first: int = 0,
    *,
    additive: bool = False,
    extra_bytes: int = 0,
    held: Held | None = None,
    along: Sequence[Tensor | None] = (),
    joins_blocks: bool = False,
) -> Seen:
    """One pass over data: every batch's blocks are measured and handed over.

    A batch is pushed through the network in chunks, to keep the output gradients of all columns
    within the memory bound. A chunk for which there is not enough memory is run again by halves, as
    are all that follow; what was added of it is not added again. Of several processes each goes
    through its own batches; what they saw is summed, what was measured is not.

    Args:
        problem: The network and its blocks.
        batches: `(x, y)` pairs, on the model's device or the CPU.
        measure: What to compute of a block on a chunk of a batch.
        consume: Takes what was measured of a block.
        consume_inputs: If given, takes at the end of every batch (of a very large one also within)
            the layer of one weight block after the other, what went into it, chunk by chunk, and
            which positions take part. Then `measure` is told them too, where not all do.
        first: Position of the first example in all data of the fit: Monte-Carlo labels are keyed by
            it, so that different data get different labels. `Placed` pairs say the rest.
        additive: Whether measuring one cotangent after the other costs no more than all at once.
        extra_bytes: What is made for every cotangent of an example besides its output gradients.
        held: Where `consume` and `consume_inputs` keep what they sum, so that the pass can be saved
            and gone on with: all that they remember from batch to batch. None for a pass of which
            nothing is saved.
        along: What is measured along, as `Sums` has it.
        joins_blocks: Whether `consume` adds nothing before it was given all blocks.

    Raises:
        ValueError: If there is no batch, or the network's outputs are not finite or not `[B, C]`,
            or targets do not fit.
        RuntimeError: If memory runs out for a single example, or within a sum.
    """
    network = shadow(problem.model)
    stream = problem.backend(network, problem.blocks)
    kept = None if consume_inputs is None else KeptInputs(network, problem.blocks, consume_inputs)
    faults = Faults()
    placed = batches if isinstance(batches, Placed) else Placed(batches)
    keys = {block.name: block for block in problem.blocks}
    sums = None if held is None else Sums(held, keys, faults.read, along)
    with problem.passes.begin(sums) as one_pass:
        pace, num_read = None, 0
        num_seen, num_outputs = one_pass.num_examples, one_pass.num_outputs
        nll: Tensor | float = one_pass.nll
        for number, (all_x, all_y) in enumerate(one_pass.batches(placed), start=1):
            problem.ranks.check()
            if pace is None:
                pace = pace_of(problem, all_x, additive, extra_bytes)
            place = placed.place(number - 1, num_read)
            num_read += len(all_y)
            left, before = one_pass.left(all_x, all_y, place), first + place
            if not left:
                continue
            chunks = Chunks(left)
            while (part := chunks.next(pace.examples)) is not None:
                x, y, key = take(all_x, part), all_y[part], before + part.start
                before_chunk, adding = (nll, num_outputs), chunks.adding(consume)

                def columns(outputs: Tensor, y: Tensor = y, key: int = key) -> Tensor:
                    nonlocal nll, num_outputs
                    check_outputs(outputs)
                    cotangents, value = problem.cotangents(outputs, y, key)
                    nll = nll + value
                    num_outputs += outputs.numel()
                    return cotangents

                failed = None
                try:
                    # The batches of a list are folds, and not those of the user.
                    with faults.of_batch(None if placed.are_folds else number):
                        moved, keeping = move(x, pace.device, None), measure
                        if kept is not None:
                            # It asks about what still lies on the CPU there.
                            masks = pace.positions.find(x, y, key)
                            keeping = kept.and_measure(measure, masks)
                        stream(moved, columns, keeping, adding, pace.columns)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    # It is not known what a sum has come to that was broken off.
                    if adding.is_within or len(y) == 1:
                        raise out_of_memory(len(y), pace.columns, error) from error
                    failed = len(y)
                if failed is not None:
                    # Only here, behind the handler, is what the failed chunk held let go of.
                    nll, num_outputs = before_chunk
                    if kept is not None:
                        kept.forget_chunk()
                    chunks.again(part, adding.added(problem.blocks if joins_blocks else None))
                    pace = replace(pace, examples=failed // 2)
                    continue
                if kept is not None:
                    kept.hand_over_if_full()
                num_seen += len(y)
                chunks.done(part)
            if kept is not None:
                kept.hand_over()
            one_pass.done(num_seen, nll, num_outputs)
    faults.read()
    of_ranks = problem.ranks.exchange([num_seen, float(nll), num_outputs])
    seen = reduce(operator.add, (Seen(*of_rank) for of_rank in of_ranks))
    if seen.num_examples == 0:
        raise ValueError("The data holds no example: pass a loader with at least one batch.")
    return seen


@dataclass(frozen=True)
class Pace:
    """How many examples and cotangents go through the network at once, and what finds padding."""

    examples: int
    columns: int
    positions: PositionFinder
    device: torch.device


def pace_of(problem: Problem, x: Inputs, additive: bool, extra_bytes: int) -> Pace:
    """What fits into the memory bound, found by running one example.

    Raises:
        ValueError: If one cotangent of one example does not fit.
    """
    device = problem.device
    one = move(take(x, slice(0, 1)), device, None)
    network, blocks = shadow(problem.model), problem.paced_by or problem.blocks
    tap = Tap.on(network, blocks)
    outputs = tap.forward(one)
    check_outputs(outputs, num_examples(x))
    positions = PositionFinder(
        problem.model, blocks, problem.cotangents, network, tap.uses, outputs
    )
    columns = problem.cotangents.num_columns(outputs)
    _check_columns(columns, outputs)
    size = tap.output_bytes() + extra_bytes
    bound = granted(problem.memory_bound, size, "one cotangent of one example")
    at_once = min(columns, bound // size)
    if additive and tap.one_by_one and problem.backend is HookStream:
        at_once = 1
    examples = bound // (_SHARE * at_once * size)
    return Pace(max(1, examples), at_once, positions, device)


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
