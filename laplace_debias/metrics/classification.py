"""How good predicted class probabilities are: accuracy, NLL, ECE, Brier score.

Every function takes probabilities `[n, classes]`, or `[n]` probabilities of class 1 of a binary
problem, and class indices `[n]`; it returns a scalar tensor on their device, or with
`reduction="none"` the value of each example. Half precision is computed in float32.
"""

from typing import Literal

from jaxtyping import Float, Integer
from torch import Tensor, finfo
from torch.nn.functional import one_hot

from laplace_debias.metrics.checks import check_classification

Reduction = Literal["mean", "none"]


def accuracy(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Fraction of examples whose most probable class is the label.

    Of several most probable classes, the one that `Tensor.argmax` returns counts.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        reduction: `"mean"`, or `"none"` for 1 or 0 of each example, `[n]`.

    Returns:
        The accuracy, in [0, 1].

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, `labels` do not fit them, or `reduction` is
            unknown.
    """
    probs, labels = check_classification(probs, labels)
    return reduced((probs.argmax(dim=1) == labels).to(probs.dtype), reduction)


def nll(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Mean negative log-likelihood `-(1/n) Σ_n log p_n[y_n]`, in nats.

    A probability of zero counts as the smallest normal number of the dtype (`finfo.tiny`, 87.3 nats
    in float32), so that one certain mistake gives a large value, not infinity.

    Arguments and errors are those of `accuracy`.

    Returns:
        The mean NLL per example, at least 0, in nats.
    """
    probs, labels = check_classification(probs, labels)
    likelihoods = probs.gather(1, labels[:, None])
    log_probs = likelihoods.clamp(min=finfo(probs.dtype).tiny).log()[:, 0]
    # The mean first: negation does not round, and the terms' order in memory stays.
    return -reduced(log_probs, reduction)


def ece(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"], num_bins: int = 15
) -> Float[Tensor, ""]:
    """Expected calibration error of the most probable class, `Σ_b (n_b/n) |acc_b - conf_b|`.

    The bins are `num_bins` equal intervals `[lower, upper)` of the confidence. The value is that of
    torchmetrics' `MulticlassCalibrationError`: a confidence that float32 rounds to 1 has a bin of
    its own, and sums are in float32 whatever the dtype.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1, whose confidence is that of the
            more probable of the two classes.
        labels: Class indices `[n]`.
        num_bins: Number of bins.

    Returns:
        The expected calibration error, in [0, 1].

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, `labels` do not fit them, or `num_bins` < 1.

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining well calibrated probabilities using Bayesian binning.
        AAAI, 2015. Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML,
        2017, equation 3.
    """
    # torchmetrics takes seconds to import: only what uses it waits for it.
    from torchmetrics.functional.classification import multiclass_calibration_error

    check_num_bins(num_bins)
    probs, labels = check_classification(probs, labels)
    error = multiclass_calibration_error(
        probs, labels, probs.shape[1], n_bins=num_bins, norm="l1", validate_args=False
    )
    return error.to(probs.dtype)


def brier(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Brier score `(1/n) Σ_n Σ_c (p_n[c] - 1[c = y_n])²`, summed over the classes.

    This is Brier's own definition, between 0 and 2; the common binary one, the square of class 1's
    error alone, is half of it.

    Arguments and errors are those of `accuracy`.

    Returns:
        The Brier score, in [0, 2].

    Reference:
        Brier. Verification of forecasts expressed in terms of probability. Monthly Weather Review,
        1950.
    """
    probs, labels = check_classification(probs, labels)
    return reduced((probs - one_hot(labels, probs.shape[1])).square().sum(dim=1), reduction)


def reduced(values: Float[Tensor, "*n"], reduction: str) -> Float[Tensor, "..."]:
    """The mean of the examples' values, or the values as they are.

    Args:
        values: `[n]`, or of another shape.
        reduction: `"mean"` or `"none"`.

    Raises:
        ValueError: `reduction` is neither.
    """
    if reduction not in ("mean", "none"):
        raise ValueError(f"`reduction` is {reduction!r}; expected 'mean' or 'none'.")
    return values.mean() if reduction == "mean" else values


def check_num_bins(num_bins: int) -> None:
    """Checks a number of confidence bins.

    Args:
        num_bins: Number of bins.

    Raises:
        ValueError: `num_bins` is below 1.
    """
    if num_bins < 1:
        raise ValueError(f"`num_bins` is {num_bins}; expected at least 1, for example 15.")
