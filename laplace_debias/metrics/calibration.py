"""Calibration errors and reliability curves, which compare confidence with accuracy.

All functions expect class indices `[n]` and probabilities `[n, classes]`, or `[n]` for class 1 of a
binary problem. In a binary problem, the confidence is the probability of the more probable class.
The functions raise a TypeError if an argument is not a tensor, and a ValueError if the arguments
are not probabilities and labels of matching shapes.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_classification
from laplace_debias.system.checks import whole

Probs = Float[Tensor, "n *classes"]
Labels = Integer[Tensor, " n"]

_STEPS = 24
"""Number of bisection steps. They determine the bandwidth of the smooth error to within 2⁻²⁴."""

_NEAR_ONE = 0.999
"""Above this confidence, the error probability is the sum of the other classes' probabilities."""


def ece(probs: Probs, labels: Labels, num_bins: int = 15) -> Float[Tensor, ""]:
    """Compute the expected calibration error (ECE), `Σ_b (n_b/n) |acc_b - conf_b|`.

    The range of the confidence is divided into `num_bins` equal bins `[lower, upper)`; the last bin
    includes a confidence of 1. (torchmetrics' `MulticlassCalibrationError` puts a confidence of 1
    into a separate bin; otherwise, the two functions agree.) Sums are computed in float64.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        num_bins: Number of bins.

    Raises:
        ValueError: If `num_bins` < 1.

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining well calibrated probabilities using Bayesian binning.
        AAAI, 2015. Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML,
        2017, equation 3.
    """
    fractions, gaps = _bin_gaps(probs, labels, num_bins)
    return (fractions * gaps).sum()


def mce(probs: Probs, labels: Labels, num_bins: int = 15) -> Float[Tensor, ""]:
    """Compute the maximum calibration error (MCE), the largest gap of any bin.

    The gap of a bin is `|acc_b - conf_b|`, and the bins are the same as for `ece`. A bin with few
    examples often has the largest gap by chance. Arguments and errors are the same as for `ece`.

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining well calibrated probabilities using Bayesian binning.
        AAAI, 2015.
    """
    _, gaps = _bin_gaps(probs, labels, num_bins)
    return gaps.max()


def _bin_gaps(
    probs: Tensor, labels: Tensor, num_bins: int
) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Compute each bin's fraction of the examples, and its gap `|acc_b - conf_b|` (0 if empty)."""
    curve = reliability_curve(probs, labels, num_bins)
    return curve.fraction, (curve.accuracy - curve.confidence).abs().nan_to_num(nan=0.0)


def ece_equal_mass(probs: Probs, labels: Labels, num_bins: int = 15) -> Float[Tensor, ""]:
    """Compute the expected calibration error over bins that contain equal numbers of examples.

    Examples are ranked by their confidence. Examples with equal confidence get the mean of their
    ranks and share a bin, so the order of the examples does not matter. Arguments and errors are
    the same as for `ece`. The result is float64.

    Reference:
        Nixon, Dusenberry, Zhang, Jerfel, Tran. Measuring calibration in deep learning. CVPR
        workshops, 2019.
    """
    whole(num_bins, "num_bins")
    confidences, right = confidence_and_right(probs, labels)
    _, index, counts = confidences.unique(return_inverse=True, return_counts=True)
    # Use integers, which are exact. A quotient would have torch's default dtype.
    twice_mean_ranks = 2 * counts.cumsum(0) - counts
    bins = (twice_mean_ranks * num_bins // (2 * len(right))).clamp(max=num_bins - 1)[index]
    sums = torch.zeros(num_bins, dtype=torch.float64, device=bins.device)
    return sums.index_add_(0, bins, right - confidences).abs().sum() / len(bins)


def classwise_ece(probs: Probs, labels: Labels, num_bins: int = 15) -> Float[Tensor, ""]:
    """Compute the classwise calibration error, which is the ECE averaged over the classes.

    Each class is treated as a binary problem, whose calibration error is
    `Σ_b (n_b/n) |freq_b - mean p_b|` over equal bins of its probability. The last bin includes a
    probability of 1. Arguments and errors are the same as for `ece`. The result is float64.

    Reference:
        Kull, Perello-Nieto, Kängsepp, Silva Filho, Song, Flach. Beyond temperature scaling:
        obtaining well-calibrated multi-class probabilities with Dirichlet calibration. NeurIPS,
        2019, equation 3.
    """
    whole(num_bins, "num_bins")
    probs, labels = check_classification(probs, labels)
    probs = probs.double()
    # The difference 1[c = y_n] - p_n[c] of each example and class.
    differences = -probs
    differences.scatter_add_(1, labels[:, None], torch.ones_like(probs[:, :1]))
    # Number the bins of all classes consecutively, so that one sum covers all of them.
    first_bins = num_bins * torch.arange(probs.shape[1], device=probs.device)
    bins = _equal_bins(probs, num_bins) + first_bins
    sums = torch.zeros(probs.shape[1] * num_bins, dtype=torch.float64, device=probs.device)
    return sums.index_add_(0, bins.flatten(), differences.flatten()).abs().sum() / probs.numel()


def smooth_ece(probs: Probs, labels: Labels, num_points: int = 2048) -> Float[Tensor, ""]:
    """Compute the smooth expected calibration error, which needs no bins.

    For confidences f_n and hits y_n, `smECE_σ = ∫₀¹ |(1/n) Σ_n K_σ(t, f_n) (y_n - f_n)| dt` with
    the Gaussian kernel of width σ, reflected at 0 and 1. The result is the σ for which
    `smECE_σ = σ`. It changes continuously with the probabilities, and no number of bins has to be
    chosen. On small sets, it is less biased than `ece`, but not unbiased. The result is float64.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        num_points: Number of intervals of the grid on which residuals and integral are computed.
            The discretisation error is of order `num_points⁻²`.

    Raises:
        ValueError: If `num_points` < 2.

    Reference:
        Błasiok, Nakkiran. Smooth ECE: principled reliability diagrams via kernel smoothing. ICLR,
        2024, definitions 3 and 4.
    """
    whole(num_points, "num_points", minimum=2)
    confidences, right = confidence_and_right(probs, labels)
    # Divide each residual between the two grid points next to its confidence, linearly.
    position = confidences * num_points
    lower = position.long().clamp(0, num_points - 1)
    upper_share = position - lower
    residuals = (right - confidences) / len(confidences)
    sums = torch.zeros(num_points + 1, dtype=torch.float64, device=lower.device)
    sums.index_add_(0, lower, residuals * (1 - upper_share))
    sums.index_add_(0, lower + 1, residuals * upper_share)
    return _smoothed_error(sums)


def _smoothed_error(residuals: Float[Tensor, " points"]) -> Float[Tensor, ""]:
    """Find the fixed point `smECE_σ = σ` for residuals on a grid of [0, 1] with both ends.

    Smoothing by the reflected Gaussian multiplies the k-th coefficient of the cosine series by
    `exp(-(πkσ)²/2)`. `smECE_σ` decreases as σ increases, so bisection finds the fixed point.
    """
    num_intervals = len(residuals) - 1
    # Reflect the residuals at both ends, so that the discrete Fourier transform is the cosine
    # series. Each end is its own mirror image, so it counts twice.
    doubled = residuals.clone()
    doubled[[0, -1]] *= 2
    spectrum = torch.fft.rfft(torch.cat([doubled, doubled[1:-1].flip(0)]))
    frequencies = math.pi * torch.arange(
        num_intervals + 1, dtype=residuals.dtype, device=residuals.device
    )
    low = torch.zeros_like(residuals[0])
    high = torch.ones_like(residuals[0])
    for _ in range(_STEPS):
        sigma = (low + high) / 2
        damped = spectrum * (-(frequencies * sigma).square() / 2).exp()
        # The values are already sums over grid cells, so the trapezoidal rule needs no cell width.
        smoothed = torch.fft.irfft(damped, n=2 * num_intervals)[: num_intervals + 1].abs()
        error = smoothed.sum() - (smoothed[0] + smoothed[-1]) / 2
        is_below = error > sigma  # the fixed point is above sigma
        low = torch.where(is_below, sigma, low)
        high = torch.where(is_below, high, sigma)
    return (low + high) / 2


class ReliabilityCurve(NamedTuple):
    """Confidence and accuracy of the examples in each bin of a reliability diagram.

    Attributes:
        edges: Edges of the bins, `[bins + 1]`, from 0 to 1.
        fraction: Fraction of the examples in each bin, `[bins]`, with sum 1.
        confidence: Mean probability of the most probable class, `[bins]`; NaN in empty bins.
        accuracy: Fraction of correctly classified examples, `[bins]`; NaN in empty bins.
    """

    edges: Float[Tensor, " bins_plus_one"]
    fraction: Float[Tensor, " bins"]
    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]


def reliability_curve(probs: Probs, labels: Labels, num_bins: int = 15) -> ReliabilityCurve:
    """Compute the mean confidence and the accuracy of examples that are binned by confidence.

    The bins, arguments and errors are the same as for `ece`.

    Reference:
        Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML, 2017.
    """
    whole(num_bins, "num_bins")
    probs, labels = check_classification(probs, labels)
    confidences, predictions = probs.max(dim=1)
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probs.dtype, device=probs.device)
    bins = _equal_bins(confidences, num_bins)
    right = predictions == labels
    counts = torch.bincount(bins, minlength=num_bins)
    sums = torch.zeros(num_bins, dtype=torch.float64, device=probs.device)
    return ReliabilityCurve(
        edges=edges,
        fraction=(counts.double() / counts.sum()).to(probs.dtype),
        confidence=(sums.index_add(0, bins, confidences.double()) / counts).to(probs.dtype),
        accuracy=(sums.index_add(0, bins, right.double()) / counts).to(probs.dtype),
    )


def confidence_and_right(
    probs: Probs, labels: Labels
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return each example's confidence, and 1 if its predicted class is the label, otherwise 0."""
    probs, labels = check_classification(probs, labels)
    confidences, predictions = probs.double().max(dim=1)
    return confidences, (predictions == labels).double()


def error_probability(probs: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
    """Compute the probability that the most probable class is wrong, `1 - max_c p_c`, in float64.

    Near 0, it is computed as the sum of the other classes' probabilities, because a float32 number
    near 1 cannot represent the digits of such small probabilities. Thus, confident predictions keep
    their order.
    """
    probs = probs.double()
    confidences, predictions = probs.max(dim=1)
    summed = probs.scatter(1, predictions[:, None], 0).sum(dim=1)
    # For lower confidences, use the difference, so that equal confidences give equal results.
    return torch.where(confidences > _NEAR_ONE, summed, 1 - confidences)


def _equal_bins(values: Float[Tensor, "*n"], num_bins: int) -> Integer[Tensor, "*n"]:
    """Return the index of each value's bin. Bins divide [0, 1] equally; the last one includes 1."""
    edges = torch.linspace(0, 1, num_bins + 1, dtype=values.dtype, device=values.device)
    return torch.bucketize(values, edges, right=True).sub(1).clamp(0, num_bins - 1)
