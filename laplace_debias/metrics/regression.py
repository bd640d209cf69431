"""How good Gaussian predictions of real targets are."""

import math

from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.checks import check_same_device, check_values


def gaussian_nll(
    mean: Float[Tensor, "n *outputs"],
    variance: Float[Tensor, "n *outputs"],
    targets: Float[Tensor, "n *outputs"],
) -> Float[Tensor, ""]:
    """Mean negative log-density of the targets, summed over independent outputs.

    `(1/n) Σ_n Σ_o ½ (log(2π v_no) + (y_no - m_no)² / v_no)`, every constant included.

    Args:
        mean: Predictive means, `[n]` or `[n, outputs]`.
        variance: Predictive variances (not standard deviations), of the same shape.
        targets: Targets, of the same shape.

    Returns:
        The mean NLL of an example, in nats.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes differ, an argument is empty or holds NaN or Inf, or a variance is not
            positive.
    """
    _check_pair(mean, targets, "mean", "targets")
    _check_pair(variance, targets, "variance", "targets")
    lowest = variance.min().item()
    if lowest <= 0:
        raise ValueError(
            f"`variance` is as low as {lowest:.4g}; expected it to be positive. Add the variance "
            "of the noise, or pass variances, not their logarithms."
        )
    terms = (2 * math.pi * variance).log() + (targets - mean).square() / variance
    return terms.sum() / (2 * len(terms))


def rmse(
    mean: Float[Tensor, "n *outputs"], targets: Float[Tensor, "n *outputs"]
) -> Float[Tensor, ""]:
    """Root of the mean squared error, over examples and outputs alike.

    Args:
        mean: Predictions, `[n]` or `[n, outputs]`.
        targets: Targets, of the same shape.

    Returns:
        The error, in units of the targets.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes differ, or an argument is empty or holds NaN or Inf.
    """
    _check_pair(mean, targets, "mean", "targets")
    return (mean - targets).square().mean().sqrt()


def _check_pair(
    first: Float[Tensor, "..."], second: Float[Tensor, "..."], name: str, other: str
) -> None:
    check_values(first, name)
    check_values(second, other)
    if first.shape != second.shape:
        raise ValueError(
            f"`{name}` has shape {list(first.shape)} and `{other}` {list(second.shape)}; expected "
            "the same, as broadcasting would pair every example with every other. Reshape one."
        )
    check_same_device(first, second, name, other)
