"""A Laplace approximation as a Gaussian process: moments of the outputs at several points."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.laplace import Laplace


def joint_moments(
    la: Laplace, X: Tensor, observation_noise: bool = False
) -> tuple[Float[Tensor, "*batch q outputs"], Float[Tensor, "*batch qm qm"]]:
    r"""Mean and covariance of the linearised network's outputs at q points, for each batch of them.

    Args:
        la: A fitted approximation of a network from `[B, d]` to `[B, C]`.
        X: Points `[..., q, d]`, in sets of q.
        observation_noise: Whether to add the noise σ² of a `Gaussian` likelihood.

    Returns:
        The mean `[..., q, C]` and the covariance `[..., q·C, q·C]`, point by point and in it output
        by output.

    Raises:
        ValueError: If X is not `[..., q, d]`, or for noise of a likelihood that has no σ; as
            `Laplace.functional`.
    """
    if X.ndim < 2:
        raise ValueError(f"Points must have shape [..., q, d], got {tuple(X.shape)}.")
    sets = X.detach().reshape(-1, *X.shape[-2:])
    if sets.shape[1] == 1:
        # One pass for all: sets of one point have no covariance between points.
        mean, covariance = la.functional(sets[:, 0])
        mean = mean.unsqueeze(1)
    else:
        moments = [la.functional(points, joint=True) for points in sets]
        mean = torch.stack([of_set for of_set, _ in moments])
        covariance = torch.stack([of_set.flatten(2).flatten(0, 1) for _, of_set in moments])
    if observation_noise:
        if not isinstance(la.likelihood, Gaussian):
            raise ValueError(
                f"observation_noise=True needs a Gaussian likelihood, which has a σ, got "
                f"{type(la.likelihood).__name__}."
            )
        variance = la.likelihood.sigma.square().to(mean).expand(mean.shape[-1])
        covariance = covariance + torch.diag(variance.repeat(sets.shape[1]))
    return (
        mean.unflatten(0, X.shape[:-2]) if X.ndim > 2 else mean[0],
        covariance.unflatten(0, X.shape[:-2]) if X.ndim > 2 else covariance[0],
    )
