"""What the metrics are called, where they are better, and what their intervals mean."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Description:
    """A metric in words.

    Attributes:
        label: What a table or an axis calls it.
        unit: Of its values; "" for numbers between 0 and 1.
        better: Whether `lower` or `higher` is better, `level` if it should be the level of the
            interval that it measures, None if neither is.
        meaning: One sentence on what it measures.
        interval: One sentence on what its interval means.
    """

    label: str
    unit: str
    better: Literal["lower", "higher", "level"] | None
    meaning: str
    interval: str


_MEAN = "Where the mean over many test examples lies, by Student's t corrected for skewness (Hall)."
_BIAS = (
    "Where the error in these bins for many test examples lies: estimates on few examples are too "
    "high by chance, so the interval reaches down to the value less its bias under resampling."
)
_ROUGH = (
    "A rough range: with few examples a bin the estimate is far too high, and resampling takes "
    "away only a part of it; compare smooth ECE instead."
)
_AREA = (
    "Where the value for many examples of both kinds lies, by the normal approximation of its logit"
)
_OOD = "out-of-distribution examples"

DESCRIPTIONS: dict[str, Description] = {
    "accuracy": Description(
        "Accuracy",
        "",
        "higher",
        "Share of examples whose most probable class is the label.",
        "Where the share among many test examples lies (Wilson).",
    ),
    "exact_match": Description(
        "Exact match",
        "",
        "higher",
        "Share of examples with every label right.",
        "Where the share among many test examples lies (Wilson).",
    ),
    "nll": Description(
        "NLL",
        "nats",
        "lower",
        "Mean negative log-probability of the label: how surprising the truth is.",
        _MEAN,
    ),
    "brier": Description(
        "Brier score",
        "",
        "lower",
        "Mean squared distance of the probabilities from the label, between 0 and 2.",
        _MEAN,
    ),
    "ece": Description(
        "ECE",
        "",
        "lower",
        "Mean gap of confidence and accuracy over 15 equal intervals of the confidence.",
        _BIAS,
    ),
    "ece_equal_mass": Description(
        "ECE (equal mass)",
        "",
        "lower",
        "Mean gap of confidence and accuracy over 15 groups of equally many examples.",
        _BIAS,
    ),
    "smooth_ece": Description(
        "Smooth ECE",
        "",
        "lower",
        "Gap of confidence and accuracy after smoothing, with no bins to choose.",
        "Where the smooth ECE of many test examples lies; it reaches down to the value less its "
        "bias under resampling, which is smaller than that of bins.",
    ),
    "mce": Description(
        "MCE",
        "",
        "lower",
        "Largest gap of confidence and accuracy of 15 bins, often that of the smallest bin.",
        _ROUGH,
    ),
    "classwise_ece": Description(
        "Classwise ECE",
        "",
        "lower",
        "Mean over the classes of the gap of each class's probability and its frequency.",
        _ROUGH,
    ),
    "aurc": Description(
        "AURC",
        "",
        "lower",
        "Mean error rate where only the most confident examples are answered.",
        "Where the area for many test examples lies, to first order a mean (Hall's t).",
    ),
    "mean_entropy": Description(
        "Mean entropy",
        "nats",
        None,
        "How uncertain the predictive says that it is.",
        _MEAN,
    ),
    "auroc": Description(
        "AUROC",
        "",
        "higher",
        f"Probability that {_OOD} have a higher score than examples of the test set.",
        f"{_AREA} (DeLong).",
    ),
    "aupr_out": Description(
        "AUPR (out)",
        "",
        "higher",
        f"Mean precision in finding {_OOD}; by chance it is their share.",
        f"{_AREA}.",
    ),
    "aupr_in": Description(
        "AUPR (in)",
        "",
        "higher",
        "Mean precision in finding examples of the test set; by chance it is their share.",
        f"{_AREA}.",
    ),
    "fpr95": Description(
        "FPR95",
        "",
        "lower",
        f"Share of the test set taken for OOD where 95 % of the {_OOD} are found.",
        "Where the share for many examples of both kinds lies, by resampling both.",
    ),
    "rmse": Description(
        "RMSE",
        "units of the target",
        "lower",
        "Root of the mean squared error.",
        "Root of the interval of the mean squared error over many test examples (Hall's t).",
    ),
    "crps": Description(
        "CRPS",
        "units of the target",
        "lower",
        "Distance of the predicted distribution from the target; the absolute error if certain.",
        _MEAN,
    ),
    "coverage": Description(
        "Coverage",
        "",
        "level",
        "Share of targets in the predictive's central interval; it should be the interval's level.",
        "Where the share among many test examples lies (Wilson for one output per example).",
    ),
    "width": Description(
        "Interval width",
        "units of the target",
        "lower",
        "Mean width of the predictive's central interval; narrower is better at equal coverage.",
        _MEAN,
    ),
    "quantile_calibration_error": Description(
        "Quantile calibration error",
        "",
        "lower",
        "Mean gap of quantile levels and the share of targets below these quantiles.",
        _BIAS.replace(" in these bins", ""),
    ),
}
"""Descriptions by the name of a metric, as reports have it."""


def describe(name: str) -> Description:
    """The description of a metric by its name in a report; of `auroc_svhn` that of `auroc`.

    Args:
        name: Such as `nll` or `auroc_<name of the set>`.

    Raises:
        KeyError: There is no such metric.
    """
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    family = next(
        (known for known in ("auroc", "aupr_in", "aupr", "fpr95") if name.startswith(known + "_")),
        None,
    )
    if family is None and name != "aupr":
        raise KeyError(f"No metric {name!r}: there are {', '.join(DESCRIPTIONS)}.")
    return DESCRIPTIONS["aupr_out" if family in ("aupr", None) else family]
