"""Fitting Kronecker-factored curvature: factors → directions → magnitudes → blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.fits.factors import gradient_factor, input_factor
from laplace_debias.curvature.fits.magnitudes import along, ekfac_magnitudes
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.positions import PositionFinder
from laplace_debias.curvature.layers.stream import Backend, Consume, HookStream, Measure
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Masks, Uses
from laplace_debias.curvature.layers.verify import check_jacobians, check_overridden
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.network.inputs import Inputs, call, take
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.operators import BlockDiagonal, EigenKronecker

Batches = Iterable[tuple[Inputs, Tensor]]
Sums = dict[Block, Tensor]
# From a layer, its block, its inputs (a part of the batch, a use), and which positions take part.
ConsumeInputs = Callable[
    [nn.Module, Block, Sequence[Sequence[Tensor]], Sequence[Masks | None]], None
]
# G and A of every block; a diagonal factor is a vector.
FactorSums = dict[Block, tuple[Tensor, Tensor]]
# Bytes of layers' inputs that are kept until A is computed from them.
_KEPT_INPUTS = 2**30
# A chunk's output gradients take this share of the memory bound: larger chunks are slower, as they
# leave the processor's cache.
_SHARE = 4


@dataclass(frozen=True)
class Problem:
    """What curvature is taken of, and how.

    Attributes:
        model: The trained network, left untouched.
        cotangents: Which cotangents at its outputs stand for the loss Hessian.
        blocks: The curvature blocks.
        backend: Where the blocks' inputs and output gradients come from.
        factor_dtype: In what factors are summed and decomposed.
        memory_bound: Bytes that one chunk's output gradients may take.
    """

    model: nn.Module
    cotangents: Cotangents
    blocks: Sequence[Block]
    backend: Backend
    factor_dtype: torch.dtype
    memory_bound: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Bayesian parameters."""
        return self.model.get_parameter(self.blocks[0].parameters[0]).dtype


@dataclass(frozen=True)
class Seen:
    """What a pass over data saw.

    Attributes:
        num_examples: How many examples.
        nll: Their summed loss; of a likelihood in nats.
    """

    num_examples: int
    nll: float


@dataclass(frozen=True)
class Fitted:
    """Curvature of the mean loss, and the data that it came from."""

    curvature: BlockDiagonal
    seen: Seen


def fit_kfac(problem: Problem, directions: Batches, magnitudes: Batches | None) -> Fitted:
    """K-FAC: directions from one set of batches, magnitudes from another (Eq. 9) or the same.

    The second factors are projected and freed one block at a time.

    Args:
        problem: The network and its blocks.
        directions: Batches `(x, y)` whose factors give the eigenbases.
        magnitudes: Batches that the curvature is measured on; None for the same.
    """
    sums, seen = factor_sums(problem, directions)
    bases = eigenbases(sums, seen.num_examples)
    if magnitudes is None:
        return Fitted(assemble(problem, bases, {b: bases[b].magnitudes for b in bases}), seen)

    along_G: Sums = {}
    along_A: Sums = {}

    def project_gradients(block: Block, G: Tensor) -> None:
        add_to(along_G, block, along(G.to(problem.factor_dtype), bases[block].U_G))

    def project_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        A = input_factor(layer, block, inputs, masks).to(problem.factor_dtype)
        add_to(along_A, block, along(A, bases[block].U_A))

    measured = sweep(
        problem,
        magnitudes,
        gradient_factor,
        project_gradients,
        project_inputs,
        seen.num_examples,
        additive=True,
    )
    check_finite_sums({block: [G] for block, G in along_G.items()})
    check_finite_sums({block: [A] for block, A in along_A.items()})
    table = {}
    for block, G in along_G.items():
        A = along_A[block] / measured.num_examples if block in along_A else G.new_ones(1)
        on_others = torch.outer(G / measured.num_examples, A)
        table[block] = bases[block].pooled(on_others, problem.dtype)
    return Fitted(assemble(problem, bases, table), together(seen, measured))


def fit_ekfac(problem: Problem, directions: Batches, magnitudes: Batches | None) -> Fitted:
    """EKFAC: K-FAC's directions, and the exact curvature along every one of them.

    Args:
        problem: The network and its blocks.
        directions: Batches `(x, y)` whose factors give the eigenbases.
        magnitudes: Batches that the curvature is measured on; None for the same, which are then
            gone through twice.
    """
    sums, seen = factor_sums(problem, directions)
    bases = eigenbases(sums, seen.num_examples)
    data, first = (directions, 0) if magnitudes is None else (magnitudes, seen.num_examples)
    table, measured = exact_sums(problem, bases, data, first)
    table = {
        block: bases[block].pooled(squares / measured.num_examples, problem.dtype)
        for block, squares in table.items()
    }
    everything = seen if magnitudes is None else together(seen, measured)
    return Fitted(assemble(problem, bases, table), everything)


def exact_sums(
    problem: Problem, bases: dict[Block, Eigenbasis], batches: Batches, first: int
) -> tuple[Sums, Seen]:
    """Exact curvature along every direction, summed over examples, `[d_out, d_in]` a block."""
    # Rotations are computed in the model's dtype: the squares that are summed do not cancel.
    dtype = problem.dtype
    rotations = {b: (_cast(of.U_G, dtype), _cast(of.U_A, dtype)) for b, of in bases.items()}
    sums: Sums = {}

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Tensor:
        return ekfac_magnitudes(layer, block, uses, *rotations[block])

    def collect(block: Block, squares: Tensor) -> None:
        add_to(sums, block, squares.to(problem.factor_dtype))

    seen = sweep(problem, batches, measure, collect, first=first)
    check_finite_sums({block: [squares] for block, squares in sums.items()})
    return sums, seen


def fit_diagonal(problem: Problem, directions: Batches, magnitudes: Batches | None) -> Fitted:
    """The exact diagonal of the curvature: EKFAC's magnitudes along the coordinate axes.

    Directions that no data chose are not biased by any: a debiased fit is that of its second
    batches alone, of which `directions` is not even read.

    Args:
        problem: The network and its blocks.
        directions: Batches `(x, y)`.
        magnitudes: Batches that the curvature is measured on; None for `directions`.
    """
    ones = {block: torch.ones(0) for block in problem.blocks}
    bases = {block: Eigenbasis(None, None, none, none) for block, none in ones.items()}
    table, seen = exact_sums(problem, bases, directions if magnitudes is None else magnitudes, 0)
    table = {block: squares / seen.num_examples for block, squares in table.items()}
    return Fitted(assemble(problem, bases, table), seen)


def _cast(directions: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if directions is None else directions.to(dtype)


FITS = {"kfac": fit_kfac, "ekfac": fit_ekfac, "diag": fit_diagonal}


def sweep(
    problem: Problem,
    batches: Batches,
    measure: Measure,
    consume: Consume,
    consume_inputs: ConsumeInputs | None = None,
    first: int = 0,
    *,
    additive: bool = False,
    extra_bytes: int = 0,
) -> Seen:
    """One pass over data: every batch's blocks are measured and handed over.

    A batch is pushed through the network in chunks, to keep the output gradients of all columns
    within the memory bound.

    Args:
        problem: The network and its blocks.
        batches: `(x, y)` pairs on the model's device.
        measure: What to compute of a block on a chunk of a batch.
        consume: Takes what was measured of a block.
        consume_inputs: If given, takes at the end of every batch (of a very large one also within)
            the layer of one weight block after the other, what went into it, chunk by chunk, and
            which positions take part. Then `measure` is told them too, where not all do.
        first: Position of the first example in all data of the fit: Monte-Carlo labels are keyed by
            it, so that different data get different labels.
        additive: Whether measuring one cotangent after the other costs no more than all at once.
        extra_bytes: What is made for every cotangent of an example besides its output gradients.

    Raises:
        ValueError: If there is no batch, or the network's outputs are not finite or not `[B, C]`,
            or targets do not fit.
    """
    network = shadow(problem.model)
    stream = problem.backend(network, problem.blocks)
    num_seen, nll, pace = 0, torch.zeros((), dtype=torch.float64), None
    inputs: dict[Block, list[tuple[list[Tensor], Masks | None]]] = {}
    masks: dict[str, Masks] = {}
    fresh: set[Block] = set()
    kept = 0

    def measure_and_keep(layer: nn.Module, block: Block, uses: Uses) -> Any:
        nonlocal kept
        if consume_inputs is not None and not block.is_vector and block in fresh:
            # Further cotangents of the same examples come with the same inputs.
            fresh.discard(block)
            used = [x for x, _ in uses]
            inputs.setdefault(block, []).append((used, masks.get(block.layer)))
            kept += sum(x.numel() * x.element_size() for x, _ in uses)
        if block.layer in masks:
            return measure(layer, block, uses, masks[block.layer])
        return measure(layer, block, uses)

    def hand_over_inputs(consume_inputs: ConsumeInputs) -> None:
        nonlocal kept
        while inputs:
            block, parts = inputs.popitem()
            consume_inputs(network.get_submodule(block.layer), block, *_joined(parts))
        kept = 0

    for all_x, all_y in batches:
        if pace is None:
            # Passes over further examples of the same fit need not look at the model again.
            pace = _pace(problem, all_x, additive, extra_bytes, is_first_pass=first == 0)
        for start in range(0, len(all_y), pace.examples):
            part = slice(start, start + pace.examples)
            x, y = take(all_x, part), all_y[part]

            def columns(outputs: Tensor, y: Tensor = y, key: int = first + num_seen) -> Tensor:
                nonlocal nll
                check_outputs(outputs)
                cotangents, value = problem.cotangents(outputs, y, key)
                nll = nll.to(outputs.device) + value
                return cotangents

            fresh.update(problem.blocks)
            if consume_inputs is not None:
                masks.clear()
                masks.update(pace.positions.find(x, y, first + num_seen))
            stream(x, columns, measure_and_keep, consume, pace.columns)
            num_seen += len(y)
            if consume_inputs is not None and kept > _KEPT_INPUTS:
                hand_over_inputs(consume_inputs)
        if consume_inputs is not None:
            hand_over_inputs(consume_inputs)
    if num_seen == 0:
        raise ValueError("The data holds no example: pass a loader with at least one batch.")
    return Seen(num_seen, nll.item())


def _joined(
    parts: list[tuple[list[Tensor], Masks | None]],
) -> tuple[list[list[Tensor]], list[Masks | None]]:
    """The parts of a batch in one, where they are alike."""
    inputs, masks = [part for part, _ in parts], [mask for _, mask in parts]
    is_masked = any(mask is not None for mask in masks)
    if is_masked or len({tuple(x.shape[1:] for x in part) for part in inputs}) > 1:
        return inputs, masks
    return [[torch.cat(uses) for uses in zip(*inputs, strict=True)]], [None]


def check_outputs(outputs: Any) -> None:
    """Require finite outputs of shape `[B, C]` or `[B, ..., C]`.

    Raises:
        ValueError: Otherwise.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim < 2:
        came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"The model must return outputs of shape [batch, outputs] or [batch, positions, "
            f"outputs], got {came}: wrap it in a module that flattens or selects them."
        )
    if not torch.isfinite(outputs).all():
        raise ValueError("The model's outputs hold NaN or Inf: check its inputs and parameters.")


@dataclass(frozen=True)
class _Pace:
    """How many examples and cotangents go through the network at once, and what finds padding."""

    examples: int
    columns: int
    positions: PositionFinder


def _pace(
    problem: Problem, x: Inputs, additive: bool, extra_bytes: int, is_first_pass: bool
) -> _Pace:
    """What fits into the memory bound, found by running one example.

    The first pass of a fit looks first whether the model is one whose curvature this is.

    Raises:
        ValueError: If one cotangent of one example does not fit; if the model is random, or its
            outputs depend on the rest of the batch.
        NotImplementedError: If a layer is not what its class says, or the outputs depend on its
            parameters in another way than through it.
    """
    one = take(x, slice(0, 1))
    network = shadow(problem.model)
    tap = Tap(network, list(dict.fromkeys(b.layer for b in problem.blocks)))
    outputs = tap.forward(one)
    check_outputs(outputs)
    if is_first_pass:
        check_overridden(network, problem.blocks, tap.uses)
        check_repeatable(problem.model, take(x, slice(0, 2)), outputs.detach())
        check_jacobians(network, problem.model, problem.blocks, one, tap, outputs)
    positions = PositionFinder(
        problem.model, problem.blocks, problem.cotangents, network, tap.uses, outputs
    )
    columns = problem.cotangents.num_columns(outputs)
    size = tap.output_bytes() + extra_bytes
    if size > problem.memory_bound:
        raise ValueError(
            f"memory_bound={problem.memory_bound} is too small: one cotangent of one example "
            f"takes {size} bytes; pass at least as many."
        )
    at_once = min(columns, problem.memory_bound // size)
    if additive and tap.one_by_one and problem.backend is HookStream:
        at_once = 1
    examples = problem.memory_bound // (_SHARE * at_once * size)
    return _Pace(max(1, examples), at_once, positions)


def check_repeatable(model: nn.Module, x: Inputs, outputs: Tensor) -> None:
    """Require a model to give the same outputs again, whatever else is in the batch.

    Args:
        model: The model.
        x: One example or more.
        outputs: What the first of them gave, alone.

    Raises:
        ValueError: If it draws random numbers that no module's mode tells of, or mixes the
            examples of a batch.
    """
    largest = float(outputs.abs().max())

    def differ(others: Tensor, rtol: float, atol: float) -> bool:
        same_shape = others.shape == outputs.shape
        return not same_shape or not torch.allclose(outputs, others, rtol, atol * largest)

    with torch.no_grad():
        together = call(shadow(model), x)[:1]
        if not differ(together, 1e-3, 1e-5):
            return
        again = call(shadow(model), take(x, slice(0, 1)))
    if differ(again, 1e-3, 1e-5):
        raise ValueError(
            "Two forward passes give different outputs: the model draws random numbers "
            "(`F.dropout` without `training=self.training`, noise, ...), and curvature is that of "
            "a function. Make its forward pass deterministic in eval mode."
        )
    # Other sizes of a batch have other roundings.
    tolerance = max(1e-2, 16 * torch.finfo(outputs.dtype).eps)
    if differ(together, tolerance, tolerance):
        raise ValueError(
            "An example's outputs are others alone than beside a second one: the model mixes the "
            "examples of a batch (statistics over the batch, attention along the wrong dimension, "
            "...), and curvature per example is not defined. Let every example have outputs of "
            "its own."
        )


def factor_sums(problem: Problem, batches: Batches, first: int = 0) -> tuple[FactorSums, Seen]:
    """Factors of every block, summed over the examples of all batches; `first` as in `sweep`."""
    sums: FactorSums = {}

    def add_gradients(block: Block, G: Tensor) -> None:
        G = G.to(problem.factor_dtype)
        if block not in sums:
            sums[block] = (torch.zeros_like(G), _no_input_factor(block, G))
        sums[block][0].add_(G)

    def add_inputs(
        layer: nn.Module,
        block: Block,
        inputs: Sequence[Sequence[Tensor]],
        masks: Sequence[Masks | None],
    ) -> None:
        sums[block][1].add_(input_factor(layer, block, inputs, masks))

    seen = sweep(problem, batches, gradient_factor, add_gradients, add_inputs, first, additive=True)
    check_finite_sums(sums)
    for block, (_, A) in sums.items():
        if block.is_vector:
            A.mul_(seen.num_examples)
    return sums, seen


def check_finite_sums(sums: Mapping[Block, Sequence[Tensor]]) -> None:
    """Require what was summed over the data to be finite, block by block.

    What is not finite in one batch is not in the sum either, so that the host waits for the device
    once, behind the last batch.

    Args:
        sums: Sums of each block.

    Raises:
        ValueError: Naming the first block where one holds NaN or Inf, and its layer.
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


def _no_input_factor(block: Block, like: Tensor) -> Tensor:
    """A before any data: zero, or for a vector what its exact block is multiplied with."""
    if block.is_vector:
        return like.new_ones(1, 1)
    d_in = block.shape[1]
    return like.new_zeros(d_in) if block.role == "table" else like.new_zeros(d_in, d_in)


def eigenbases(sums: FactorSums, num_examples: int) -> dict[Block, Eigenbasis]:
    """Eigenbases of the blocks' mean factors; `sums` is emptied block by block on the way."""
    bases = {}
    for block in list(sums):
        G, A = sums.pop(block)
        bases[block] = eigenbasis(G / num_examples, A / num_examples, block.name)
    return bases


def add_to(sums: Sums, block: Block, value: Tensor) -> None:
    """Add a value to a block's sum, which may not exist yet."""
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value


def together(first: Seen, second: Seen) -> Seen:
    """What two passes over different data saw."""
    return Seen(first.num_examples + second.num_examples, first.nll + second.nll)


def assemble(
    problem: Problem,
    bases: dict[Block, Eigenbasis],
    table: dict[Block, Float[Tensor, "d_out d_in"]],
) -> BlockDiagonal:
    """The curvature from directions and magnitudes, in the model's dtype; `bases` is emptied."""
    dtype = problem.dtype
    blocks = {}
    for block in problem.blocks:
        basis = bases.pop(block)
        blocks[block.name] = EigenKronecker(basis.U_G, basis.U_A, table[block]).to(dtype)
    return BlockDiagonal(blocks)
