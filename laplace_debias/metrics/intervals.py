"""A number with its confidence interval, and intervals in closed form."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


class Interval(float):
    """A metric with a confidence interval.

    The object is the metric as a float, in the metric's units. Comparisons and arithmetic use only
    this value, not the ends.

    Attributes:
        value: The metric on all examples.
        low: Lower end of the interval; NaN if it is unknown.
        high: Upper end of the interval; NaN if it is unknown.
    """

    low: float
    high: float

    def __new__(cls, value: float, low: float = math.nan, high: float = math.nan) -> "Interval":
        """Make a metric with an interval, whose ends are unknown by default."""
        interval = super().__new__(cls, value)
        interval.low = float(low)
        interval.high = float(high)
        return interval

    @property
    def value(self) -> float:
        """The metric as a plain float."""
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
        # The number of digits is chosen such that the width has two significant digits.
        width = self.high - self.low
        digits = 4
        if 0 < width < math.inf:
            digits = min(max(0, 1 - math.floor(math.log10(width))), 12)
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def normal_quantile(level: float) -> float:
    """Return half the width of an interval in standard errors, such as 1.96 for the level 0.95."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()


def proportion_interval(successes: float, total: int, level: float) -> tuple[float, float]:
    """Compute Wilson's score interval for a probability.

    Reference:
        Wilson. Probable inference, the law of succession, and statistical inference. JASA, 1927.
    """
    z = normal_quantile(level)
    share = successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half_width = z / (1 + z**2 / total)
    half_width *= math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # At shares of 0 and 1, one end of the interval is 0 or 1, which rounding errors must not
    # change.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == total else centre + half_width
    return max(0.0, low), min(1.0, high)


def paired_proportions_interval(
    difference: Float[Tensor, " n"], level: float
) -> tuple[float, float]:
    """Compute an interval for the difference of two probabilities on the same examples.

    The difference of each example is -1, 0 or 1. The interval is the normal approximation after
    half an example is added to each of the four cells.

    Reference:
        Agresti, Min. Simple improved confidence intervals for comparing matched proportions.
        Statistics in Medicine, 2005.
    """
    total = len(difference) + 2
    num_above = (difference > 0).sum().item() + 0.5
    num_below = (difference < 0).sum().item() + 0.5
    excess = num_above - num_below
    centre = excess / total
    deviation = math.sqrt(max(0.0, num_above + num_below - excess**2 / total))
    half_width = normal_quantile(level) * deviation
    return max(-1.0, centre - half_width / total), min(1.0, centre + half_width / total)


def mean_interval(
    value: float, influence: Float[Tensor, " n"], level: float
) -> tuple[float, float]:
    """Compute an interval for a mean, to first order at least, corrected for skewness.

    The interval is Hall's transformation of Student's t. For a skewed quantity, such as the NLL,
    the mean lies above the t interval more often than below the interval. This interval corrects
    the asymmetry to second order. It is NaN for fewer than two examples.

    Reference:
        Hall. On the removal of skewness by transformation. JRSS B, 1992, equation 2.5.
    """
    # SciPy is imported here, because the import takes long.
    from scipy.special import stdtrit

    n = len(influence)
    if n < 2:
        return math.nan, math.nan
    centred = influence.double() - influence.double().mean()
    deviation = centred.square().mean().sqrt().item()
    if deviation == 0:
        return value, value
    skewness = (centred / deviation).pow(3).mean().item()
    standard_error = deviation / math.sqrt(n - 1)
    quantile = float(stdtrit(n - 1, (1 + level) / 2))

    slope = skewness / math.sqrt(n)
    ends = []
    for t in (quantile, -quantile):
        if abs(slope) >= 1e-8:
            inner = 1 + slope * (t - slope / 6)
            t = 3 / slope * (math.copysign(abs(inner) ** (1 / 3), inner) - 1)
        ends.append(value - standard_error * t)
    return ends[0], ends[1]


def area_interval(
    value: float, standard_error: float, smallest: int, level: float
) -> tuple[float, float]:
    """Compute an interval for a quantity in [0, 1] by a normal approximation of its logit.

    A value of 0 or 1 has no standard error. Its interval is Wilson's interval for a proportion of 0
    or 1 in the smaller of the sets.

    Reference:
        Pepe. The statistical evaluation of medical tests for classification and prediction. 2003,
        section 5.2.4.
    """
    # The rounding errors of a long sum may lead to a value outside of [0, 1].
    if value <= 0 or value >= 1:
        return proportion_interval(smallest if value >= 1 else 0, smallest, level)
    if math.isnan(standard_error):
        return math.nan, math.nan
    half_width = normal_quantile(level) * standard_error / (value * (1 - value))
    logit = math.log(value / (1 - value))
    return _sigmoid(logit - half_width), _sigmoid(logit + half_width)


def _sigmoid(x: float) -> float:
    """Compute the logistic function without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
