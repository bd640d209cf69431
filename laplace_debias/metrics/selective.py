"""Selective prediction: the error rate if the network answers only when it is confident."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.calibration import confidence_and_right, error_probability
from laplace_debias.metrics.checks import check_classification


class RiskCoverageCurve(NamedTuple):
    """The error rate among the most confident examples as a function of the coverage.

    Attributes:
        coverage: Fraction of the examples that the network answers, `[n]`: 1/n, 2/n … 1.
        risk: The error rate among the answered examples, `[n]`.
    """

    coverage: Float[Tensor, " n"]
    risk: Float[Tensor, " n"]


def risk_coverage_curve(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]
) -> RiskCoverageCurve:
    """Compute the error rate among the most confident examples, for every coverage.

    Examples are ordered by the total probability of all classes but the most probable one, which is
    more precise than the confidence if the confidence is near 1. Each example's error is replaced
    by the mean error of all equally confident examples, which is the expectation if ties are broken
    at random.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If `probs` are not probabilities or `labels` do not fit them.

    Reference:
        Geifman, El-Yaniv. Selective classification for deep neural networks. NeurIPS, 2017.
    """
    probs, labels = check_classification(probs, labels)
    _, right = confidence_and_right(probs, labels)
    error_probabilities = error_probability(probs)
    errors = mean_of_equals(error_probabilities, 1 - right)[error_probabilities.argsort()]
    answered = torch.arange(1, len(errors) + 1, dtype=errors.dtype, device=errors.device)
    return RiskCoverageCurve(answered / len(errors), errors.cumsum(0) / answered)


def aurc(probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]) -> Float[Tensor, ""]:
    """Compute the area under the risk-coverage curve (AURC).

    The AURC is the mean error rate over all coverages. It is small if the accuracy is high and
    mistakes have a low confidence. Arguments and errors are the same as for `risk_coverage_curve`.

    Reference:
        Geifman, Uziel, El-Yaniv. Bias-reduced uncertainty estimation for deep neural classifiers.
        ICLR, 2019.
    """
    return risk_coverage_curve(probs, labels).risk.mean()


def mean_of_equals(keys: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Replace each example's value by the mean value of all examples with the same key."""
    _, index, counts = keys.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device)
    return (sums.index_add_(0, index, values) / counts)[index]
