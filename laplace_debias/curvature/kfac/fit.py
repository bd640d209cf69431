"""Fitting Kronecker-factored curvature: factors → directions → magnitudes → blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.columns import Fisher
from laplace_debias.curvature.kfac.factors import Factors, kronecker_factors
from laplace_debias.curvature.kfac.layers import Uses
from laplace_debias.curvature.kfac.magnitudes import (
    Eigenbasis,
    along,
    eigenbasis,
    ekfac_magnitudes,
)
from laplace_debias.curvature.kfac.stream import Consume, Measure, Stream
from laplace_debias.curvature.likelihood import Likelihood
from laplace_debias.curvature.shadow import shadow
from laplace_debias.operators import BlockDiagonal, EigenKronecker

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """What curvature is taken of, and how.

    Attributes:
        model: The trained network, left untouched.
        likelihood: What its outputs mean.
        blocks: The curvature blocks.
        stream: The backend.
        fisher: Which cotangents stand for the loss Hessian.
        factor_dtype: In what factors are summed and decomposed.
        memory_bound: Bytes that one chunk's output gradients may take.
    """

    model: nn.Module
    likelihood: Likelihood
    blocks: Sequence[Block]
    stream: Stream
    fisher: Fisher
    factor_dtype: torch.dtype
    memory_bound: int


@dataclass(frozen=True)
class Seen:
    """What a pass over data saw.

    Attributes:
        num_examples: How many examples.
        nll: Their summed negative log-likelihood, in nats.
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

    Args:
        problem: The network and its blocks.
        directions: Batches `(x, y)` whose factors give the eigenbases.
        magnitudes: Batches that the curvature is measured on; None for the same.
    """
    bases, seen = _eigenbases(problem, directions)
    if magnitudes is None:
        table = {block: torch.outer(b.along_G, b.along_A) for block, b in bases.items()}
        return Fitted(_assemble(problem, bases, table), seen)

    along_G: dict[Block, Tensor] = {}
    along_A: dict[Block, Tensor] = {}

    def project(block: Block, factors: Factors) -> None:
        basis, factors = bases[block], factors.to(problem.factor_dtype)
        _add(along_G, block, along(factors.G, basis.U_G))
        _add(along_A, block, along(factors.A, basis.U_A))

    measured = sweep(problem, magnitudes, kronecker_factors, project)
    scale = measured.num_examples**-2.0
    table = {block: scale * torch.outer(along_G[block], along_A[block]) for block in bases}
    return Fitted(_assemble(problem, bases, table), _together(seen, measured))


def fit_ekfac(problem: Problem, directions: Batches, magnitudes: Batches | None) -> Fitted:
    """EKFAC: K-FAC's directions, and the exact curvature along every one of them.

    Args:
        problem: The network and its blocks.
        directions: Batches `(x, y)` whose factors give the eigenbases.
        magnitudes: Batches that the curvature is measured on; None for the same, which are then
            gone through twice.
    """
    bases, seen = _eigenbases(problem, directions)
    # Rotations are computed in the model's dtype: the squares that are summed do not cancel.
    dtype = next(problem.model.parameters()).dtype
    rotations = {
        block: Eigenbasis(b.U_G.to(dtype), b.U_A.to(dtype), b.along_G, b.along_A)
        for block, b in bases.items()
    }

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Tensor:
        return ekfac_magnitudes(layer, block, uses, rotations[block])

    table: dict[Block, Tensor] = {}

    def collect(block: Block, squares: Tensor) -> None:
        _add(table, block, squares.to(problem.factor_dtype))

    measured = sweep(problem, directions if magnitudes is None else magnitudes, measure, collect)
    table = {block: squares / measured.num_examples for block, squares in table.items()}
    together = seen if magnitudes is None else _together(seen, measured)
    return Fitted(_assemble(problem, bases, table), together)


FITS = {"kfac": fit_kfac, "ekfac": fit_ekfac}


def sweep(problem: Problem, batches: Batches, measure: Measure, consume: Consume) -> Seen:
    """One pass over data: every batch's blocks are measured and handed over.

    Args:
        problem: The network and its blocks.
        batches: `(x, y)` pairs on the model's device.
        measure: What to compute of a block on a chunk of a batch.
        consume: Takes what was measured of a block.

    Raises:
        ValueError: If there is no batch, or the network's outputs are not finite or not `[B, C]`,
            or targets do not fit.
    """
    num_examples, nll, chunk = 0, torch.zeros((), dtype=torch.float64), 0
    for inputs, targets in batches:
        # Chunks of a batch keep the output gradients within the memory bound.
        chunk = chunk or max(1, problem.memory_bound // gradient_bytes(problem, inputs))
        for start in range(0, len(inputs), chunk):
            first = num_examples + start
            x, y = inputs[start : start + chunk], targets[start : start + chunk]

            def columns(outputs: Tensor, y: Tensor = y, first: int = first) -> Tensor:
                nonlocal nll
                check_outputs(outputs)
                problem.likelihood.check(outputs, y)
                nll = nll.to(outputs.device) + problem.likelihood.nll(outputs, y).double().sum()
                return problem.fisher.columns(problem.likelihood, outputs, y, first)

            problem.stream(shadow(problem.model), problem.blocks, x, columns, measure, consume)
        num_examples += inputs.shape[0]
    if num_examples == 0:
        raise ValueError("The data holds no example: pass a loader with at least one batch.")
    return Seen(num_examples, nll.item())


def check_outputs(outputs: Tensor) -> None:
    """Require finite outputs of shape `[B, C]`.

    Raises:
        ValueError: Otherwise.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"The model must return outputs of shape [batch, outputs], got {came}: wrap it in a "
            "module that flattens or selects them."
        )
    if not torch.isfinite(outputs).all():
        raise ValueError("The model's outputs hold NaN or Inf: check its inputs and parameters.")


def gradient_bytes(problem: Problem, inputs: Tensor) -> int:
    """Bytes that one example's output gradients take in all layers, for one column an output.

    Found by running the first example.
    """
    network = shadow(problem.model)
    sizes: list[int] = []
    for path in {block.layer for block in problem.blocks}:
        network.get_submodule(path).register_forward_hook(
            lambda _, __, output: sizes.append(output[0].numel() * output.element_size())
        )
    with torch.no_grad():
        outputs = network(inputs[:1])
    check_outputs(outputs)
    return max(1, sum(sizes) * outputs.shape[-1])


def _eigenbases(problem: Problem, batches: Batches) -> tuple[dict[Block, Eigenbasis], Seen]:
    sums: dict[Block, Factors] = {}

    def accumulate(block: Block, factors: Factors) -> None:
        _add(sums, block, factors.to(problem.factor_dtype))

    seen = sweep(problem, batches, kronecker_factors, accumulate)
    for block, factors in sums.items():
        if not (torch.isfinite(factors.G).all() and torch.isfinite(factors.A).all()):
            raise ValueError(
                f"The curvature of {block.name} holds NaN or Inf: its activations or gradients "
                "overflow; try the model in a wider dtype."
            )
    # A block's sums are freed as they become its eigenbasis.
    bases = {b: eigenbasis(sums.pop(b), seen.num_examples) for b in problem.blocks}
    return bases, seen


def _add(sums: dict, block: Block, value: Factors | Tensor) -> None:
    if block in sums:
        sums[block] += value
    else:
        sums[block] = value


def _together(first: Seen, second: Seen) -> Seen:
    return Seen(first.num_examples + second.num_examples, first.nll + second.nll)


def _assemble(
    problem: Problem,
    bases: dict[Block, Eigenbasis],
    table: dict[Block, Float[Tensor, "d_out d_in"]],
) -> BlockDiagonal:
    dtype = next(problem.model.parameters()).dtype
    blocks = {}
    for block in problem.blocks:
        basis = bases.pop(block)
        blocks[block.name] = EigenKronecker(basis.U_G, basis.U_A, table[block]).to(dtype)
    return BlockDiagonal(blocks)
