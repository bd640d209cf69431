"""Confidence intervals over draws."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from scipy import stats

CONFIDENCE = 0.95

Draw = TypeVar("Draw")


def half_width(draws: Sequence[Draw], statistic: Callable[[Sequence[Draw]], float]) -> float | None:
    """Half of Student's 95 % confidence interval of a statistic of draws, by the jackknife.

    Args:
        draws: What was drawn, independent of each other. Of a mean the interval is the usual one.
        statistic: Of some of them.

    Returns:
        Half the interval's width; None for a single draw.
    """
    n = len(draws)
    if n < 2:
        return None
    left_out = [statistic([*draws[:i], *draws[i + 1 :]]) for i in range(n)]
    centre = math.fsum(left_out) / n
    error = math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in left_out))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
