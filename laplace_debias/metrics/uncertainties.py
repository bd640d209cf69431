"""The uncertainty of a predictive, and the part of it that is due to uncertain parameters.

Every score is higher if the predictive is more uncertain, so it can be used to detect
out-of-distribution examples, and can be passed to `auroc` and similar metrics.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn, special

from laplace_debias.metrics.calibration import error_probability
from laplace_debias.metrics.checks import check_probs, check_real, check_tensor
from laplace_debias.system.shown import one_line


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The total, aleatoric and epistemic uncertainty of each example.

    For class probabilities, the three tensors are entropies in nats, `[n]`. For a regression, they
    are variances in squared units of the targets, `[n]` or `[n, outputs]`. The object can be
    unpacked into the three tensors.

    Attributes:
        total: The entropy of the predictive, or its variance.
        aleatoric: The uncertainty that would remain if the parameters were known.
        epistemic: The remaining uncertainty, which more training data would reduce: the mutual
            information of label and parameters (BALD), or the variance of the mean.
        scores: For class probabilities, the available scores `[n]` by name, each of which is higher
            if the predictive is less certain: `entropy`, `max_probability`, `mutual_information`,
            `variance`, `instability`, `energy` and `max_logit`.
    """

    total: Float[Tensor, "*n"]
    aleatoric: Float[Tensor, "*n"]
    epistemic: Float[Tensor, "*n"]
    scores: Mapping[str, Float[Tensor, "..."]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Float[Tensor, "*n"]]:
        return iter((self.total, self.aleatoric, self.epistemic))

    def __repr__(self) -> str:
        return one_line(self)


def uncertainty(probs: Float[Tensor, "samples n *classes"]) -> Uncertainty:
    """Split the entropy of a mixture into aleatoric and epistemic uncertainty.

    `total = H[(1/S) Σ_s p_s]`, `aleatoric = (1/S) Σ_s H[p_s]`, `epistemic = total - aleatoric`,
    which is never negative.

    Args:
        probs: Class probabilities under each of S samples of the parameters, `[S, n, classes]`, or
            `[S, n]` of class 1.

    Raises:
        TypeError: If `probs` is not a tensor.
        ValueError: If `probs` has the wrong number of dimensions, is empty, or does not contain
            probabilities.

    Reference:
        Houlsby, Huszár, Ghahramani, Lengyel. Bayesian active learning for classification and
        preference learning. 2011, equation 2.

    Example:
        >>> import torch
        >>> agree = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]])
        >>> differ = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> uncertainty(agree).epistemic.item(), round(uncertainty(differ).epistemic.item(), 4)
        (0.0, 0.6931)
    """
    check_tensor(probs, "probs")
    if probs.ndim not in (2, 3) or not len(probs):
        raise ValueError(
            f"`probs` has shape {list(probs.shape)}. Pass [samples, n, classes], or [samples, n] "
            "for probabilities of class 1, with at least one sample."
        )
    checked = check_probs(probs.flatten(0, 1)).unflatten(0, (len(probs), -1))
    total = special.entr(checked.mean(0)).sum(-1)
    aleatoric = special.entr(checked).sum(-1).mean(0)
    # Entropy is concave, so the difference can be negative only by rounding errors.
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp(min=0))


def max_probability(probs: Float[Tensor, "n *classes"]) -> Float[Tensor, " n"]:
    """Compute one minus the probability of the most probable class.

    Near 0, it is computed as the sum of the other classes' probabilities, so that confident
    predictions keep their order in float32. Argument and errors are the same as for `entropy`.

    Reference:
        Hendrycks, Gimpel. A baseline for detecting misclassified and out-of-distribution examples
        in neural networks. ICLR, 2017.
    """
    probs = check_probs(probs)
    return error_probability(probs).to(probs.dtype)


def energy(logits: Float[Tensor, "*n classes"]) -> Float[Tensor, "*n"]:
    """Compute the free energy `-log Σ_c exp f_c`, which is high if no logit is large.

    Args:
        logits: The network's logits, `[..., C]`.

    Raises:
        TypeError: If `logits` is not a tensor.
        ValueError: If `logits` is empty or not finite.

    Reference:
        Liu, Wang, Owens, Li. Energy-based out-of-distribution detection. NeurIPS, 2020.
    """
    check_real({"logits": logits})
    return -logits.logsumexp(-1)


def max_logit(logits: Float[Tensor, "*n classes"]) -> Float[Tensor, "*n"]:
    """Compute the negative of the largest logit of each example.

    Arguments and errors are the same as for `energy`.

    Reference:
        Hendrycks et al. Scaling out-of-distribution detection for real-world settings. ICML, 2022.
    """
    check_real({"logits": logits})
    return -logits.amax(-1)


def logit_variance(covariance: Float[Tensor, "*n classes classes"]) -> Float[Tensor, "*n"]:
    """Compute the mean variance of the logits, after removing their common shift.

    The result is `(tr Σ - 1ᵀΣ1 / C) / C`. The variance of a shift that all logits share is
    excluded, because adding a constant to all logits does not change the probabilities.

    Args:
        covariance: The logits' covariance, `[..., C, C]`.

    Raises:
        TypeError: If `covariance` is not a tensor.
        ValueError: If `covariance` is empty, not finite or not square.
    """
    check_real({"covariance": covariance})
    _check_covariance(covariance, (*covariance.shape[:-2], *2 * covariance.shape[-1:]))
    # Use float64, because the subtraction of a large common part would cancel digits in float32.
    sigma = covariance.double()
    mean_variance = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)
    return (mean_variance - sigma.mean((-2, -1))).clamp(min=0).to(covariance.dtype)


def instability(
    mean: Float[Tensor, "*n classes"], covariance: Float[Tensor, "*n classes classes"]
) -> Float[Tensor, "*n"]:
    """Compute the log-probability that the runner-up outranks the predicted class.

    The result is `log Φ(-m / s)`, where m is the margin between the two largest mean logits and s
    is its standard deviation. It is at most `log ½`. On the logarithmic scale, even very certain
    decisions can be distinguished.

    Args:
        mean: Mean logits, `[..., C]`, of at least two classes.
        covariance: The logits' covariance, `[..., C, C]`.

    Returns:
        `[...]`, in nats; minus infinity where the margin has no variance.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, shapes do not match, or there is only one
            class.

    Example:
        >>> import torch
        >>> mean, covariance = torch.tensor([[1.0, 0.0]]), torch.eye(2)[None]
        >>> round(instability(mean, covariance).exp().item(), 4)  # Φ(-1 / √2)
        0.2398
    """
    for name, values in (("mean", mean), ("covariance", covariance)):
        check_real({name: values})
    _check_covariance(covariance, (*mean.shape, *mean.shape[-1:]))
    if mean.shape[-1] < 2:
        raise ValueError(
            f"`mean` has shape {list(mean.shape)}. Pass a mean for each class, with "
            "at least two classes."
        )
    means = mean.unsqueeze(0)
    variances = difference_variances(covariance, *leading_classes(means))
    return margin_instability(means, variances.unsqueeze(0))


def difference_variances(
    covariance: Float[Tensor, "*n classes classes"],
    first: Int[Tensor, "*n"],
    second: Int[Tensor, "*n"],
) -> Float[Tensor, "*n"]:
    """Compute the variance of the difference between the logits of two classes, in float64.

    Args:
        covariance: The logits' covariance, `[..., C, C]`.
        first: One class for each example.
        second: A second class for each example.
    """
    one_hot = nn.functional.one_hot(torch.stack([first, second]), covariance.shape[-1]).double()
    difference = one_hot[0] - one_hot[1]
    return torch.einsum("...i,...ij,...j->...", difference, covariance.double(), difference)


def leading_classes(
    means: Float[Tensor, "members *n classes"],
) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
    """Return the predicted class and the runner-up according to a mixture's mean logits."""
    first, second = means.mean(0).topk(2).indices.unbind(-1)
    return first, second


def margin_instability(
    means: Float[Tensor, "members *n classes"], variances: Float[Tensor, "members *n"]
) -> Float[Tensor, "*n"]:
    """Compute the `instability` of a mixture of M equally weighted Gaussians.

    The mean logits of the mixture determine the predicted class and the runner-up. The probability
    is the mean over the members: `log (1/M) Σ_m Φ(-m_m / s_m)`.

    Args:
        means: Mean logits of each member.
        variances: Variance of the difference of the two leading classes' logits, of each member.
    """
    indices = torch.stack(leading_classes(means), -1).expand(*means.shape[:-1], 2)
    leading_means = means.double().gather(-1, indices)
    margins = leading_means[..., 0] - leading_means[..., 1]
    # A margin of zero is a tie, even if its variance is zero.
    ratios = torch.where(margins != 0, -margins / variances.clamp(min=0).sqrt(), 0)
    log_probs = special.log_ndtr(ratios)
    return (log_probs.logsumexp(0) - math.log(len(means))).to(means.dtype)


def _check_covariance(covariance: Tensor, shape: tuple[int, ...]) -> None:
    if covariance.shape != shape:
        raise ValueError(
            f"`covariance` has shape {list(covariance.shape)}. Pass a tensor of shape "
            f"{list(shape)}."
        )
