"""Metrics of Gaussian predictions of real numbers, and of intervals and quantiles.

Targets are `[n]` or `[n, outputs]`. A Gaussian predictive is given by its mean and its standard
deviation, which includes the noise; both have the shape of the targets. Functions return a scalar,
the mean over all targets, or one value per target if `reduction="none"`. Half-precision inputs are
converted to float32.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.special import ndtr, ndtri

from laplace_debias.metrics.checks import check_level, check_real
from laplace_debias.metrics.classification import Reduction, reduce_examples
from laplace_debias.system.checks import whole

Real = Float[Tensor, "n *outputs"]


def gaussian_nll(
    mean: Real, standard_deviation: Real, targets: Real, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    """Compute the negative log-density of a Gaussian predictive distribution, in nats.

    It is `½ log(2πσ²) + (y - μ)²/(2σ²)`. If there are several outputs, it is averaged over them,
    not summed.

    Args:
        mean: `[n]` or `[n, outputs]`.
        standard_deviation: Positive, in the same shape, and including the noise.
        targets: Numbers in the same shape.
        reduction: `"mean"`, or `"none"` for a value per target.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, shapes or devices differ, or a standard
            deviation is not positive.
    """
    check_gaussian(mean, standard_deviation, targets)
    mean, standard_deviation, targets = _at_least_float32(mean, standard_deviation, targets)
    scaled = (targets - mean) / standard_deviation
    terms = scaled.square() / 2 + standard_deviation.log() + math.log(2 * math.pi) / 2
    return reduce_examples(terms, reduction)


def rmse(mean: Real, targets: Real) -> Float[Tensor, ""]:
    """Compute the root of the mean squared error, in the units of the targets.

    Args:
        mean: `[n]` or `[n, outputs]`.
        targets: Numbers in the same shape.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, or shapes or devices differ.
    """
    check_real({"mean": mean, "targets": targets})
    mean, targets = _at_least_float32(mean, targets)
    return (mean - targets).square().mean().sqrt()


def crps(
    mean: Real, standard_deviation: Real, targets: Real, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    """Compute the continuous ranked probability score (CRPS) of Gaussian predictions.

    The CRPS is `∫ (F(t) - 1[t ≥ y])² dt = σ (z (2Φ(z) - 1) + 2φ(z) - 1/√π)` with `z = (y - μ)/σ`,
    in the units of the targets. For σ → 0, it is the absolute error. Arguments and errors are the
    same as for `gaussian_nll`.

    Reference:
        Gneiting, Raftery. Strictly proper scoring rules, prediction, and estimation. JASA, 2007,
        equation 21.
    """
    check_gaussian(mean, standard_deviation, targets)
    mean, standard_deviation, targets = _at_least_float32(mean, standard_deviation, targets)
    z = (targets - mean) / standard_deviation
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    terms = z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)
    return reduce_examples(standard_deviation * terms, reduction)


def gaussian_interval(
    mean: Real, standard_deviation: Real, level: float = 0.95
) -> tuple[Real, Real]:
    """Compute the lower and upper ends of central intervals of a Gaussian predictive distribution.

    Args:
        mean: `[n]` or `[n, outputs]`.
        standard_deviation: Positive, in the same shape.
        level: Probability between the ends, between 0 and 1.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If `level` is not between 0 and 1. Also raises the errors of `gaussian_nll`.
    """
    check_level(level)
    check_gaussian(mean, standard_deviation)
    mean, standard_deviation = _at_least_float32(mean, standard_deviation)
    quantile = ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
    half_width = standard_deviation * quantile
    return mean - half_width, mean + half_width


def interval_coverage(
    low: Real, high: Real, targets: Real, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    """Compute the fraction of targets within their intervals.

    Each interval includes its ends. If the predictive is calibrated, the fraction is close to the
    level of the intervals.

    Args:
        low: Lower ends, `[n]` or `[n, outputs]`.
        high: Upper ends, of the same shape.
        targets: Numbers in the same shape.
        reduction: `"mean"`, or `"none"` for a 1 or 0 per target.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, shapes or devices differ, or an upper end
            is below its lower end.
    """
    check_intervals(low, high, targets)
    low, high, targets = _at_least_float32(low, high, targets)
    return reduce_examples(((low <= targets) & (targets <= high)).to(targets.dtype), reduction)


def interval_width(low: Real, high: Real, *, reduction: Reduction = "mean") -> Float[Tensor, "..."]:
    """Compute the mean width of intervals, in the units of the targets.

    If two predictives have the same coverage, the one with narrower intervals is better. Arguments
    and errors are the same as for `interval_coverage`.
    """
    check_intervals(low, high)
    low, high = _at_least_float32(low, high)
    return reduce_examples(high - low, reduction)


def interval_score(
    low: Real, high: Real, targets: Real, level: float, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    r"""Compute Winkler's interval score: the width, plus a penalty if the target is outside.

    $$(u - l) + \tfrac2\alpha\,(l - y)_+ + \tfrac2\alpha\,(y - u)_+$$

    with α = 1 − `level`, in the units of the targets. The score is proper: it is lowest on average
    for the central interval of the true distribution.

    Args:
        low: Lower ends, `[n]` or `[n, outputs]`.
        high: Upper ends, of the same shape.
        targets: Numbers in the same shape.
        level: The nominal probability of the intervals, between 0 and 1.
        reduction: `"mean"`, or `"none"` for a value per target.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, shapes or devices differ, an upper end is
            below its lower end, or `level` is not between 0 and 1.

    Reference:
        Winkler. A decision-theoretic approach to interval estimation. JASA, 1972. Gneiting, Raftery
        (2007), equation 43.
    """
    check_level(level)
    check_intervals(low, high, targets)
    low, high, targets = _at_least_float32(low, high, targets)
    distance_outside = (low - targets).clamp(min=0) + (targets - high).clamp(min=0)
    return reduce_examples(high - low + 2 / (1 - level) * distance_outside, reduction)


def pinball(
    quantile: Real, targets: Real, level: float, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    r"""Compute the pinball loss of a predicted quantile.

    $$\max(p\,(y - q),\ (p - 1)(y - q))$$

    in the units of the targets. The loss is proper: it is lowest on average for the p-quantile of
    the true distribution.

    Args:
        quantile: The predicted quantile q of each target, `[n]` or `[n, outputs]`.
        targets: Numbers in the same shape.
        level: p, between 0 and 1.
        reduction: `"mean"`, or `"none"` for a value per target.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty or not finite, shapes or devices differ, or `level` is
            not between 0 and 1.

    Reference:
        Koenker, Bassett. Regression quantiles. Econometrica, 1978.
    """
    check_level(level)
    check_real({"quantile": quantile, "targets": targets})
    quantile, targets = _at_least_float32(quantile, targets)
    error = targets - quantile
    return reduce_examples(torch.maximum(level * error, (level - 1) * error), reduction)


def gaussian_pit(mean: Real, standard_deviation: Real, targets: Real) -> Real:
    """Compute the probability integral transform (PIT) `Φ((y - μ)/σ)` of each target.

    If the predictive is calibrated, the transforms are distributed uniformly between 0 and 1.
    Arguments and errors are the same as for `gaussian_nll`.
    """
    check_gaussian(mean, standard_deviation, targets)
    mean, standard_deviation, targets = _at_least_float32(mean, standard_deviation, targets)
    return ndtr((targets - mean) / standard_deviation)


def quantile_calibration_error(pit: Real, num_levels: int = 99) -> Float[Tensor, ""]:
    """Compute the calibration error of the predicted quantiles, averaged over levels.

    The error is the mean of `|fraction of targets below their p-quantile - p|` over equally spaced
    levels p.

    Args:
        pit: Probability integral transform of each target, in [0, 1], computed by `gaussian_pit` or
            by the distribution function of any other predictive.
        num_levels: K, the number of levels, which are `1/(K+1) … K/(K+1)`.

    Raises:
        TypeError: If `pit` is not a tensor.
        ValueError: If `pit` is empty or not in [0, 1], or `num_levels` < 1.

    Reference:
        Kuleshov, Fenner, Ermon. Accurate uncertainties for deep learning using calibrated
        regression. ICML, 2018, section 3.5 (with squares instead of absolute values).
    """
    whole(num_levels, "num_levels")
    check_pit(pit)
    steps = torch.arange(1, num_levels + 1, dtype=torch.float64, device=pit.device)
    levels = steps / (num_levels + 1)
    shares = torch.searchsorted(pit.flatten().double().sort().values, levels, right=True)
    return (shares.float() / pit.numel() - levels).abs().mean()


def check_gaussian(mean: Real, standard_deviation: Real, targets: Real | None = None) -> None:
    """Check a Gaussian predictive and, unless they are None, the targets."""
    tensors = {"mean": mean, "standard_deviation": standard_deviation}
    if targets is not None:
        tensors["targets"] = targets
    check_real(tensors)
    if standard_deviation.min() <= 0:
        raise ValueError(
            "The smallest entry of `standard_deviation` is "
            f"{standard_deviation.min():.4g}, but all entries must be positive. Pass the "
            "square root of the predictive variance, including the noise."
        )


def check_intervals(low: Real, high: Real, targets: Real | None = None) -> None:
    """Check the ends of intervals and, unless they are None, the targets."""
    tensors = {"low": low, "high": high}
    if targets is not None:
        tensors["targets"] = targets
    check_real(tensors)
    if (high < low).any():
        raise ValueError(
            f"In {int((high < low).sum())} of {low.numel()} intervals, `high` is below `low`. "
            "Pass the lower ends first."
        )


def check_pit(pit: Real) -> None:
    """Check probability integral transforms."""
    check_real({"pit": pit})
    if pit.min() < 0 or pit.max() > 1:
        raise ValueError(
            f"`pit` has values from {pit.min():.4g} to {pit.max():.4g}, but must be between 0 "
            "and 1. Pass the cumulative distribution function of the predictive "
            "distribution, evaluated at the targets."
        )


def _at_least_float32(*tensors: Real) -> tuple[Real, ...]:
    """Convert half precision to float32, to avoid overflow of squares and rounding of means."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
