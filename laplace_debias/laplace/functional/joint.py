"""Covariance of the linearised network's outputs between inputs, exact."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import joint_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, call, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.functional.moments import (
    OutputRequest,
    check_covariance,
    columns_at_once,
    unit_columns,
)
from laplace_debias.laplace.posterior import GaussianPosterior


def joint_moments(
    network: nn.Module,
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

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`), and the covariance
        `[B, M, B, M]` for M outputs per example.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if two examples do
            not fit into the memory bound.
    """
    tap = Tap(network, blocks)
    # One example tells how much memory each takes.
    tap.forward(take(x, slice(0, 1)))
    in_bytes = tap.output_bytes()
    tap.forget()
    with torch.no_grad():
        outputs = call(network, x)
    check_outputs(outputs)
    mean, batch = outputs.flatten(1), num_examples(x)
    num_columns = mean.shape[1] if request.outputs is None else request.outputs.shape[1]
    covariance = mean.new_zeros(batch, num_columns, batch, num_columns)
    accumulator = DenseMoments if DENSE_BLOCK in posterior.curvature.blocks else BlockMoments
    moments = accumulator(blocks, posterior, prior_precision[None], False, joint_jacobians)
    least = min(batch, 2)
    what, remedy = f"a joint covariance of {least} example(s)", ", or ask for some outputs"
    of_least = request, least * num_columns, in_bytes, blocks, mean, remedy, what
    for part in _groups(batch, columns_at_once(*of_least)[0] // num_columns):
        part = part.to(mean.device)
        of_part = tap.forward(take(x, part))
        check_outputs(of_part)
        chosen = None if request.outputs is None else request.outputs[part]
        columns = unit_columns(of_part, chosen)
        total = mean.new_zeros(1, 1, *[len(part) * num_columns] * 2)
        moments.add(total, tap.backward(of_part, columns))
        by_example = total.view(*[len(part), num_columns] * 2)
        covariance[part[:, None], :, part] = by_example.permute(0, 2, 1, 3)
    check_covariance(covariance, prior_precision)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if request.outputs is not None:
        return mean.gather(1, request.outputs), covariance
    return outputs, covariance


def _groups(batch: int, fitting: int) -> Iterator[Int[Tensor, " some"]]:
    """Numbers of examples that go together, so many at most, so that every two are in one group."""
    if fitting >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(fitting // 2), 2):
        yield torch.cat(pair)
