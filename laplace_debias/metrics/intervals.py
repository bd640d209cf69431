"""A number with its confidence interval, and intervals in closed form."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


class Interval(float):
    """A metric with its confidence interval, in the units of the metric.

    It is the metric as a float. Only the comparison with another interval looks at the ends, too.

    Attributes:
        value: The metric on all examples.
        low: Lower end of the interval; NaN if it is not known.
        high: Upper end of the interval; NaN if it is not known.
    """

    low: float
    high: float

    def __new__(cls, value: float, low: float = math.nan, high: float = math.nan) -> "Interval":
        """An interval without ends if they are left out."""
        interval = super().__new__(cls, value)
        interval.low, interval.high = float(low), float(high)
        return interval

    @property
    def value(self) -> float:
        """The metric as a plain float."""
        return float(self)

    @property
    def is_known(self) -> bool:
        """Whether the interval has ends."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def __repr__(self) -> str:
        return f"Interval({self.value!r}, {self.low!r}, {self.high!r})"

    def __str__(self) -> str:
        if not self.is_known:
            return f"{self.value:.4g}"
        # As many digits as tell the ends apart to two of them.
        width = self.high - self.low
        digits = 4 if not 0 < width < math.inf else max(0, 1 - math.floor(math.log10(width)))
        digits = min(digits, 12)
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def normal_quantile(level: float) -> float:
    """How many standard errors reach to both ends of an interval: 1.96 for 0.95."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()


def of_proportion(successes: float, total: int, level: float) -> tuple[float, float]:
    """Wilson's score interval of a probability.

    Reference:
        Wilson. Probable inference, the law of succession, and statistical inference. JASA, 1927.
    """
    z = normal_quantile(level)
    share = successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total)
    half *= math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # At shares of 0 and 1 the end is exactly there, but for rounding.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return max(0.0, low), min(1.0, high)


def of_paired_proportions(difference: Float[Tensor, " n"], level: float) -> tuple[float, float]:
    """Interval of the difference of two probabilities on the same examples, each -1, 0 or 1.

    Half an example more in each of the four cells, then the normal approximation.

    Reference:
        Agresti, Min. Simple improved confidence intervals for comparing matched proportions.
        Statistics in Medicine, 2005.
    """
    total = len(difference) + 2
    more, fewer = ((difference > 0).sum().item() + 0.5), ((difference < 0).sum().item() + 0.5)
    centre = (more - fewer) / total
    half = normal_quantile(level) * math.sqrt(max(0.0, more + fewer - (more - fewer) ** 2 / total))
    return max(-1.0, centre - half / total), min(1.0, centre + half / total)


def of_mean(value: float, influence: Float[Tensor, " n"], level: float) -> tuple[float, float]:
    """Interval of a mean, or of what is one to first order, corrected for skewness.

    Hall's transformation of Student's t. The t interval of a skewed quantity, such as the NLL,
    misses the mean above more often than below; this one does not, to second order. NaN for fewer
    than two examples.

    Reference:
        Hall. On the removal of skewness by transformation. JRSS B, 1992, equation 2.5.
    """
    # scipy takes a moment to import: only what uses it waits for it.
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


def of_area(
    value: float, standard_error: float, smallest: int, level: float
) -> tuple[float, float]:
    """Interval of a quantity in [0, 1], by the normal approximation of its logit.

    At values of 0 and 1 there is no standard error. The interval is then Wilson's, as of a
    probability of which nothing was seen in the smaller of the sets.

    Reference:
        Pepe. The statistical evaluation of medical tests for classification and prediction. 2003,
        section 5.2.4.
    """
    # A sum of many terms may end beyond by its rounding.
    if value <= 0 or value >= 1:
        return of_proportion(smallest if value >= 1 else 0, smallest, level)
    if math.isnan(standard_error):
        return math.nan, math.nan
    half = normal_quantile(level) * standard_error / (value * (1 - value))
    logit = math.log(value / (1 - value))
    return 1 / (1 + math.exp(half - logit)), 1 / (1 + math.exp(-half - logit))
