"""Calibration errors over bins of the confidence: equal mass, the worst bin, class by class."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_classification
from laplace_debias.metrics.classification import check_num_bins


def ece_equal_mass(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"], num_bins: int = 15
) -> Float[Tensor, ""]:
    """Expected calibration error with as many examples in each bin, `Σ_b (n_b/n) |acc_b - conf_b|`.

    Examples are ranked by the probability of their most probable class. Equal confidences have
    their mean rank and share a bin, so that the order of the examples does not count.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        num_bins: Number of bins.

    Returns:
        The error, in [0, 1], float64.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, `labels` do not fit them, or `num_bins` < 1.

    Reference:
        Nixon, Dusenberry, Zhang, Jerfel, Tran. Measuring calibration in deep learning. CVPR
        workshops, 2019.
    """
    check_num_bins(num_bins)
    confidences, right = confidence_and_right(probs, labels)
    bins = equal_mass_bins(confidences, num_bins)
    sums = torch.zeros(num_bins, dtype=torch.float64, device=bins.device)
    return sums.index_add_(0, bins, right - confidences).abs().sum() / len(bins)


def mce(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"], num_bins: int = 15
) -> Float[Tensor, ""]:
    """Maximum calibration error, the largest `|acc_b - conf_b|` of the bins of `ece`.

    The value is that of torchmetrics' `MulticlassCalibrationError(norm="max")`. A bin with few
    examples often has the largest gap by chance.

    Arguments and errors are those of `ece`.

    Returns:
        The maximum calibration error, in [0, 1].

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining well calibrated probabilities using Bayesian binning.
        AAAI, 2015.
    """
    # torchmetrics takes seconds to import: only what uses it waits for it.
    from torchmetrics.functional.classification import multiclass_calibration_error

    check_num_bins(num_bins)
    probs, labels = check_classification(probs, labels)
    error = multiclass_calibration_error(
        probs, labels, probs.shape[1], n_bins=num_bins, norm="max", validate_args=False
    )
    return error.to(probs.dtype)


def classwise_ece(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"], num_bins: int = 15
) -> Float[Tensor, ""]:
    """Mean over the classes of `Σ_b (n_b/n) |freq_b - mean p_b|`, over all probabilities.

    Each class is a binary problem, with equal bins of its probability; a probability of 1 belongs
    to the last bin.

    Arguments and errors are those of `ece_equal_mass`.

    Returns:
        The error, in [0, 1], float64.

    Reference:
        Kull, Perello-Nieto, Kängsepp, Silva Filho, Song, Flach. Beyond temperature scaling:
        obtaining well-calibrated multi-class probabilities with Dirichlet calibration. NeurIPS,
        2019, equation 3.
    """
    check_num_bins(num_bins)
    probs, labels = check_classification(probs, labels)
    cells, gaps = classwise_cells(probs, labels, num_bins)
    sums = torch.zeros(probs.shape[1] * num_bins, dtype=torch.float64, device=probs.device)
    sums.index_add_(0, cells.flatten(), gaps.flatten())
    return sums.abs().sum() / probs.numel()


def confidence_and_right(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The probability of each example's most probable class, and 1 where that is its label.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.

    Returns:
        Both `[n]`, float64.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities or `labels` do not fit them.
    """
    probs, labels = check_classification(probs, labels)
    confidences, predictions = probs.double().max(dim=1)
    return confidences, (predictions == labels).double()


def equal_width_bins(confidences: Float[Tensor, "*n"], num_bins: int) -> Integer[Tensor, "*n"]:
    """Indices of equal intervals `[lower, upper)` of [0, 1]; 1 belongs to the last one."""
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidences.dtype, device=confidences.device)
    return torch.bucketize(confidences, edges, right=True).sub(1).clamp(0, num_bins - 1)


def equal_mass_bins(values: Float[Tensor, " n"], num_bins: int) -> Integer[Tensor, " n"]:
    """Indices of groups of equal size by rank; equal values, at their mean rank, share a group."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    # Whole numbers are exact: a quotient of two of them has torch's default dtype.
    twice_mean_ranks = 2 * counts.cumsum(0) - counts
    return (twice_mean_ranks * num_bins // (2 * len(values))).clamp(max=num_bins - 1)[index]


def classwise_cells(
    probs: Float[Tensor, "n classes"], labels: Integer[Tensor, " n"], num_bins: int
) -> tuple[Integer[Tensor, "n classes"], Float[Tensor, "n classes"]]:
    """Which of `classes · num_bins` cells each probability belongs to, and `1[c = y] - p_c`."""
    probs = probs.double()
    first = num_bins * torch.arange(probs.shape[1], device=probs.device)
    gaps = -probs
    gaps.scatter_add_(1, labels[:, None], torch.ones_like(probs[:, :1]))
    return equal_width_bins(probs, num_bins) + first, gaps
