"""Names of scores and formats of numbers, as readers see them."""

import math
from collections.abc import Iterable

from laplace_debias.metrics import METRICS

SCORE_LABELS = {
    "entropy": "entropy",
    "max_probability": "largest probability",
    "mutual_information": "mutual information",
    "variance": "variance",
    "instability": "instability of the decision",
    "energy": "energy",
    "max_logit": "largest logit",
}
"""Scores that separate familiar from unfamiliar inputs, and the names that readers see."""

_MOST_DECIMALS = 5
"""Numbers that need more decimals than this are written with a power of ten."""


def in_order(metrics: Iterable[str]) -> list[str]:
    """Return the metrics without repetitions, in the order of `METRICS`."""
    names = set(metrics)
    return [name for name in METRICS if name in names]


def decimals(low: float, high: float, value: float) -> int:
    """Return the number of decimals that shows two significant digits of an interval's half-width.

    Without an interval, `value` is shown with three significant digits, or with two if three would
    need more than three decimals.
    """
    half_width = (high - low) / 2
    magnitude = abs(value)
    largest = max(magnitude, *(abs(end) for end in (low, high) if math.isfinite(end)), 0.0)
    resolution = max(magnitude / 100, min(1e-3, magnitude / 10))
    if half_width > 0 and math.isfinite(half_width):
        resolution = half_width / 10
    if not resolution > 0 or not math.isfinite(resolution):
        return 2
    return min(max(0, -math.floor(math.log10(resolution))), most_decimals(largest))


def most_decimals(largest: float) -> int:
    """Return the largest number of decimals for numbers whose largest absolute value is `largest`.

    The result is five, or the number of decimals for five digits of `largest` if it is below 0.001.
    """
    if not 0 < largest < 1e-3:
        return _MOST_DECIMALS
    return _MOST_DECIMALS - 1 - math.floor(math.log10(largest))


def number(value: float | None, places: int) -> str:
    """Format a number with a typographic minus sign, or a missing number as a dash.

    If `places` is more than five, the number is written with a power of ten.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if places > _MOST_DECIMALS:
        return _with_power_of_ten(value, places)
    text = f"{value:,.{places}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def _with_power_of_ten(value: float, places: int) -> str:
    """Round a number to `places` decimals, and format it with a power of ten."""
    rounded = round(value, places)
    if rounded == 0:
        return "0"
    num_digits = max(0, places + math.floor(math.log10(abs(rounded))))
    mantissa, _, exponent = f"{rounded:.{num_digits}e}".partition("e")
    return f"{mantissa}·{power_of_ten(int(exponent))}".replace("-", "−")


def brief(value: float) -> str:
    """Format a number for a sentence; only small numbers have more than three decimals."""
    if value == 0:
        return "0"
    text = f"{value:.3f}"
    if abs(value) < 0.01:
        text = f"{value:.2g}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    return text.replace("-", "−")


def significant(value: float, digits: int = 3) -> str:
    """Format a number with a few digits, using a power of ten for large and small numbers."""
    if not value or not math.isfinite(value):
        return "0" if value == 0 else "–"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        return number(value, max(0, digits - 1 - exponent))
    return f"{number(value / 10**exponent, digits - 1)}·{power_of_ten(exponent)}"


def power_of_ten(exponent: int) -> str:
    """Format a power of ten, such as `10⁻³` for -3."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    if seconds < 60:
        return f"{significant(seconds, 2)} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def size(num_bytes: float) -> str:
    """Format a number of bytes with a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{significant(num_bytes)} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{significant(num_bytes)} TB"
