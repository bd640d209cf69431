"""A number with a confidence interval, and closed-form confidence intervals."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


class Interval(float):
    """A metric with a confidence interval.

    The object is a float, the value of the metric in its units. Comparisons and arithmetic use only
    this value, not the ends of the interval.

    Attributes:
        value: The value of the metric.
        low: Lower end of the interval; NaN if it is unknown.
        high: Upper end of the interval; NaN if it is unknown.
    """

    low: float
    high: float

    def __new__(cls, value: float, low: float = math.nan, high: float = math.nan) -> "Interval":
        """Create the metric; by default, the ends of its interval are unknown (NaN)."""
        interval = super().__new__(cls, value)
        interval.low = float(low)
        interval.high = float(high)
        return interval

    @property
    def value(self) -> float:
        """The value of the metric as a plain float."""
        return float(self)

    @property
    def is_known(self) -> bool:
        """Whether the interval could be computed."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def __repr__(self) -> str:
        return f"Interval({self.value!r}, {self.low!r}, {self.high!r})"

    def __str__(self) -> str:
        if not self.is_known:
            return f"{self.value:.4g}"
        # Choose the number of digits such that the width has two significant digits.
        width = self.high - self.low
        digits = 4
        if 0 < width < math.inf:
            digits = min(max(0, 1 - math.floor(math.log10(width))), 12)
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def normal_quantile(level: float) -> float:
    """Return the half-width of a normal interval in standard errors, such as 1.96 for 0.95."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()


def student_quantile(level: float, degrees_of_freedom: float) -> float:
    """Return the half-width of Student's t interval in standard errors."""
    # Import SciPy only here, because its import is slow.
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + level) / 2))


def proportion_interval(successes: float, total: float, level: float) -> tuple[float, float]:
    """Compute Wilson's score interval for a probability.

    Reference:
        Wilson. Probable inference, the law of succession, and statistical inference. JASA, 1927.
    """
    z = normal_quantile(level)
    share = successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half_width = z / (1 + z**2 / total)
    half_width *= math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # If no or all examples are successes, one end must be exactly 0 or 1, despite rounding errors.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == total else centre + half_width
    return max(0.0, low), min(1.0, high)


def paired_proportions_interval(
    difference: Float[Tensor, " n"], size: float, level: float
) -> tuple[float, float]:
    """Compute an interval for the difference of two proportions on the same examples.

    The difference for each example is -1, 0 or 1. The interval is the normal approximation after
    adding half an example to each of the four cells. `size` is the effective number of examples,
    which is n if they are independent.

    Reference:
        Agresti, Min. Simple improved confidence intervals for comparing matched proportions.
        Statistics in Medicine, 2005.
    """
    total = size + 2
    num_above = (difference > 0).sum().item() * size / len(difference) + 0.5
    num_below = (difference < 0).sum().item() * size / len(difference) + 0.5
    excess = num_above - num_below
    centre = excess / total
    deviation = math.sqrt(max(0.0, num_above + num_below - excess**2 / total))
    half_width = normal_quantile(level) * deviation
    return max(-1.0, centre - half_width / total), min(1.0, centre + half_width / total)


def mean_interval(
    value: float, influence: Float[Tensor, " n"], level: float
) -> tuple[float, float]:
    """Compute a skewness-corrected interval for a metric that is, at least to first order, a mean.

    For a skewed quantity, such as the NLL, the true mean lies above Student's t interval more often
    than below it. Hall's transformation of the t statistic corrects this asymmetry to second order.
    For fewer than two examples, the interval is NaN.

    Reference:
        Hall. On the removal of skewness by transformation. JRSS B, 1992, equation 2.5.
    """
    n = len(influence)
    if n < 2:
        return math.nan, math.nan
    centred = influence.double() - influence.double().mean()
    deviation = centred.square().mean().sqrt().item()
    if deviation == 0:
        return value, value
    skewness = (centred / deviation).pow(3).mean().item()
    standard_error = deviation / math.sqrt(n - 1)
    quantile = student_quantile(level, n - 1)

    asymmetry = skewness / math.sqrt(n)
    low = value - standard_error * _hall_quantile(quantile, asymmetry)
    high = value - standard_error * _hall_quantile(-quantile, asymmetry)
    return low, high


def _hall_quantile(t: float, asymmetry: float) -> float:
    """Map a quantile of Student's t by the inverse of Hall's cubic transformation.

    `asymmetry` is the skewness divided by √n; without skewness, the quantile does not change.
    """
    if not abs(asymmetry) >= 1e-8:
        return t
    cube = 1 + asymmetry * (t - asymmetry / 6)
    root = math.copysign(abs(cube) ** (1 / 3), cube)
    return 3 / asymmetry * (root - 1)


def area_interval(
    value: float, half_width: float, smaller_size: int, level: float
) -> tuple[float, float]:
    """Compute an interval for a quantity in [0, 1] that is symmetric around its logit.

    If the value is 0 or 1, it has no logit, so Wilson's interval for a proportion of 0 or 1 in the
    smaller of the two sets is used.

    Args:
        value: The quantity, such as the area under a ROC curve.
        half_width: The half-width of a symmetric interval for the quantity itself.
        smaller_size: The number of examples of the smaller set.
        level: The confidence level.

    Reference:
        Pepe. The statistical evaluation of medical tests for classification and prediction. 2003,
        section 5.2.4.
    """
    # Rounding errors of a long sum can make the value leave [0, 1].
    if value <= 0 or value >= 1:
        return proportion_interval(smaller_size if value >= 1 else 0, smaller_size, level)
    if math.isnan(half_width):
        return math.nan, math.nan
    logit_half_width = half_width / (value * (1 - value))
    logit = math.log(value / (1 - value))
    return _sigmoid(logit - logit_half_width), _sigmoid(logit + logit_half_width)


def quantile_rank_limits(share: float, size: int, level: float) -> tuple[int, int]:
    """Return limits of the number of independent draws that lie below a quantile.

    The number has a binomial distribution for every continuous distribution of the draws. It lies
    between the limits, or equals one of them, with a probability of at least `level`.

    Args:
        share: The probability that a draw lies below the quantile.
        size: The number of draws.
        level: The probability.
    """
    # Import SciPy only here, because its import is slow.
    from scipy.special import bdtr

    counts = torch.arange(size + 1, dtype=torch.float64)
    at_most_probability = torch.from_numpy(bdtr(counts.numpy(), size, share))
    tail = (1 - level) / 2
    lowest = int((at_most_probability < tail).sum())
    highest = int((at_most_probability < 1 - tail).sum())
    return lowest, highest


def combined_interval(share: float, *intervals: tuple[float, float]) -> tuple[float, float]:
    """Combine intervals for a fraction that account for independent causes of its error.

    The squared distances from the fraction to the ends add up, as variances do.

    Args:
        share: The fraction.
        intervals: The intervals; each contains the fraction.

    Reference:
        Zou, Donner. Construction of confidence limits about effect measures: a general approach.
        Statistics in Medicine, 2008.
    """
    below = math.hypot(*(share - low for low, _ in intervals))
    above = math.hypot(*(high - share for _, high in intervals))
    return max(0.0, share - below), min(1.0, share + above)


def _sigmoid(x: float) -> float:
    """Evaluate the logistic function without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
