"""One pass over data: every block is measured on every batch, within a bound of memory."""

import operator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from laplace_debias.curvature.fits.checkpoint import UNSAVED, Progress, Sums
from laplace_debias.curvature.fits.halves import Adding, run_by_halves
from laplace_debias.curvature.fits.kept_inputs import ConsumeInputs, KeptInputs, by_example
from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.layers.backends import Consume, HookStream, Measure
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.batches import Pairs, Placed, weight_of
from laplace_debias.curvature.network.faults import Faults
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.memory import MOST_GRANTED, granted

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
