"""Working memory of a chunk of a pass over data, found by running one and two examples."""

from dataclasses import dataclass
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
        kept: Bytes of the layers' inputs that are kept of a batch for A.
        largest: Bytes of the largest block's output gradients, of which it may make a copy.
        positions: T of every block.
    """

    examples: int
    columns: int
    at_once: int
    output_gradients: int
    activations: int
    chunk: int
    kept: int
    largest: int
    positions: dict[Block, int]


def working_memory(
    problem: Problem, x: Inputs, *, additive: bool, extra_bytes: int = 0
) -> Working:
    """The working memory of a pass over batches like a given one.

    Args:
        problem: The network and its blocks.
        x: The inputs of one batch.
        additive: As `sweep` takes it.
        extra_bytes: As `sweep` takes it.

    Raises:
        ValueError: As `sweep`, if one cotangent of one example does not fit.
    """
    pace = pace_of(problem, x, additive, extra_bytes)
    batch = num_examples(x)
    examples = min(batch, pace.examples)
    one = _of(problem, x, 1, pace.columns)
    two = _of(problem, x, min(2, batch), pace.columns)
    slopes = [b - a for a, b in zip(one.bytes, two.bytes, strict=True)]
    if batch == 1:
        slopes = [0] * len(slopes)
    # Linear in the examples, with what all have in common.
    peak, activations = (
        a + (examples - 1) * max(0, s) for a, s in zip(one.bytes, slopes, strict=True)
    )
    return Working(
        examples,
        one.columns,
        pace.columns,
        examples * pace.columns * one.output_bytes,
        activations,
        peak,
        min(batch * one.input_bytes, MOST_KEPT + examples * one.input_bytes),
        examples * pace.columns * one.largest,
        one.positions,
    )


@dataclass(frozen=True)
class _Run:
    bytes: tuple[int, int]
    columns: int
    output_bytes: int
    input_bytes: int
    largest: int
    positions: dict[Block, int]


def _of(problem: Problem, x: Inputs, count: int, at_once: int) -> _Run:
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
        columns = problem.cotangents.num_columns(outputs)
        cotangents = outputs.new_zeros(min(at_once, columns), *outputs.shape)
        # Zeros: their values do not matter here.
        for _ in tap.backward(outputs, cotangents):
            pass
    return _Run((memory.peak, activations), columns, *found)


def _sizes(problem: Problem, tap: Tap, count: int) -> tuple[int, int, int, dict[Block, int]]:
    """Bytes of outputs, of the inputs that A needs and of the largest output; T of every block."""
    weights = {block.layer for block in problem.blocks if not block.is_exact}
    inputs, largest, of_layers = 0, 0, dict[str, int]()
    for use in tap.uses:
        size = use.z.numel() // count
        largest = max(largest, size * use.z.element_size())
        of_layers[use.layer] = of_layers.get(use.layer, 0) + size
        if use.layer in weights:
            inputs += _num_bytes(use.x) // count
    positions = {}
    for block in problem.blocks:
        layer = tap.network.get_submodule(block.layer)
        positions[block] = max(1, of_layers.get(block.layer, 0) // _width(layer, block))
    return tap.output_bytes(), inputs, largest, positions


def _width(layer: Any, block: Block) -> int:
    """Numbers of a layer's output at one position."""
    if block.role == "depthwise":
        return block.num_groups
    return block.num_groups * block.shape[0]


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
