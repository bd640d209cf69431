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
from laplace_debias.laplace.functional.accumulator import CovarianceAccumulator
from laplace_debias.laplace.functional.context import (
    OutputChoice,
    PredictionContext,
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
    with prediction_context(fitted, x, positions) as context:
        indices = None if outputs is None else context.output_indices(outputs)
        all_outputs = map_outputs(context.network, context.x)
        mean = all_outputs.flatten(1)
        if indices is not None:
            mean = mean.gather(1, indices)
        covariance = _covariance_in_groups(fitted, context, mean, indices)
    flat = covariance.flatten(2).flatten(0, 1)
    covariance = ((flat + flat.mT) / 2).view(covariance.shape)
    if indices is None:
        return context.by_position(all_outputs, None), covariance
    return context.by_position(mean, mean.shape[1]), covariance


def _covariance_in_groups(
    fitted: FittedPosterior,
    context: PredictionContext,
    mean: Float[Tensor, "batch m"],
    indices: Int[Tensor, "batch m"] | None,
) -> Float[Tensor, "batch m batch m"]:
    """Compute the joint covariance from groups of examples that fit into the memory bound.

    Args:
        fitted: The fit.
        context: The network and its inputs.
        mean: The requested outputs.
        indices: Indices of the requested outputs among all outputs of an example; None for all.
    """
    posterior = fitted.posterior
    blocks = fitted.parameters.blocks
    deltas = posterior.prior_precision.expand(len(blocks)).to(posterior.mean)
    tap = context.tap(blocks)
    accumulator = accumulator_class(posterior)(
        blocks, posterior, deltas[None], diagonal=False, jacobians=joint_jacobians
    )
    # Measure on one example how much memory each output needs.
    gradient_bytes = tap.forward(take(context.x, slice(0, 1))).output_bytes
    column_bytes = max(
        bytes_per_column(gradient_bytes, blocks, mean.element_size()),
        accumulator.kept_row_bytes,
    )
    batch, num_columns = mean.shape
    smallest_group = min(batch, 2)
    request = CovarianceRequest("covariance", indices, fitted.config.memory_bound)
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
        by_example = _covariance_of_group(context, tap, accumulator, group, indices)
        # Indexing with two tensors puts both dimensions of examples first.
        covariance[group[:, None], :, group] = by_example.permute(0, 2, 1, 3)
    check_covariance(covariance, deltas)
    return covariance


def _covariance_of_group(
    context: PredictionContext,
    tap: Tap,
    accumulator: CovarianceAccumulator,
    group: Int[Tensor, " group"],
    indices: Int[Tensor, "batch m"] | None,
) -> Float[Tensor, "group m group m"]:
    """Compute the joint covariance of a group of examples with one backward pass.

    The outputs of all examples are treated as the outputs of a single example, so that the
    accumulator also computes covariances between examples.
    """
    forward_pass = tap.forward(take(context.x, group))
    outputs = forward_pass.outputs
    check_outputs(outputs)
    group_indices = None if indices is None else indices[group]
    vectors = unit_columns(outputs, group_indices)
    model_indices = context.model_indices(outputs, group_indices, group)
    group_columns = model_indices.expand(len(group), -1).reshape(1, -1)
    num_columns = len(group) * len(vectors)
    total = outputs.new_zeros(1, 1, num_columns, num_columns)
    accumulator.add(total, forward_pass.backward(vectors), group_columns)
    return total.view(len(group), len(vectors), len(group), len(vectors))


def _groups(batch: int, size: int) -> Iterator[Int[Tensor, " group"]]:
    """Yield groups of at most `size` example indices, such that every pair occurs in a group."""
    if size >= batch:
        yield torch.arange(batch)
        return
    for pair in combinations(torch.arange(batch).split(size // 2), 2):
        yield torch.cat(pair)
