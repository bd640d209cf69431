"""From Gaussian outputs to class probabilities in closed form."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import Categorical, Likelihood

LINKS = ("probit", "bridge")


def check_link(link: str, likelihood: Likelihood) -> None:
    """Require a link that this likelihood has.

    Raises:
        ValueError: Otherwise.
    """
    if link not in LINKS:
        raise ValueError(f"Unknown link={link!r}: use one of {', '.join(LINKS)}.")
    if link == "bridge" and type(likelihood) is not Categorical:
        raise ValueError(
            'link="bridge" gives probabilities of classes, one of which applies '
            f'(likelihood="classification"), not of a {type(likelihood).__name__}: leave link out.'
        )


def variances_suffice(likelihood: Likelihood, link: str) -> bool:
    """Whether the predictive looks at the variances of the outputs alone."""
    return likelihood.variances_suffice and link == "probit"


def predictive(
    likelihood: Likelihood,
    link: str,
    mean: Float[Tensor, "*batch outputs"],
    covariance: Float[Tensor, "..."],
) -> Distribution:
    """p(y) for outputs N(mean, covariance).

    Args:
        likelihood: What the outputs mean.
        link: One that `check_link` lets pass.
        mean: `[B, ..., C]`.
        covariance: `[B, ..., C, C]`; its diagonal will do where `variances_suffice`.
    """
    if link == "probit":
        return likelihood.predictive(mean, covariance)
    return CategoricalDistribution(logits=log_bridge(mean, covariance))


def log_bridge(
    mean: Float[Tensor, "*batch classes"], covariance: Float[Tensor, "*batch classes classes"]
) -> Float[Tensor, "*batch classes"]:
    r"""Log α of the Dirichlet distribution that the Laplace bridge makes of Gaussian logits.

    $$\alpha_k = \frac1{\Sigma_{kk}}\Big(1 - \frac2C
    + \frac{e^{\mu_k}}{C^2}\sum_l e^{-\mu_l}\Big)$$

    of the logits given that they sum to zero, which a softmax does not see:
    $\mu - \Sigma 1\,1^\top\mu / 1^\top\Sigma 1$ and
    $\Sigma - \Sigma 1\,1^\top\Sigma / 1^\top\Sigma 1$. The Dirichlet's mean is the softmax of
    log α. Everything is computed on the scale of logarithms, so that no logit overflows. Logits
    without any variance count as logits of equal variances.

    Reference: Hobbhahn, Kristiadi & Hennig (2022), "Fast predictive uncertainty for classification
    with Bayesian deep networks".
    """
    num_classes = mean.shape[-1]
    limits = torch.finfo(mean.dtype)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    # Logits that sum to a constant already have no variance along the ones. What is left of it is
    # rounding, and their mean alone is moved.
    varies = total > num_classes**2 * limits.eps * variances.sum(-1, keepdim=True)
    divisor = torch.where(varies, total, 1.0)
    along = torch.where(varies, rows / divisor, 1 / num_classes)
    taken = torch.where(varies, rows.square() / divisor, 0.0)
    mu = mean - along * mean.sum(-1, keepdim=True)
    # A variance that the condition leaves nothing of is not zero, but unknown below the rounding.
    floor = (limits.eps * variances).clamp_min(limits.tiny)
    sigma = torch.maximum(variances - taken, floor)
    spread = mu + torch.logsumexp(-mu, -1, keepdim=True) - 2 * math.log(num_classes)
    if num_classes > 2:
        spread = torch.logaddexp(spread, torch.full_like(spread, math.log(1 - 2 / num_classes)))
    return spread - sigma.log()
