"""Linearised predictions of fitted states: moments of the outputs, over grids of δ."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.outputs import explaining_unbatched
from laplace_debias.laplace import links, predictive
from laplace_debias.laplace.asked import Asked, OutputChoice
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.moments import OutputRequest, functional_moments
from laplace_debias.laplace.functional.through_head import can_go_through, moments_through_head
from laplace_debias.laplace.sharded_calls import Share

# One δ per grid point, [P], or one for each block, [P, blocks].
Grid = Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | Sequence[float]


def predictives(
    fits: Sequence[Fitted],
    x: Inputs | Record,
    prior_precisions: Sequence[Grid],
    link: str = "probit",
    positions: Positions | None = None,
) -> list[list[Distribution]]:
    """The closed-form `"glm"` predictives of several fits of one model, in one pass.

    Args:
        fits: Fits of the same model and Bayesian parameters.
        x: Inputs | Record, `[B, ...]`.
        prior_precisions: A grid for each of them, all of one length.
        link: From Gaussian logits to class probabilities, as `Laplace.predict` takes it.
        positions: Which positions, as `Laplace.predict` takes them.

    Returns:
        For each fit its predictives at the grid's points.

    Raises:
        ValueError: If a grid is empty; as `moments` and `check_link`.
    """
    for fitted in fits:
        links.check_link(link, fitted.likelihood)
    variances_suffice = all(links.variances_suffice(fitted.likelihood, link) for fitted in fits)
    grids = [torch.as_tensor(grid, dtype=torch.float64) for grid in prior_precisions]
    if any(grid.ndim == 0 or len(grid) == 0 for grid in grids):
        raise ValueError("The grid holds no prior precision: pass at least one, [δ].")
    mean, covariances = moments(fits, x, grids, variances_suffice, positions=positions)
    if mean.ndim > 2 and not variances_suffice:
        covariances = predictive.within_positions(covariances, mean.shape)
    return [
        [links.predictive(fitted.likelihood, link, mean, covariance) for covariance in of_grid]
        for fitted, of_grid in zip(fits, covariances, strict=True)
    ]


def moments(
    fits: Sequence[Fitted],
    x: Inputs | Record,
    prior_precisions: Sequence[Tensor],
    diagonal: bool = False,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "fits grid batch *covariance"]]:
    """Mean and covariances of the linearised network's outputs, exact.

    Args:
        fits: Fits of the same model and Bayesian parameters.
        x: Inputs | Record, `[B, ...]`.
        prior_precisions: A grid for each of them, `[P]` or `[P, blocks]`.
        diagonal: Whether variances will do.
        outputs: Which outputs, as `Laplace.functional` takes them.
        positions: Which positions, as `Laplace.functional` takes them.

    Raises:
        ValueError: If the fits are not of one model; for a prior precision out of range; as
            `functional_moments`.
    """
    first = fits[0]
    if any(
        fitted.model is not first.model
        or fitted.parameters.blocks != first.parameters.blocks
        or fitted.settings.kind.is_dense != first.settings.kind.is_dense
        or fitted.settings.class_dim != first.settings.class_dim
        for fitted in fits
    ):
        raise ValueError(
            "The posteriors are of different models or Bayesian parameters: predict with each."
        )
    for fitted, grid in zip(fits, prior_precisions, strict=True):
        for point in grid:
            fitted.posterior.check_prior_precision(point)
    num_blocks = len(first.parameters.block_names)
    grids = [grid.reshape(len(grid), -1).expand(-1, num_blocks) for grid in prior_precisions]
    deltas = torch.stack(grids).to(first.posterior.mean)
    posteriors = [fitted.posterior for fitted in fits]
    share = Share.of(posteriors, first.parameters.blocks)
    with torch.inference_mode(False):
        x, network = first.moved(x), first.network
        with explaining_unbatched(network, x):
            asked = Asked.of(
                network,
                x,
                positions,
                lambda head: can_go_through(network, head, share.blocks, first.posterior),
            )
            chosen = asked.chosen(outputs)
            share.check_same(asked.x, [deltas, chosen], diagonal)
            arguments = (
                share.blocks,
                posteriors,
                asked.x,
                deltas[:, :, share.at],
                OutputRequest(diagonal, chosen, first.settings.memory_bound),
            )
            if asked.head is None:
                mean, covariances = functional_moments(asked.network, *arguments)
            else:
                mean, covariances = moments_through_head(asked.network, asked.head, *arguments)
            covariances = share.summed(covariances)
    num_chosen = None if chosen is None else chosen.shape[1]
    covariances = asked.shaped(covariances, num_chosen) if diagonal else covariances
    return asked.shaped(mean, num_chosen), covariances


def joint(
    fitted: Fitted,
    x: Inputs | Record,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch m batch m"]]:
    """Mean and covariance of the linearised network's outputs for all inputs together, exact.

    Args:
        fitted: A fit.
        x: Inputs | Record, `[B, ...]`.
        outputs: Which outputs, as `Laplace.functional` takes them.
        positions: Which positions, as `Laplace.functional` takes them.

    Raises:
        ValueError: As `joint_moments`.
    """
    posterior, num_blocks = fitted.posterior, len(fitted.parameters.block_names)
    share = Share.of([posterior], fitted.parameters.blocks)
    deltas = posterior.prior_precision.expand(num_blocks).to(posterior.mean)
    with torch.inference_mode(False):
        x, network = fitted.moved(x), fitted.network
        with explaining_unbatched(network, x):
            asked = Asked.of(network, x, positions, lambda _: False)
            chosen = asked.chosen(outputs)
            share.check_same(asked.x, [deltas, chosen], False)
            mean, covariance = joint_moments(
                asked.network,
                share.blocks,
                posterior,
                asked.x,
                deltas[share.at],
                OutputRequest(False, chosen, fitted.settings.memory_bound),
            )
            covariance = share.summed(covariance)
    return asked.shaped(mean, None if chosen is None else chosen.shape[1]), covariance
