"""Moments and draws of a posterior's outputs, in the shapes of laplace-torch."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace.functional.gaussian_outputs import DenseOutputs
from laplace_debias.laplace.laplace import Laplace as Posterior
from laplace_debias.laplace.prediction.predictive import FitWithLink, PredictionMethod
from laplace_debias.laplace.state.posterior import standard_normal


def output_moments(
    posterior: Posterior, x: Inputs, *, joint: bool, diagonal_output: bool, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """Compute the mean and the covariance of the linearised network's outputs.

    Args:
        posterior: The posterior.
        x: Inputs, `[B, ...]`.
        joint: Whether to compute the covariance between all outputs of all inputs.
        diagonal_output: Whether to compute only variances; has no effect with `joint`.
        differentiable: Whether gradients flow back to the inputs.

    Returns:
        The mean `[B, C]` and the covariance `[B, C, C]` or the variances `[B, C]`; with `joint`,
        the mean `[B·C]` and the covariance `[B·C, B·C]`.
    """
    if joint:
        mean, covariance = posterior.functional(x, joint=True, differentiable=differentiable)
        return mean.flatten(), covariance.flatten(2).flatten(0, 1)
    if diagonal_output and differentiable:
        mean, covariance = posterior.functional(x, differentiable=True)
        return mean, covariance.diagonal(dim1=1, dim2=2)
    return posterior.functional(x, diagonal=diagonal_output, differentiable=differentiable)


def linearised_draws(
    posterior: Posterior,
    x: Inputs,
    n_samples: int,
    *,
    diagonal_output: bool,
    differentiable: bool,
    generator: torch.Generator | None,
) -> Float[Tensor, "samples batch *outputs"]:
    """Draw outputs of the linearised network.

    Args:
        posterior: The posterior.
        x: Inputs, `[B, ...]`.
        n_samples: The number of draws.
        diagonal_output: Whether to leave out covariances between outputs.
        differentiable: Whether gradients flow back to the inputs.
        generator: Seeds the draws.

    Raises:
        torch.linalg.LinAlgError: With `differentiable`, if the covariance of the outputs is
            singular for an input.
    """
    method = PredictionMethod("glm", n_samples, generator)
    if differentiable:
        return _differentiable_draws(posterior, x, n_samples, diagonal_output, generator)
    fit = FitWithLink(posterior.fitted, None)
    if not diagonal_output:
        return fit.draws(x, method)
    mean, variances = fit.mean_and_variances(x, method)
    outputs = DenseOutputs(mean, variances.flatten(1).diag_embed())
    return outputs.draws(n_samples, generator)


def _differentiable_draws(
    posterior: Posterior,
    x: Inputs,
    n_samples: int,
    diagonal_output: bool,
    generator: torch.Generator | None,
) -> Float[Tensor, "samples batch outputs"]:
    """Draw outputs of the linearised network, differentiable in the inputs."""
    mean, covariance = posterior.functional(x, differentiable=True)
    noise = standard_normal((n_samples, *mean.shape), mean, generator)
    if diagonal_output:
        return mean + noise * covariance.diagonal(dim1=1, dim2=2).sqrt()
    # Draws without gradients use a root from eigenvectors, but its derivatives do not exist where
    # eigenvalues are equal. The Cholesky root is always differentiable.
    root, info = torch.linalg.cholesky_ex(covariance)
    singular = info.nonzero().flatten().tolist()
    if singular:
        raise torch.linalg.LinAlgError(
            f"The covariance of the outputs is singular for input {singular[0]} "
            f"({len(singular)} of {len(covariance)} inputs), so draws have no derivatives with "
            "respect to the inputs. Pass `diagonal_output=True`, for which positive variances "
            "are enough, or draw within `torch.no_grad()` if you need no gradients."
        )
    return mean + torch.einsum("bij,sbj->sbi", root, noise)
