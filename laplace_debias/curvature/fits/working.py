"""Working memory of a chunk of a pass over data, found by running one and two examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.input_memory import most_numbers_of_input_factor
from laplace_debias.curvature.fits.kept_inputs import MOST_KEPT
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sweep import pace_of
from laplace_debias.curvature.fits.tracked import TrackedMemory
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take, tensors_of
from laplace_debias.curvature.network.shadow import shadow


@dataclass(frozen=True)
class Working:
    """What one chunk of a batch takes.

    Attributes:
        batch: Examples of a batch.
        examples: Examples of a chunk.
        columns: Cotangents of an example, K, in all.
        at_once: Cotangents that go back at once.
        output_gradients: Bytes of the gradients at the layers' outputs.
        activations: Bytes that the forward pass leaves for the backward pass.
        chunk: Bytes at most while a chunk goes forward and back, these included.
        measured: Bytes that are held of it when a block is measured, in the order of blocks in
            which they are.
        kept: Bytes of the layers' inputs that are kept of a batch for A.
        kept_before: Those of the batch's other chunks.
        positions: T of every block.
        inputs: Bytes of the inputs of one example that a weight block keeps for A. What goes into
            several layers is counted for the one that is done with it last.
        tensors: All inputs of one example that a weight block needs for A: numbers of the tensors,
            and their bytes.
        input_factors: Numbers at most, in the model's dtype, while a weight block's A is computed
            from a whole batch.
    """

    batch: int
    examples: int
    columns: int
    at_once: int
    output_gradients: int
    activations: int
    chunk: int
    measured: Mapping[Block, int]
    kept: int
    kept_before: int
    positions: Mapping[Block, int]
    inputs: Mapping[Block, int]
    tensors: Mapping[Block, Sequence[tuple[int, int]]]
    input_factors: Mapping[Block, int]

    @property
    def is_whole(self) -> bool:
        """Whether a batch is one chunk, all cotangents at once."""
        return self.examples >= self.batch and self.at_once >= self.columns

    def of_group(self, blocks: Sequence[Block]) -> "Working":
        """The same, at most, where some of the blocks are measured alone."""
        group = set(blocks)
        inputs = _inputs_of(self.tensors, blocks)
        kept, kept_before = _kept(inputs, self.batch, self.examples)
        return replace(
            self,
            measured={block: held for block, held in self.measured.items() if block in group},
            kept=kept,
            kept_before=kept_before,
            inputs=inputs,
            input_factors={b: number for b, number in self.input_factors.items() if b in group},
        )


def _inputs_of(
    tensors: Mapping[Block, Sequence[tuple[int, int]]], blocks: Sequence[Block]
) -> dict[Block, int]:
    """`Working.inputs` where some blocks are measured, from `Working.tensors`."""
    known: set[int] = set()
    found = {}
    for block in reversed(blocks):
        if block in tensors:
            found[block] = sum(size for number, size in tensors[block] if number not in known)
            known |= {number for number, _ in tensors[block]}
    return found


def _kept(inputs: Mapping[Block, int], batch: int, examples: int) -> tuple[int, int]:
    """`Working.kept` and `Working.kept_before`."""
    size = sum(inputs.values())
    return (
        min(batch * size, MOST_KEPT + examples * size),
        min((batch - examples) * size, MOST_KEPT),
    )


def working_memory(
    problem: Problem, x: Inputs, y: Tensor, *, additive: bool, extra_bytes: int = 0
) -> Working:
    """The working memory of a pass over batches like a given one.

    Args:
        problem: The network and its blocks.
        x: The inputs of one batch.
        y: Its targets.
        additive: As `sweep` takes it.
        extra_bytes: As `sweep` takes it.

    Raises:
        ValueError: As `sweep`, if one cotangent of one example does not fit.
    """
    pace = pace_of(problem, x, additive, extra_bytes)
    batch = num_examples(x)
    examples = min(batch, pace.examples)
    one, two = (_of(problem, x, y, n, pace.columns, batch, additive) for n in (1, min(2, batch)))

    def extrapolated(of_one: int, of_two: int) -> int:
        """Linear in the examples, with what all have in common."""
        return of_one + (examples - 1) * max(0, of_two - of_one)

    at_once = min(pace.columns, one.columns)
    sizes = one.sizes
    inputs = _inputs_of(sizes.tensors, problem.blocks)
    return Working(
        *(batch, examples, one.columns, at_once),
        examples * at_once * sizes.outputs,
        extrapolated(one.activations, two.activations),
        extrapolated(one.peak, two.peak),
        {b: extrapolated(held, two.measured[b]) for b, held in one.measured.items()},
        *_kept(inputs, batch, examples),
        positions=sizes.positions,
        inputs=inputs,
        tensors=sizes.tensors,
        input_factors=sizes.input_factors,
    )


@dataclass(frozen=True)
class _Run:
    """What a few examples take.

    Attributes:
        peak: Bytes at most.
        activations: Bytes that the forward pass leaves.
        measured: Bytes that are held when a block is measured for the first time.
        columns: Cotangents of an example.
        sizes: What does not depend on how many examples there are.
    """

    peak: int
    activations: int
    measured: dict[Block, int]
    columns: int
    sizes: "_Sizes"


@dataclass(frozen=True)
class _Sizes:
    """As `Working` has them, and the bytes of one example's outputs of all layers."""

    outputs: int
    positions: dict[Block, int]
    tensors: dict[Block, list[tuple[int, int]]]
    input_factors: dict[Block, int]


def _of(
    problem: Problem, x: Inputs, y: Tensor, count: int, at_once: int, batch: int, additive: bool
) -> _Run:
    """A few examples, forward and back, as a pass pushes them."""
    some = move(take(x, slice(0, count)), problem.device, None)
    network = shadow(problem.model)
    sizes = _sizes(problem, Tap.on(network, problem.blocks), some, batch)
    stream = problem.backend(shadow(problem.model), problem.blocks)
    # The first time a network is run it is looked at more closely.
    for _ in range(2):
        probe = _Probe(problem, y[:count], at_once, additive)
        with probe.memory:
            stream(some, probe.columns, probe.measure, lambda *_: None, at_once)
    return _Run(probe.memory.peak, probe.activations, probe.held, probe.num_columns, sizes)


class _Probe:
    """Goes with a chunk forward and back, and notes what is held where its blocks are measured."""

    def __init__(self, problem: Problem, y: Tensor, at_once: int, additive: bool) -> None:
        self.memory = TrackedMemory()
        self.activations = self.num_columns = 0
        self.held: dict[Block, int] = {}
        self._problem, self._y = problem, y
        self._at_once, self._additive = at_once, additive
        self._kept: list[Tensor] = []

    def columns(self, outputs: Tensor) -> Tensor:
        """The cotangents: as many as go back at once, and some to follow if there are more."""
        self.activations = self.memory.live
        cotangents, _ = self._problem.cotangents(outputs.detach(), self._y, 0)
        self.num_columns = len(cotangents)
        return cotangents[: 2 * self._at_once]

    def measure(self, _: nn.Module, block: Block, uses: Uses) -> None:
        """Note what is held; inputs that A needs are kept, as they are in a fit."""
        self.held.setdefault(block, self.memory.live)
        if self._additive and not block.is_exact and not isinstance(uses, CallUses):
            self._kept.extend(x for x, _ in uses)


def _sizes(problem: Problem, tap: Tap, some: Inputs, batch: int) -> _Sizes:
    count = num_examples(some)
    tap.forward(some)
    uses: dict[str, list[Tensor]] = {}
    of_layers: dict[str, int] = {}
    for use in tap.uses:
        uses.setdefault(use.layer, []).append(use.x)
        of_layers[use.layer] = of_layers.get(use.layer, 0) + use.z.numel() // count
    positions, tensors, factors = {}, dict[Block, list[tuple[int, int]]](), {}
    # The batch itself is not the fit's.
    of_batch = {x.untyped_storage().data_ptr() for x in tensors_of(some)}
    numbers: dict[int, int] = {}
    for block in problem.blocks:
        layer = tap.network.get_submodule(block.layer)
        positions[block] = max(1, of_layers.get(block.layer, 0) // _width(layer, block))
        if block.is_exact:
            continue
        tensors[block] = []
        for x in uses.get(block.layer, []):
            place = x.untyped_storage().data_ptr()
            if place not in of_batch:
                number = numbers.setdefault(place, len(numbers))
                tensors[block].append((number, x.numel() * x.element_size() // count))
        whole = [_of_batch(x, count, batch) for x in uses.get(block.layer, [])]
        factors[block] = most_numbers_of_input_factor(layer, block, whole)
    return _Sizes(tap.output_bytes(), positions, tensors, factors)


def _of_batch(x: Tensor, count: int, batch: int) -> Tensor:
    """A tensor of the size that `x` has for a whole batch, without memory behind it."""
    return torch.empty(len(x) * batch // count, *x.shape[1:], dtype=x.dtype, device="meta")


def _width(layer: Any, block: Block) -> int:
    """Numbers of a layer's output at one position."""
    if block.role == "depthwise":
        return block.num_groups
    return block.num_groups * block.shape[0]
