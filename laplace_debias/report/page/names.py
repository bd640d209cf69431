"""Names of metrics, which way is better, and numbers as people read them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_PERCENT, _PLAIN = 100.0, 1.0


@dataclass(frozen=True)
class MetricName:
    """How the page speaks of a metric.

    Attributes:
        label: Its short name.
        better: `higher`, `lower`, or None where neither is better.
        means: One sentence on what it is.
        unit: Behind its numbers: `%`, `nats`, or nothing.
    """

    label: str
    better: str | None
    means: str
    unit: str = ""

    @property
    def factor(self) -> float:
        """What its values are multiplied with to be shown."""
        return _PERCENT if self.unit == "%" else _PLAIN


METRICS = {
    "accuracy": MetricName("Accuracy", "higher", "how many examples are classified rightly", "%"),
    "nll": MetricName(
        "NLL", "lower", "negative log-likelihood of the truth: judges the whole predictive", "nats"
    ),
    "brier": MetricName("Brier", "lower", "mean squared distance of probabilities to the truth"),
    "smooth_ece": MetricName(
        "Smooth ECE", "lower", "mean gap of confidence and accuracy, without bins", "%"
    ),
    "ece": MetricName("ECE", "lower", "mean gap of confidence and accuracy over equal bins", "%"),
    "ece_equal_mass": MetricName(
        "ECE, equal mass", "lower", "the same over bins of equally many examples", "%"
    ),
    "mce": MetricName("MCE", "lower", "greatest gap of confidence and accuracy in a bin", "%"),
    "classwise_ece": MetricName("Classwise ECE", "lower", "the gap of each class, averaged", "%"),
    "aurc": MetricName(
        "AURC", "lower", "error rate averaged over all shares of examples that are kept", "%"
    ),
    "rmse": MetricName("RMSE", "lower", "root of the mean squared error, in units of the target"),
    "crps": MetricName(
        "CRPS", "lower", "distance of predicted to perfect distribution, in units of the target"
    ),
    "coverage": MetricName("Coverage", None, "how many targets lie in the 95 % interval", "%"),
    "width": MetricName("Width", None, "mean width of the 95 % interval, in units of the target"),
    "quantile_calibration": MetricName(
        "Quantile error", "lower", "mean gap of predicted quantiles to observed shares", "%"
    ),
    "mean_entropy": MetricName("Mean entropy", None, "mean entropy of the predictive", "nats"),
    "auroc": MetricName(
        "AUROC", "higher", "chance that an out-of-distribution example looks less certain", "%"
    ),
    "aupr_out": MetricName("AUPR, OOD", "higher", "precision in finding the strange ones", "%"),
    "aupr_in": MetricName("AUPR, test", "higher", "precision in finding the familiar ones", "%"),
    "fpr95": MetricName("FPR95", "lower", "false alarms when 95 % are found", "%"),
}
"""What is known of metrics; others are shown by their own name."""

SCORES = {
    "entropy": "entropy of the predictive",
    "max_probability": "one minus the greatest probability",
    "mutual_information": "mutual information",
    "variance": "predicted variance",
}
"""What tells familiar examples from strange ones."""


def metric_name(metric: str) -> MetricName:
    """How the page speaks of a metric."""
    return METRICS.get(metric) or MetricName(metric.replace("_", " "), None, "")


def known_first(metrics: Iterable[str]) -> list[str]:
    """Metrics without repetition, in the order of `METRICS`, unknown ones last."""
    found = list(dict.fromkeys(metrics))
    return [name for name in METRICS if name in found] + [n for n in found if n not in METRICS]


def decimals(low: float, high: float, value: float) -> int:
    """Decimals with which an interval has two digits that count; without one, `value` has three."""
    half = (high - low) / 2
    size = half / 10 if half > 0 and math.isfinite(half) else abs(value) / 100
    if not size > 0 or not math.isfinite(size):
        return 2
    return min(max(0, -math.floor(math.log10(size))), 5)


def number(value: float | None, places: int) -> str:
    """A number with a real minus sign; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:,.{places}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def significant(value: float, digits: int = 3) -> str:
    """A number to some digits, powers of ten where it is very large or small."""
    if not value or not math.isfinite(value):
        return "0" if value == 0 else "–"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        return number(value, max(0, digits - 1 - exponent))
    return f"{number(value / 10**exponent, digits - 1)}·{power_of_ten(exponent)}"


def power_of_ten(exponent: int) -> str:
    """`10⁻³` for -3."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{significant(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{significant(num_bytes)} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{significant(num_bytes)} TB"
