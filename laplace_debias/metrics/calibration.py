"""Calibration bin by bin: what a reliability diagram shows."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_classification
from laplace_debias.metrics.classification import check_num_bins


class ReliabilityCurve(NamedTuple):
    """Confidence and accuracy by equal bins of the confidence.

    Attributes:
        edges: Borders of the bins, `[bins + 1]`, from 0 to 1.
        fraction: Fraction of the examples in each bin, `[bins]`, with sum 1.
        confidence: Mean probability of the most probable class, `[bins]`; NaN in empty bins.
        accuracy: Fraction of right examples, `[bins]`; NaN in empty bins.
    """

    edges: Float[Tensor, " bins_plus_one"]
    fraction: Float[Tensor, " bins"]
    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]


def reliability_curve(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"], num_bins: int = 15
) -> ReliabilityCurve:
    """Groups the examples by confidence and compares confidence and accuracy in each group.

    The bins are those of `ece`, `[lower, upper)`, but for a confidence of exactly 1, which belongs
    to the last bin here.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        num_bins: Number of bins.

    Returns:
        The curve, on the device of `probs`.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, `labels` do not fit them, or `num_bins` < 1.

    Reference:
        Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML, 2017.
    """
    check_num_bins(num_bins)
    probs, labels = check_classification(probs, labels)
    confidences, predictions = probs.max(dim=1)
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probs.dtype, device=probs.device)
    bins = torch.bucketize(confidences, edges, right=True).sub(1).clamp(max=num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins).to(probs.dtype)
    right = (predictions == labels).to(probs.dtype)
    return ReliabilityCurve(
        edges=edges,
        fraction=counts / counts.sum(),
        confidence=torch.zeros_like(counts).scatter_add_(0, bins, confidences) / counts,
        accuracy=torch.zeros_like(counts).scatter_add_(0, bins, right) / counts,
    )
