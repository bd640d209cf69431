"""Covariances of the linearised network's outputs between inputs."""

from collections.abc import Iterator
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.jacobians import joint_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.functional.linearised import (
    OutputChoice,
    OutputRequest,
    asked_of,
    check_covariance,
    columns_at_once,
    map_outputs,
    unit_columns,
)
from laplace_debias.laplace.state import FittedPosterior


def joint_moments(
    fitted: FittedPosterior,
    x: Inputs | Record,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    r"""Mean and joint covariance of the linearised network's outputs for all inputs, exact.

    $\mathrm{Cov}(f(x_n), f(x_m)) = J(x_n) P^{-1} J(x_m)^\top$, block by block in its eigenbasis as
    `moments` has it. Inputs whose Jacobians do not fit into the memory bound together
    are taken in groups, every two of which go through the network together.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`), and the covariance
        `[B, M, B, M]` for M outputs per example.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if two examples do
            not fit into the memory bound.
    """
    posterior, known = fitted.posterior, fitted.parameters
    deltas = posterior.prior_precision.expand(len(known.block_names)).to(posterior.mean)
    with asked_of(fitted, x, positions) as asked:
        chosen = None if outputs is None else asked.chosen(outputs)
        tap, inputs = Tap(asked.network, known.blocks), asked.x
        # One example tells how much memory each takes.
        tap.forward(take(inputs, slice(0, 1)))
        in_bytes = tap.output_bytes
        tap.forget()
        of_all = map_outputs(asked.network, inputs)
        mean = of_all.flatten(1) if chosen is None else of_all.flatten(1).gather(1, chosen)
        batch, num_columns = mean.shape
        covariance = mean.new_zeros(batch, num_columns, batch, num_columns)
        accumulator = DenseMoments if DENSE_BLOCK in posterior.curvature.blocks else BlockMoments
        of_blocks = accumulator(known.blocks, posterior, deltas[None], False, joint_jacobians)
        least = min(batch, 2)
        what, remedy = f"a joint covariance of {least} example(s)", ", or ask for some outputs"
        request = OutputRequest(False, chosen, fitted.config.memory_bound)
        of_least = request, least * num_columns, in_bytes, known.blocks, mean, remedy, what
        for part in _groups(batch, columns_at_once(*of_least)[0] // num_columns):
            part = part.to(mean.device)
            of_part = tap.forward(take(inputs, part))
            check_outputs(of_part)
            columns = unit_columns(of_part, None if chosen is None else chosen[part])
            total = mean.new_zeros(1, 1, *[len(part) * num_columns] * 2)
            of_blocks.add(total, tap.backward(of_part, columns))
            by_example = total.view(*[len(part), num_columns] * 2)
            covariance[part[:, None], :, part] = by_example.permute(0, 2, 1, 3)
        check_covariance(covariance, deltas)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if chosen is None:
        return asked.shaped(of_all, None), covariance
    return asked.shaped(mean, num_columns), covariance


def _groups(batch: int, fitting: int) -> Iterator[Int[Tensor, " some"]]:
    """Numbers of examples that go together, so many at most, so that every two are in one group."""
    if fitting >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(fitting // 2), 2):
        yield torch.cat(pair)
