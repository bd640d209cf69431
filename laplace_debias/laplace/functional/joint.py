"""Covariance of the linearised network's outputs between inputs, exact."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block, Site
from laplace_debias.curvature.layers.jacobians import joint_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.laplace.functional.blocks import BlockMoments, linear_blocks
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.functional.moments import (
    OutputRequest,
    bytes_of_a_column,
    check_covariance,
    unit_columns,
)
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker
from laplace_debias.operators.structures.eigen_kronecker import coordinates, frame
from laplace_debias.system.memory import MEMORY_BOUND, granted


def joint_moments(
    model: nn.Module,
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    x: Inputs,
    prior_precision: Float[Tensor, " blocks"],
    request: OutputRequest,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    r"""Mean and joint covariance of the linearised network's outputs for all inputs, exact.

    $\mathrm{Cov}(f(x_n), f(x_m)) = J(x_n) P^{-1} J(x_m)^\top$, block by block in its eigenbasis as
    `functional_moments` has it. Inputs whose Jacobians do not fit into the memory bound together
    are taken in groups, every two of which go through the network together.

    Args:
        model: The trained network.
        blocks: The posterior's blocks; those of the parameters where it has a single one.
        posterior: The posterior.
        x: Inputs, `[B, ...]`.
        prior_precision: δ of every block.
        request: Of which outputs, within which memory.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`), and the covariance
        `[B, M, B, M]` for M outputs per example.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if two examples do
            not fit into the memory bound.
    """
    network = shadow(model)
    tap = Tap.on(network, blocks)
    outputs = tap.forward(take(x, slice(0, 1)))
    check_outputs(outputs)
    shape, in_bytes = outputs.shape[1:], tap.output_bytes()
    num_columns = outputs.numel() if request.outputs is None else request.outputs.shape[1]
    # Directions in all parameters together mix the last layer with the others.
    is_dense = DENSE_BLOCK in posterior.curvature.blocks
    last = None if is_dense else tap.last_layer(outputs)
    linear: list[int] = []
    if last is not None:
        linear = linear_blocks(blocks, network.get_submodule(last.layer), last, outputs)
    path = last.layer if last is not None and linear else None

    batch, means, inputs = num_examples(x), [], []
    step = max(1, (request.memory_bound or MEMORY_BOUND) // in_bytes)
    for start in range(0, batch, step):
        outputs = tap.forward(take(x, slice(start, start + step)))
        check_outputs(outputs)
        means.append(outputs.detach().flatten(1))
        inputs += [use.x.detach() for use in tap.uses if use.layer == path]
    tap.forget()
    mean = torch.cat(means)
    covariance = mean.new_zeros(batch, num_columns, batch, num_columns)
    if len(linear) < len(blocks):
        accumulator = DenseMoments if is_dense else BlockMoments
        moments = accumulator(blocks, posterior, prior_precision[None], False, joint_jacobians)
        size = num_columns * bytes_of_a_column(in_bytes, blocks, mean)
        without = None if path is None else Site((path,))
        for part in _groups(batch, size, request.memory_bound):
            part = part.to(mean.device)
            of_part = _of_part(tap, blocks, moments, take(x, part), request, part, without)
            covariance[part[:, None], :, part] = of_part.permute(0, 2, 1, 3)
    for index in linear:
        _add_linear(
            covariance,
            blocks[index],
            torch.cat(inputs),
            posterior,
            prior_precision[index],
            request.outputs,
        )
    check_covariance(covariance, prior_precision)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if request.outputs is not None:
        return mean.gather(1, request.outputs), covariance
    return mean.unflatten(1, shape), covariance


def _groups(batch: int, size: int, memory_bound: int | None) -> Iterator[Int[Tensor, " some"]]:
    """Numbers of examples that go together, so that every two are in one group.

    Args:
        batch: How many there are.
        size: Bytes that one takes.
        memory_bound: Bytes that there are, as `granted` takes it.

    Raises:
        ValueError: If there is no room for two.
    """
    least = min(batch, 2)
    what = f"a joint covariance of {least} example(s)"
    fitting = granted(memory_bound, least * size, what, ", or ask for some outputs") // size
    if fitting >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(fitting // 2), 2):
        yield torch.cat(pair)


def _of_part(
    tap: Tap,
    blocks: Sequence[Block],
    moments: BlockMoments | DenseMoments,
    x: Inputs,
    request: OutputRequest,
    part: Int[Tensor, " some"],
    without: Site | None,
) -> Float[Tensor, "some m some m"]:
    """The joint covariance of some examples, without that of one layer."""
    outputs = tap.forward(x)
    check_outputs(outputs)
    columns = unit_columns(outputs, None if request.outputs is None else request.outputs[part])
    total = outputs.detach().new_zeros(1, 1, *[len(part) * len(columns)] * 2)
    moments.begin(total)
    for site, uses in tap.backward(outputs, columns, without=without):
        for index, block in enumerate(blocks):
            if block.site == site:
                moments.add(index, tap.module(site), uses)
    moments.end()
    return total.view(len(part), len(columns), len(part), len(columns))


def _add_linear(
    covariance: Float[Tensor, "batch m batch m"],
    block: Block,
    phi: Float[Tensor, "batch d_in"],
    posterior: GaussianPosterior,
    delta: Float[Tensor, ""],
    chosen: Int[Tensor, "batch k"] | None,
) -> None:
    r"""Add a block of the linear layer that gives the outputs, whose Jacobian is I ⊗ φᵀ.

    $U_G\,\mathrm{diag}\big(\sum_j (U_A^\top\phi_n)_j (U_A^\top\phi_m)_j / P_{ij}\big)_i\,U_G^\top$
    """
    operator = posterior.curvature.blocks[block.name]
    assert isinstance(operator, EigenKronecker)
    if block.is_exact:
        phi = phi.new_ones(len(phi), 1)
    if block.is_joint:
        phi = torch.nn.functional.pad(phi, (0, 1), value=1.0)
    variances = (posterior.data_weight * operator.in_frame + delta).reciprocal()
    rotated = coordinates(phi, operator.U_A)
    if operator.U_G is None:
        _add_axes(covariance, rotated, variances, chosen)
        return
    U_G = frame(operator.U_G)
    # Every example has the same rows [C, d_out], or a choice of its own [k, d_out].
    rows = U_G.expand(len(phi), -1, -1) if chosen is None else U_G[chosen]
    for row, own, into in zip(rotated, rows, covariance, strict=True):
        along = (row * rotated) @ variances.mT  # [B, d_out]
        into += ((own * along.unsqueeze(1)) @ rows.mT).movedim(0, 1)


def _add_axes(
    covariance: Float[Tensor, "batch m batch m"],
    rotated: Float[Tensor, "batch d_in"],
    variances: Float[Tensor, "d_out d_in"],
    chosen: Int[Tensor, "batch k"] | None,
) -> None:
    """As `_add_linear` where the output directions are the coordinate axes."""
    if chosen is None:
        everything = torch.arange(len(variances), device=rotated.device)
        chosen = everything.expand(len(rotated), -1)
    for row, own, into in zip(rotated, chosen, covariance, strict=True):
        along = (row * variances[own]) @ rotated.mT  # [k, B]
        into += along.unsqueeze(-1) * (own[:, None, None] == chosen)
