"""Every metric's definition: its name, what it means in words, and what makes its statistic."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.calibration import (
    classwise_ece,
    confidence_and_right,
    ece,
    ece_equal_mass,
    mce,
    smooth_ece,
)
from laplace_debias.metrics.classification import accuracy, brier, nll, overconfidence
from laplace_debias.metrics.ood import aupr, aupr_in, auroc, entropy, fpr95
from laplace_debias.metrics.regression import (
    crps,
    gaussian_interval,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_width,
    quantile_calibration_error,
)
from laplace_debias.metrics.selective import aurc, mean_of_equals
from laplace_debias.metrics.statistics import Alone, Area, Mean, Proportion, Statistic


@dataclass(frozen=True)
class Metric:
    """A metric of a predictive.

    Attributes:
        name: As reports have it.
        label: Name in tables and on axes.
        meaning: One sentence on what it measures.
        statistic: Makes it of probabilities and labels, of scores of ID and OOD examples, or of
            mean, standard deviation, targets and the level of the interval.
        better: Whether `lower` or `higher` is better, `level` if it should be the level of the
            interval that it measures, `ideal` if there is a number that it should be (differences
            are then of the distances from it, and lower is better), None if none is.
        unit: Of its values; "" for numbers between 0 and 1.
        interval: One sentence on what its interval means.
    """

    name: str
    label: str
    meaning: str
    statistic: Callable[..., Statistic]
    better: Literal["lower", "higher", "level", "ideal"] | None = "lower"
    unit: str = ""
    interval: str = (
        "Where the mean over many test examples lies, by Student's t corrected for skewness (Hall)."
    )


# ------------------------------------------------------------- probabilities and labels


def share_of(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Statistic]:
    """The statistic of a function whose value is the share of examples with a property."""
    return lambda probs, labels: Proportion(
        function(probs, labels).item(), function(probs, labels, reduction="none")
    )


def mean_of(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Statistic]:
    """The statistic of a function whose value is the mean of examples' values, at least zero."""
    return lambda probs, labels: Mean(
        function(probs, labels).item(), function(probs, labels, reduction="none"), lowest=0
    )


def alone(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Statistic]:
    """The statistic of a function of which no interval is known that holds."""
    return lambda probs, labels: Alone(function(probs, labels).item(), len(labels))


def _of_overconfidence(probs: Tensor, labels: Tensor) -> Statistic:
    gaps = overconfidence(probs, labels, reduction="none")
    return Mean(gaps.mean().item(), gaps, ideal=0)


def _of_entropy(probs: Tensor, labels: Tensor) -> Statistic:
    entropies = entropy(probs)
    return Mean(entropies.mean().item(), entropies, lowest=0)


def _of_aurc(probs: Tensor, labels: Tensor) -> Statistic:
    """`aurc`, a mean to first order.

    With the risk R and the coverage S at each example's confidence, an example with error e adds
    `R + mean over those that are at most as confident of (e - R)/S`: the influence function of
    `E[R]`.
    """
    confidences, right = confidence_and_right(probs, labels)
    order = confidences.argsort(descending=True)
    errors = mean_of_equals(confidences, 1 - right)[order]
    n = len(errors)
    answered = torch.arange(1, n + 1, dtype=errors.dtype, device=errors.device)
    risks = errors.cumsum(0) / answered
    # Sums over the less confident ones and the example itself.
    weights = (1 / answered).flip(0).cumsum(0).flip(0)
    others = risks - (risks / answered).flip(0).cumsum(0).flip(0)

    def of_examples(ordered: Tensor) -> Tensor:
        values = torch.empty_like(ordered)
        values[order] = ordered
        # Equally confident examples are exchangeable.
        return mean_of_equals(confidences, values)

    influence = of_examples(others) + (1 - right) * of_examples(weights)
    return Mean(aurc(probs, labels).item(), influence, lowest=0)


_NONE = "None: no interval is known that holds the truth as often as it promises."
_WILSON = "Where the share among many test examples lies (Wilson)."

OF_PROBS = (
    Metric(
        "accuracy",
        "Accuracy",
        "Share of examples whose most probable class is the label.",
        share_of(accuracy),
        "higher",
        interval=_WILSON,
    ),
    Metric(
        "nll",
        "NLL",
        "Mean negative log-probability of the label: how surprising the truth is.",
        mean_of(nll),
        unit="nats",
    ),
    Metric(
        "brier",
        "Brier score",
        "Mean squared distance of the probabilities from the label, between 0 and 2.",
        mean_of(brier),
    ),
    Metric(
        "overconfidence",
        "Over-confidence",
        "Mean confidence less accuracy: above 0 too sure, below 0 not sure enough.",
        _of_overconfidence,
        "ideal",
    ),
    Metric(
        "ece",
        "ECE",
        "Mean gap of confidence and accuracy over 15 equal intervals of the confidence.",
        alone(ece),
        interval=_NONE,
    ),
    Metric(
        "mean_entropy",
        "Mean entropy",
        "How uncertain the predictive says that it is.",
        _of_entropy,
        None,
        unit="nats",
    ),
    Metric(
        "ece_equal_mass",
        "ECE (equal mass)",
        "Mean gap of confidence and accuracy over 15 groups of equally many examples.",
        alone(ece_equal_mass),
        interval=_NONE,
    ),
    Metric(
        "smooth_ece",
        "Smooth ECE",
        "Gap of confidence and accuracy after smoothing, with no bins to choose.",
        alone(smooth_ece),
        interval=_NONE,
    ),
    Metric(
        "mce",
        "MCE",
        "Largest gap of confidence and accuracy of 15 bins, often that of the smallest bin.",
        alone(mce),
        interval=_NONE,
    ),
    Metric(
        "classwise_ece",
        "Classwise ECE",
        "Mean over the classes of the gap of each class's probability and its frequency.",
        alone(classwise_ece),
        interval=_NONE,
    ),
    Metric(
        "aurc",
        "AURC",
        "Mean error rate where only the most confident examples are answered.",
        _of_aurc,
        interval="Where the area for many test examples lies, to first order a mean (Hall's t).",
    ),
)

# ----------------------------------------------- labels of which several may apply, [n, labels]


def over_labels(statistic: Statistic, shape: torch.Size, times: int = 1) -> Mean:
    """A metric of `n · labels` binary problems, of which examples are drawn.

    Args:
        statistic: A proportion or a mean over all of them.
        shape: `[n, labels]`.
        times: Factor: 1 for the mean over an example's labels.
    """
    if isinstance(statistic, Proportion):
        values, ideal = statistic.holds, None
    else:
        assert isinstance(statistic, Mean)
        values, ideal = statistic.influence, statistic.ideal
    of_examples = times * values.double().view(shape).mean(1)
    lowest = 0 if ideal is None else -float("inf")
    return Mean(times * statistic.value, of_examples, lowest, ideal=ideal)


def _of_exact_match(probs: Tensor, labels: Tensor) -> Statistic:
    # torchmetrics takes seconds to import: only what uses it waits for it.
    from torchmetrics.functional.classification import multilabel_exact_match

    hits = accuracy(probs.flatten(), labels.flatten(), reduction="none").view(probs.shape)
    exact = multilabel_exact_match(probs, labels, probs.shape[1], validate_args=False)
    return Proportion(exact.item(), hits.amin(1))


EXACT_MATCH = Metric(
    "exact_match",
    "Exact match",
    "Share of examples with every label right.",
    _of_exact_match,
    "higher",
    interval=_WILSON,
)

# ------------------------------------------------------------- scores of ID and OOD examples


def _of_auroc(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`auroc` with DeLong's placement values.

    Reference:
        DeLong, DeLong, Clarke-Pearson. Comparing the areas under two or more correlated receiver
        operating characteristic curves. Biometrics, 1988.
    """
    above_id = (_share_below(scores_id, scores_ood) + _share_upto(scores_id, scores_ood)) / 2
    below = (_share_below(scores_ood, scores_id) + _share_upto(scores_ood, scores_id)) / 2
    return Area(auroc(scores_id, scores_ood).item(), (1 - below, above_id))


def _of_aupr(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    of_ood, of_id = _average_precision(scores_ood, scores_id)
    return Area(aupr(scores_id, scores_ood).item(), (of_id, of_ood))


def _of_aupr_in(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    return Area(aupr_in(scores_id, scores_ood).item(), _average_precision(-scores_id, -scores_ood))


def _average_precision(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """The influence of positive and negative examples on the mean precision.

    With A and B the shares of positive and negative examples at or above a threshold and λ how many
    negative ones there are for a positive one, the precision is `A / (A + λB)`. A positive example
    adds the precision at its own score, and each example what it changes in A or B of the others'.
    """
    ratio = len(negative) / len(positive)
    at_least = 1 - _share_below(positive, positive)
    false = ratio * (1 - _share_below(negative, positive))
    precision = at_least / (at_least + false)
    by_true = false / (at_least + false).square()
    by_false = -ratio * at_least / (at_least + false).square()
    of_positive = precision + _sum_upto(positive, by_true, positive) / len(positive)
    return of_positive, _sum_upto(positive, by_false, negative) / len(positive)


def _of_fpr95(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`fpr95` with its influence function.

    An OOD example below the threshold moves it down by 1/n of the OOD examples, and the false
    alarms along the ROC curve. The slope there is that between the thresholds that find two
    standard errors more and fewer of the OOD examples.
    """
    ordered, m = scores_ood.sort().values, len(scores_ood)
    missed = 0.05 + 1e-8
    step = 2 * (missed * (1 - missed) / m) ** 0.5
    low, high = max(0.0, missed - step), min(1.0, missed + step)
    threshold, lower, upper = (ordered[min(m - 1, int(q * m))] for q in (missed, low, high))
    lost = ((scores_id >= lower).double().mean() - (scores_id >= upper).double().mean()).item()
    influences = (scores_id >= threshold).double(), (scores_ood < threshold).double()
    slope = lost / (high - low)
    return Area(fpr95(scores_id, scores_ood).item(), (influences[0], slope * influences[1]))


def _share_below(
    reference: Float[Tensor, " m"], values: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """The share of a set that lies below each value."""
    return _rank(reference, values, right=False)


def _share_upto(reference: Float[Tensor, " m"], values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The share of a set that lies below each value or at it."""
    return _rank(reference, values, right=True)


def _rank(reference: Tensor, values: Tensor, *, right: bool) -> Float[Tensor, " n"]:
    places = torch.searchsorted(reference.sort().values, values.contiguous(), right=right)
    return places.double() / len(reference)


def _sum_upto(keys: Tensor, weights: Tensor, values: Tensor) -> Float[Tensor, " n"]:
    """For each value the sum of the weights whose keys are at most it."""
    ordered, order = keys.sort()
    sums = torch.nn.functional.pad(weights[order].cumsum(0), (1, 0))
    return sums[torch.searchsorted(ordered, values.contiguous(), right=True)]


_AREA = (
    "Where the value for many examples of both kinds lies, by the normal approximation of its logit"
)
_OOD = "out-of-distribution examples"

OF_SCORES = (
    Metric(
        "auroc",
        "AUROC",
        f"Probability that {_OOD} have a higher score than examples of the test set.",
        _of_auroc,
        "higher",
        interval=f"{_AREA} (DeLong).",
    ),
    Metric(
        "aupr_out",
        "AUPR (out)",
        f"Mean precision in finding {_OOD}; by chance it is their share.",
        _of_aupr,
        "higher",
        interval=f"{_AREA}.",
    ),
    Metric(
        "aupr_in",
        "AUPR (in)",
        "Mean precision in finding examples of the test set; by chance it is their share.",
        _of_aupr_in,
        "higher",
        interval=f"{_AREA}.",
    ),
    Metric(
        "fpr95",
        "FPR95",
        f"Share of the test set taken for OOD where 95 % of the {_OOD} are found.",
        _of_fpr95,
        interval=f"{_AREA}; too narrow near 1 where there are fewer than some 200 {_OOD}.",
    ),
)

# ------------------------------------------- mean, standard deviation, targets of a regression


def per_example(values: Float[Tensor, "n *outputs"]) -> Float[Tensor, " n"]:
    """The mean over the outputs of each example."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _mean_of_targets(values: Callable[..., Tensor], **options: Any) -> Callable[..., Statistic]:
    """The statistic of a mean over all targets."""

    def statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
        found = values(mean, sd, targets, level)
        return Mean(found.mean().item(), per_example(found), **options)

    return statistic


def _of_nll(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    terms = gaussian_nll(mean, sd, targets, reduction="none")
    return of_log_probs(-(terms.flatten(1).sum(1) if terms.ndim > 1 else terms))


def of_log_probs(log_probs: Float[Tensor, " n"]) -> Statistic:
    """The mean of negative log-probabilities, in nats."""
    values = -log_probs.double()
    return Mean(values.mean().item(), values)


def of_rmse(mean: Tensor, targets: Tensor) -> Statistic:
    """`rmse`, the root of a mean."""
    squares = (mean - targets).square().double()
    return Mean(squares.mean().sqrt().item(), per_example(squares), squared=True)


def _of_scaled_error(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    squares = per_example(((mean - targets) / sd).square())
    return Mean(squares.mean().sqrt().item(), squares, squared=True, ideal=1)


def _of_coverage(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    inside = interval_coverage(*gaussian_interval(mean, sd, level), targets, reduction="none")
    shares, covered = per_example(inside), inside.mean().item()
    if inside.numel() == len(inside):
        return Proportion(covered, shares)
    return Mean(covered, shares, lowest=0)


def _of_quantiles(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    error = quantile_calibration_error(gaussian_pit(mean, sd, targets))
    return Alone(error.item(), len(targets))


_UNIT = "units of the target"

OF_GAUSSIANS = (
    Metric(
        "nll",
        "NLL",
        "Mean negative log-density of the targets: how surprising the truth is.",
        _of_nll,
        unit="nats",
    ),
    Metric(
        "rmse",
        "RMSE",
        "Root of the mean squared error.",
        lambda mean, sd, targets, level: of_rmse(mean, targets),
        unit=_UNIT,
        interval="Root of the interval of the mean squared error over many test examples (Hall's "
        "t).",
    ),
    Metric(
        "bias",
        "Bias",
        "Mean of prediction less target, which should be 0; of several outputs over all of them.",
        _mean_of_targets(lambda mean, sd, targets, level: mean - targets, ideal=0),
        "ideal",
        unit=_UNIT,
    ),
    Metric(
        "scaled_error",
        "Error in SDs",
        "Root mean square of the errors in predicted standard deviations: above 1 too narrow, "
        "below 1 too wide.",
        _of_scaled_error,
        "ideal",
        interval="Root of the interval of the mean square over many test examples (Hall's t).",
    ),
    Metric(
        "crps",
        "CRPS",
        "Distance of the predicted distribution from the target; the absolute error if certain.",
        _mean_of_targets(
            lambda mean, sd, targets, level: crps(mean, sd, targets, reduction="none"), lowest=0
        ),
        unit=_UNIT,
    ),
    Metric(
        "coverage",
        "Coverage",
        "Share of targets in the predictive's central interval; it should be the interval's level.",
        _of_coverage,
        "level",
        interval="Where the share among many test examples lies (Wilson for one output).",
    ),
    Metric(
        "width",
        "Interval width",
        "Mean width of the predictive's central interval; narrower is better at equal coverage.",
        _mean_of_targets(
            lambda mean, sd, targets, level: interval_width(
                *gaussian_interval(mean, sd, level), reduction="none"
            ),
            lowest=0,
        ),
        unit=_UNIT,
    ),
    Metric(
        "quantile_calibration_error",
        "Quantile calibration error",
        "Mean gap of quantile levels and the share of targets below these quantiles.",
        _of_quantiles,
        interval=_NONE,
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*OF_GAUSSIANS, *OF_PROBS, EXACT_MATCH, *OF_SCORES)
}
"""The metrics by name, in the order in which they are shown."""
