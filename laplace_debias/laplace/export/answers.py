"""What an exported predictive answers: named tensors, from Gaussian or from sampled outputs."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.losses.likelihoods.base import probit
from laplace_debias.laplace.links import log_bridge

Answers = dict[str, Tensor]


def check_likelihood(likelihood: Likelihood) -> None:
    """Require a likelihood whose predictive is known here as operations on tensors.

    Raises:
        NotImplementedError: For any other.
    """
    if type(likelihood) not in (Bernoulli, Categorical, Gaussian, MultiLabel):
        raise NotImplementedError(
            f"The predictive of a {type(likelihood).__name__} cannot be exported: only those of "
            "'classification', 'binary', 'multilabel' and 'regression' can."
        )


def of_gaussian(
    likelihood: Likelihood, link: str, mean: Float[Tensor, "*batch outputs"], covariance: Tensor
) -> Answers:
    """The closed-form predictive of Gaussian outputs, as `Laplace.predict` gives it.

    Args:
        likelihood: One that `check_likelihood` lets pass.
        link: From logits to class probabilities.
        mean: `[B, ..., C]`.
        covariance: `[B, ..., C, C]`, or the variances alone where `links.variances_suffice`.
    """
    if isinstance(likelihood, Gaussian):
        return _regression(likelihood, mean, covariance)
    is_matrix = covariance.ndim > mean.ndim
    variance = covariance.diagonal(dim1=-2, dim2=-1) if is_matrix else covariance
    if link == "bridge":
        probs = log_bridge(mean, covariance).softmax(-1)
    else:
        probs = _probabilities(likelihood, probit(mean, variance))
    return {"logits": mean, "variance": variance, "probs": probs}


def of_samples(likelihood: Likelihood, samples: Float[Tensor, "samples *batch outputs"]) -> Answers:
    """The predictive averaged over samples of the outputs, as `Likelihood.mixture` has it."""
    mean = samples.mean(0)
    residuals = samples - mean
    if isinstance(likelihood, Gaussian):
        covariance = (residuals.unsqueeze(-1) * residuals.unsqueeze(-2)).mean(0)
        return _regression(likelihood, mean, covariance)
    probs = _probabilities(likelihood, samples).mean(0)
    return {"logits": mean, "variance": residuals.square().mean(0), "probs": probs}


def of_distribution(predictive: Distribution) -> Answers:
    """What a predictive says, by the names that an exported one uses; logits are not in it."""
    if isinstance(predictive, torch.distributions.MultivariateNormal):
        covariance = predictive.covariance_matrix
        return {"mean": predictive.mean, "covariance": covariance, "variance": predictive.variance}
    is_independent = isinstance(predictive, torch.distributions.Independent)
    return {"probs": predictive.mean if is_independent else predictive.probs}  # type: ignore[attr-defined]


def _regression(likelihood: Gaussian, mean: Tensor, covariance: Tensor) -> Answers:
    noise = likelihood.sigma.to(mean).square().expand(mean.shape[-1])
    total = (covariance + covariance.mT) / 2 + torch.diag(noise)
    variance = total.diagonal(dim1=-2, dim2=-1)
    return {"mean": mean, "variance": variance, "covariance": total}


def _probabilities(likelihood: Likelihood, logits: Tensor) -> Tensor:
    if isinstance(likelihood, Categorical):
        return logits.softmax(-1)
    # Of a single label the predictive has no dimension for the outputs.
    return logits[..., 0].sigmoid() if isinstance(likelihood, Bernoulli) else logits.sigmoid()
