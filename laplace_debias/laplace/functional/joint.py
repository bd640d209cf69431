"""Covariances between the linearised network's outputs at different inputs."""

from collections.abc import Iterator
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layers.jacobians import joint_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.context import (
    OutputChoice,
    map_outputs,
    prediction_context,
)
from laplace_debias.laplace.functional.linearised import accumulator_class
from laplace_debias.laplace.functional.request import (
    CovarianceRequest,
    bytes_per_column,
    check_covariance,
    unit_columns,
)
from laplace_debias.laplace.state.fitted import FittedPosterior


def joint_moments(
    fitted: FittedPosterior,
    x: Inputs | Record,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    r"""Compute the exact mean and joint covariance of the linearised outputs for all inputs.

    $\mathrm{Cov}(f(x_n), f(x_m)) = J(x_n) P^{-1} J(x_m)^\top$ is computed for each block in its
    eigenbasis, as in `moments`. If the Jacobians of all inputs together exceed the memory bound,
    the inputs pass through the network in groups, such that every pair of inputs occurs together in
    some group.

    Returns:
        The outputs at the mean, `[B, ..., C]` (`[B, k]` if outputs are requested), and the
        covariance `[B, M, B, M]` for M outputs per example.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if two examples do
            not fit into the memory bound.
    """
    posterior = fitted.posterior
    blocks = fitted.parameters.blocks
    deltas = posterior.prior_precision.expand(len(blocks)).to(posterior.mean)
    with prediction_context(fitted, x, positions) as context:
        indices = None if outputs is None else context.output_indices(outputs)
        prepared = context.prepared
        tap = Tap(context.network, blocks) if prepared is None else prepared.tap
        # Measure on one example how much memory each example needs.
        gradient_bytes = tap.forward(take(context.x, slice(0, 1))).output_bytes
        all_outputs = map_outputs(context.network, context.x)
        mean = all_outputs.flatten(1)
        if indices is not None:
            mean = mean.gather(1, indices)
        batch, num_columns = mean.shape
        request = CovarianceRequest("covariance", indices, fitted.config.memory_bound)
        accumulator = accumulator_class(posterior)(
            blocks, posterior, deltas[None], diagonal=False, jacobians=joint_jacobians
        )
        column_bytes = max(
            bytes_per_column(gradient_bytes, blocks, mean.element_size()),
            accumulator.kept_row_bytes,
        )
        smallest_group = min(batch, 2)
        granted_bytes = request.granted_bytes(
            smallest_group * num_columns,
            column_bytes,
            mean.device,
            subject=f"a joint covariance of {smallest_group} example(s)",
            remedy=", or request fewer outputs",
        )
        covariance = mean.new_zeros(batch, num_columns, batch, num_columns)
        for group in _groups(batch, granted_bytes // column_bytes // num_columns):
            group = group.to(mean.device)
            forward_pass = tap.forward(take(context.x, group))
            group_outputs = forward_pass.outputs
            check_outputs(group_outputs)
            group_indices = None if indices is None else indices[group]
            vectors = unit_columns(group_outputs, group_indices)
            total = mean.new_zeros(1, 1, *[len(group) * num_columns] * 2)
            # The outputs of all examples in the group are treated as outputs of a single example,
            # so that the accumulator also computes covariances between examples.
            model_indices = context.model_indices(group_outputs, group_indices, group)
            columns = model_indices.expand(len(group), -1).reshape(1, -1)
            accumulator.add(total, forward_pass.backward(vectors), columns)
            by_example = total.view(*[len(group), num_columns] * 2)
            covariance[group[:, None], :, group] = by_example.permute(0, 2, 1, 3)
        check_covariance(covariance, deltas)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if indices is None:
        return context.by_position(all_outputs, None), covariance
    return context.by_position(mean, num_columns), covariance


def _groups(batch: int, size: int) -> Iterator[Int[Tensor, " group"]]:
    """Yield groups of at most `size` example indices, such that every pair occurs in a group."""
    if size >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(size // 2), 2):
        yield torch.cat(pair)
