"""Decide whether a difference between methods is large enough to matter."""

from collections.abc import Mapping

from laplace_debias.metrics import METRICS
from laplace_debias.metrics.definitions import TARGET_UNIT

_SMALLEST = {"nll": 1e-3, "brier": 1e-3, "overconfidence": 5e-3, "scaled_error": 1e-2}
_SMALLEST_SHARE = 1e-3
"""For metrics in the units of the targets, the smallest relevant fraction of the reference's value
of the same metric."""
_RELATIVE_TO = {"bias": "rmse"}
"""Metrics that are relative to another metric of the reference, because their own may be zero."""


def matters(metric: str, difference: float, reference_metrics: Mapping[str, float]) -> bool:
    """Whether a difference from a reference is large enough to matter.

    Args:
        metric: Name of the metric.
        difference: The metric of a method minus the metric of the reference.
        reference_metrics: The reference's metrics on the same set, by name.
    """
    smallest = _SMALLEST.get(metric, 0.0)
    if metric in METRICS and METRICS[metric].unit == TARGET_UNIT:
        smallest = _SMALLEST_SHARE * reference_metrics.get(_RELATIVE_TO.get(metric, metric), 0.0)
    return abs(difference) >= smallest
