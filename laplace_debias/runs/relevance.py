"""Decide whether a difference between methods is large enough to matter."""

from collections.abc import Mapping

_SMALLEST = {"nll": 1e-3, "brier": 1e-3, "overconfidence": 5e-3, "scaled_error": 1e-2}
_SMALLEST_SHARE = 1e-3
_RELATIVE_TO = {"crps": "crps", "rmse": "rmse", "mae": "mae", "width": "width", "bias": "rmse"}
"""For each metric in the unit of the targets, the metric of the reference that determines the
smallest relevant difference."""


def matters(metric: str, difference: float, reference_metrics: Mapping[str, float]) -> bool:
    """Whether a difference from a reference is large enough to matter.

    Args:
        metric: Name of the metric.
        difference: The metric of a method minus the metric of the reference.
        reference_metrics: The reference's metrics on the same set, by name.
    """
    smallest = _SMALLEST.get(metric, 0.0)
    if metric in _RELATIVE_TO:
        smallest = _SMALLEST_SHARE * reference_metrics.get(_RELATIVE_TO[metric], 0.0)
    return abs(difference) >= smallest
