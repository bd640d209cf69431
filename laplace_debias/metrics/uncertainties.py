"""How uncertain a predictive is, and how much of it is about the parameters.

Every score is higher where the predictive is more uncertain: it can tell out-of-distribution
examples, as `auroc` and the like take them.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, special

from laplace_debias.metrics.checks import check_probs


class Uncertainty(NamedTuple):
    """The uncertainty of each example and its two parts, `[n]` (or `[n, outputs]`).

    For class probabilities all three are in nats, for regression they are variances, in squared
    units of the targets.

    Attributes:
        total: Of the predictive: the entropy, or the variance.
        aleatoric: Uncertainty that would remain if the parameters were known.
        epistemic: The rest, which more training data would take away: the mutual information of
            label and parameters (BALD), or the variance of the mean.
    """

    total: Float[Tensor, "*n"]
    aleatoric: Float[Tensor, "*n"]
    epistemic: Float[Tensor, "*n"]


def uncertainty(probs: Float[Tensor, "samples n *classes"]) -> Uncertainty:
    """Takes the entropy of a mixture of S predictives apart, `H[E p] = E H[p] + I`.

    `total = H[(1/S) Σ_s p_s]`, `aleatoric = (1/S) Σ_s H[p_s]`, `epistemic = total - aleatoric`,
    which is never negative.

    Args:
        probs: Class probabilities of every sample of the parameters, `[S, n, classes]`, or `[S, n]`
            of class 1.

    Returns:
        The three, `[n]`, in nats.

    Raises:
        TypeError: `probs` is not a tensor.
        ValueError: `probs` has another rank or is empty, or holds no probabilities.

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
    if not isinstance(probs, Tensor):
        check_probs(probs)
    if probs.ndim not in (2, 3) or not len(probs):
        raise ValueError(
            f"`probs` has shape {list(probs.shape)}; expected [samples, n, classes], or "
            "[samples, n] probabilities of class 1, with at least one sample."
        )
    checked = check_probs(probs.flatten(0, 1)).unflatten(0, (len(probs), -1))
    total = special.entr(checked.mean(0)).sum(-1)
    aleatoric = special.entr(checked).sum(-1).mean(0)
    # Entropy is concave; only rounding makes a difference negative.
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp(min=0))


def max_probability(probs: Float[Tensor, "n *classes"]) -> Float[Tensor, " n"]:
    """One minus the probability of the most probable class: the score of maximum probability.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.

    Returns:
        Scores `[n]`, in [0, 1); higher is less certain.

    Raises:
        TypeError: `probs` is not a tensor.
        ValueError: `probs` are not probabilities.

    Reference:
        Hendrycks, Gimpel. A baseline for detecting misclassified and out-of-distribution examples
        in neural networks. ICLR, 2017.
    """
    return 1 - check_probs(probs).max(dim=1).values
