"""Working memory of a chunk of a pass over data, found by running one and two examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from laplace_debias.curvature.fits.kept_inputs import MOST_KEPT
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sweep import pace_of
from laplace_debias.curvature.fits.tracked import TrackedMemory
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take
from laplace_debias.curvature.network.shadow import shadow


@dataclass(frozen=True)
class Working:
    """What one chunk of a batch takes.

    Attributes:
        examples: Examples of a chunk.
        columns: Cotangents of an example, K, in all.
        at_once: Cotangents that go back at once.
        output_gradients: Bytes of the gradients at the layers' outputs.
        activations: Bytes that the forward pass leaves for the backward pass.
        chunk: Bytes at most while a chunk goes forward and back, these included.
        measured: Bytes that are held of it while its blocks are measured.
        kept: Bytes of the layers' inputs that are kept of a batch for A.
        kept_before: Those of the batch's other chunks.
        joined: Bytes of the largest copy of one layer's inputs, if a batch has several chunks.
        positions: T of every block.
        inputs: Bytes of the inputs of one example that A needs, by the layers' paths.
        batch: Examples of a batch.
    """

    examples: int
    columns: int
    at_once: int
    output_gradients: int
    activations: int
    chunk: int
    measured: int
    kept: int
    kept_before: int
    joined: int
    positions: dict[Block, int]
    inputs: dict[str, int]
    batch: int

    def of_group(self, blocks: Sequence[Block]) -> "Working":
        """The same, at most, where some of the blocks are measured alone."""
        weights = {block.layer for block in blocks if not block.is_exact}
        inputs = {layer: size for layer, size in self.inputs.items() if layer in weights}
        of_inputs: dict[str, Any] = _of_inputs(inputs, self.batch, self.examples)
        return replace(self, **of_inputs, inputs=inputs)


def _of_inputs(inputs: Mapping[str, int], batch: int, examples: int) -> dict[str, int]:
    """What is kept of the layers' inputs, as `Working` has it."""
    size = sum(inputs.values())
    return {
        "kept": min(batch * size, MOST_KEPT + examples * size),
        "kept_before": min((batch - examples) * size, MOST_KEPT),
        "joined": batch * max(inputs.values(), default=0) if batch > examples else 0,
    }


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
    one = _of(problem, x, y, 1, pace.columns)
    at_once = min(pace.columns, one.columns)
    two = _of(problem, x, y, min(2, batch), pace.columns)
    slopes = [b - a for a, b in zip(one.bytes, two.bytes, strict=True)]
    if batch == 1:
        slopes = [0] * len(slopes)
    # Linear in the examples, with what all have in common.
    peak, activations, measured = (
        a + (examples - 1) * max(0, s) for a, s in zip(one.bytes, slopes, strict=True)
    )
    return Working(
        examples,
        one.columns,
        at_once,
        examples * at_once * one.output_bytes,
        activations,
        peak,
        measured,
        **_of_inputs(one.inputs, batch, examples),
        positions=one.positions,
        inputs=one.inputs,
        batch=batch,
    )


@dataclass(frozen=True)
class _Run:
    bytes: tuple[int, int, int]
    columns: int
    output_bytes: int
    inputs: dict[str, int]
    positions: dict[Block, int]


def _of(problem: Problem, x: Inputs, y: Tensor, count: int, at_once: int) -> _Run:
    """A few examples, forward and back."""
    some = move(take(x, slice(0, count)), problem.device, None)
    network = shadow(problem.model)
    tap = Tap.on(network, problem.blocks)
    tap.forward(some)
    tap.forget()
    with TrackedMemory() as memory:
        outputs = tap.forward(some)
        activations = memory.live
        found = _sizes(problem, tap, count)
        cotangents, _ = problem.cotangents(outputs.detach(), y[:count], 0)
        columns = len(cotangents)
        held = None
        for _ in tap.backward(outputs, cotangents[:at_once], again=at_once < columns):
            held = memory.live if held is None else held
    return _Run((memory.peak, activations, held or 0), columns, *found)


def _sizes(problem: Problem, tap: Tap, count: int) -> tuple[int, dict[str, int], dict[Block, int]]:
    """Bytes of outputs, of the inputs that A needs by layer; T of every block."""
    weights = {block.layer for block in problem.blocks if not block.is_exact}
    inputs, of_layers = dict[str, int](), dict[str, int]()
    for use in tap.uses:
        size = use.z.numel() // count
        of_layers[use.layer] = of_layers.get(use.layer, 0) + size
        if use.layer in weights:
            inputs[use.layer] = inputs.get(use.layer, 0) + _num_bytes(use.x) // count
    positions = {}
    for block in problem.blocks:
        layer = tap.network.get_submodule(block.layer)
        positions[block] = max(1, of_layers.get(block.layer, 0) // _width(layer, block))
    return tap.output_bytes(), inputs, positions


def _width(layer: Any, block: Block) -> int:
    """Numbers of a layer's output at one position."""
    if block.role == "depthwise":
        return block.num_groups
    return block.num_groups * block.shape[0]


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
