"""Errors and confidence intervals of statistics over draws."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from scipy import stats

CONFIDENCE = 0.95

Draw = TypeVar("Draw")


def jackknife_error(
    draws: Sequence[Draw], statistic: Callable[[Sequence[Draw]], float]
) -> float | None:
    """Standard error of a statistic of draws, by the jackknife.

    Args:
        draws: Independent draws. For a mean the error is the usual one.
        statistic: A function of some of the draws.

    Returns:
        The standard error; None for a single draw.
    """
    n = len(draws)
    if n < 2:
        return None
    left_out = [statistic([*draws[:i], *draws[i + 1 :]]) for i in range(n)]
    centre = math.fsum(left_out) / n
    return math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in left_out))


def half_width(draws: Sequence[Draw], statistic: Callable[[Sequence[Draw]], float]) -> float | None:
    """Half of Student's 95 % confidence interval of a statistic of draws, by the jackknife.

    Args:
        draws: Independent draws. For a mean the interval is the usual one.
        statistic: A function of some of the draws.

    Returns:
        Half the interval's width; None for a single draw.
    """
    error = jackknife_error(draws, statistic)
    if error is None:
        return None
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(draws) - 1)) * error
