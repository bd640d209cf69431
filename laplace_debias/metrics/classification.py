"""Metrics of predicted class probabilities: accuracy, NLL, Brier score and over-confidence.

All functions expect class indices `[n]` and probabilities `[n, classes]`, or `[n]` for class 1 of a
binary problem. They return a scalar tensor on the same device, or one value per example if
`reduction="none"`. Half-precision inputs are converted to float32.
"""

from typing import Literal

from jaxtyping import Float, Integer
from torch import Tensor, finfo
from torch.nn.functional import one_hot

from laplace_debias.metrics.calibration import confidence_and_right
from laplace_debias.metrics.checks import check_classification

Reduction = Literal["mean", "none"]


def accuracy(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Compute the fraction of examples whose most probable class is the label.

    If several classes are equally probable, the prediction is the one that `Tensor.argmax` returns.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        reduction: `"mean"`, or `"none"` for a 1 or 0 per example, `[n]`.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If `probs` are not probabilities, `labels` do not fit them, or `reduction` is
            unknown.
    """
    probs, labels = check_classification(probs, labels)
    return reduce_examples((probs.argmax(dim=1) == labels).to(probs.dtype), reduction)


def nll(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Compute the mean negative log-likelihood `-(1/n) Σ_n log p_n[y_n]`, in nats.

    A probability of zero is replaced by the smallest normal number of the dtype (`finfo.tiny`, 87.3
    nats in float32). Therefore, a single mistake with a confidence of 1 gives a large value instead
    of infinity. Arguments and errors are the same as for `accuracy`.
    """
    probs, labels = check_classification(probs, labels)
    likelihoods = probs.gather(1, labels[:, None])
    log_probs = likelihoods.clamp(min=finfo(probs.dtype).tiny).log()[:, 0]
    # Negate the mean instead of the terms. Negation does not round, and it would copy the terms to
    # a layout in which torch may add them in a different order.
    return -reduce_examples(log_probs, reduction)


def brier(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Compute the Brier score `(1/n) Σ_n Σ_c (p_n[c] - 1[c = y_n])²`.

    This is Brier's original definition, which lies between 0 and 2. The common definition for
    binary problems, the squared error for class 1 only, is half of it. Arguments and errors are the
    same as for `accuracy`.

    Reference:
        Brier. Verification of forecasts expressed in terms of probability. Monthly Weather Review,
        1950.
    """
    probs, labels = check_classification(probs, labels)
    return reduce_examples((probs - one_hot(labels, probs.shape[1])).square().sum(dim=1), reduction)


def overconfidence(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Compute the mean confidence minus the accuracy.

    The difference is `(1/n) Σ_n (max_c p_n[c] - 1[argmax_c p_n[c] = y_n])`. A positive value means
    that the network is over-confident. In a binary problem, the confidence is the probability of
    the more probable class. The result is float64. Arguments and errors are the same as for
    `accuracy`.
    """
    confidences, right = confidence_and_right(probs, labels)
    return reduce_examples(confidences - right, reduction)


def reduce_examples(values: Float[Tensor, "*n"], reduction: str) -> Float[Tensor, "..."]:
    """Return the mean of the values, or the values unchanged if `reduction` is `"none"`."""
    if reduction not in ("mean", "none"):
        raise ValueError(f'`reduction` is {reduction!r}. Use "mean" or "none".')
    return values.mean() if reduction == "mean" else values
