"""The definitions of all metrics: their names, units and statistics."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.calibration import (
    classwise_ece,
    confidence_and_right,
    ece,
    ece_equal_mass,
    error_probability,
    mce,
    smooth_ece,
)
from laplace_debias.metrics.checks import check_classification
from laplace_debias.metrics.classification import accuracy, brier, nll, overconfidence
from laplace_debias.metrics.metric import (
    AREA_INTERVAL,
    NO_INTERVAL,
    ROOT_INTERVAL,
    SHARE_INTERVAL,
    Metric,
)
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
from laplace_debias.metrics.selective import mean_of_equals, risk_coverage_curve
from laplace_debias.metrics.statistics import (
    Area,
    FalseAlarmRate,
    Mean,
    MeanShare,
    Proportion,
    Statistic,
)

# ------------------------------------------------------------- probabilities and labels


def proportion_statistic(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Statistic]:
    """Build the statistic of a metric that is the fraction of examples with a property."""
    return lambda probs, labels: Proportion(
        function(probs, labels).item(), function(probs, labels, reduction="none")
    )


def mean_statistic(
    function: Callable[..., Tensor], **options: Any
) -> Callable[[Tensor, Tensor], Statistic]:
    """Build the statistic of a metric that is a mean over examples."""
    return lambda probs, labels: Mean(
        function(probs, labels).item(), function(probs, labels, reduction="none"), **options
    )


def without_interval(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Statistic]:
    """Build the statistic of a metric for which no interval with nominal coverage is known."""
    return lambda probs, labels: Statistic(function(probs, labels).item(), labels)


def _aurc_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """Compute `aurc` and its influences; to first order, it is a mean over the examples.

    Let R be the risk and S the coverage at each example's confidence. The influence of an example
    with error e on `E[R]` is R plus the mean of `(e - R)/S` over the examples that are at most as
    confident as this example.
    """
    probs, labels = check_classification(probs, labels)
    _, right = confidence_and_right(probs, labels)
    error_probabilities = error_probability(probs)
    order = error_probabilities.argsort()
    risks = risk_coverage_curve(probs, labels).risk
    num_answered = torch.arange(1, len(risks) + 1, dtype=risks.dtype, device=risks.device)
    # Both sums are over the example itself and all less confident examples.
    error_weights = (1 / num_answered).flip(0).cumsum(0).flip(0)
    offsets = risks - (risks / num_answered).flip(0).cumsum(0).flip(0)

    def by_example(by_confidence: Tensor) -> Tensor:
        """Reorder values from the order of decreasing confidence to that of the examples."""
        values = torch.empty_like(by_confidence)
        values[order] = by_confidence
        # Average the values of equally confident examples, because these examples are exchangeable.
        return mean_of_equals(error_probabilities, values)

    influence = by_example(offsets) + (1 - right) * by_example(error_weights)
    return Mean(risks.mean().item(), influence, lowest=0, highest=1)


CLASSIFICATION_METRICS = (
    Metric(
        "accuracy",
        "Accuracy",
        proportion_statistic(accuracy),
        "higher",
        interval=SHARE_INTERVAL,
        meaning="Fraction of examples whose most probable class is the label.",
        is_main=True,
        over_labels="mean",
    ),
    Metric(
        "nll",
        "NLL",
        mean_statistic(nll, lowest=0),
        unit="nats",
        meaning="Mean negative log-probability of the label.",
        is_main=True,
        over_labels="sum",
    ),
    Metric(
        "brier",
        "Brier score",
        mean_statistic(brier, lowest=0, highest=2),
        meaning="Mean squared distance between probabilities and one-hot label, between 0 and 2.",
        is_main=True,
        over_labels="mean",
    ),
    Metric(
        "overconfidence",
        "Over-confidence",
        mean_statistic(overconfidence, lowest=-1, highest=1, ideal=0),
        "ideal",
        meaning="Mean confidence minus accuracy. Positive values mean over-confidence.",
        is_main=True,
        over_labels="mean",
    ),
    Metric(
        "ece",
        "ECE",
        without_interval(ece),
        interval=NO_INTERVAL,
        meaning="Mean difference between confidence and accuracy in 15 bins of equal width.",
        is_main=True,
        over_labels="mean",
    ),
    Metric(
        "mean_entropy",
        "Mean entropy",
        lambda probs, labels: _mean(entropy(probs), lowest=0),
        better=None,
        unit="nats",
        meaning="Mean entropy of the predictive distribution.",
        over_labels="sum",
    ),
    Metric(
        "ece_equal_mass",
        "ECE (equal mass)",
        without_interval(ece_equal_mass),
        interval=NO_INTERVAL,
        meaning="Mean difference between confidence and accuracy in 15 bins of equal size.",
    ),
    Metric(
        "smooth_ece",
        "Smooth ECE",
        without_interval(smooth_ece),
        interval=NO_INTERVAL,
        meaning="Difference between confidence and accuracy after smoothing. It needs no bins.",
    ),
    Metric(
        "mce",
        "MCE",
        without_interval(mce),
        interval=NO_INTERVAL,
        meaning="Largest difference between confidence and accuracy in 15 bins.",
    ),
    Metric(
        "classwise_ece",
        "Classwise ECE",
        without_interval(classwise_ece),
        interval=NO_INTERVAL,
        meaning="Difference between probability and frequency of a class, averaged over classes.",
    ),
    Metric(
        "aurc",
        "AURC",
        _aurc_statistic,
        meaning=(
            "Error rate on the most confident examples, averaged over the fraction of examples "
            "that is kept."
        ),
        is_main=True,
    ),
)

# ------------------------------------------------------ several labels per example, [n, labels]


def over_labels(statistic: Statistic, shape: torch.Size, num_terms: int = 1) -> Statistic:
    """Reduce a statistic of `n · labels` binary problems to one value per example.

    Only the examples, and not their labels, are independent draws. `num_terms` is the number of
    labels if the metric is a sum over them, and 1 if it is a mean.
    """
    influence = statistic.influence.view(shape)
    if isinstance(statistic, Proportion):
        assert num_terms == 1
        return MeanShare(statistic.value, influence.double().mean(1))
    if not isinstance(statistic, Mean):
        return Statistic(statistic.value, influence)
    return Mean(
        num_terms * statistic.value,
        num_terms * influence.double().mean(1),
        lowest=num_terms * statistic.lowest,
        highest=num_terms * statistic.highest,
        ideal=statistic.ideal,
    )


def _exact_match_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    # Import torchmetrics only here, because its import takes seconds.
    from torchmetrics.functional.classification import multilabel_exact_match

    hits = accuracy(probs.flatten(), labels.flatten(), reduction="none").view(probs.shape)
    exact = multilabel_exact_match(probs, labels, probs.shape[1], validate_args=False)
    return Proportion(exact.item(), hits.amin(1))


EXACT_MATCH = Metric(
    "exact_match",
    "Exact match",
    _exact_match_statistic,
    "higher",
    interval=SHARE_INTERVAL,
    meaning="Fraction of examples with every label right.",
)

# ------------------------------------------------------------- scores of ID and OOD examples


def _auroc_statistic(
    scores_id: Tensor,
    scores_ood: Tensor,
    examples: Tensor | None = None,
    examples_ood: Tensor | None = None,
) -> Area:
    """Compute `auroc` and its influences, which are DeLong's placement values.

    Reference:
        DeLong, DeLong, Clarke-Pearson. Comparing the areas under two or more correlated receiver
        operating characteristic curves. Biometrics, 1988.
    """
    ood_below = _share_below_or_tied(scores_ood, scores_id)
    id_below = _share_below_or_tied(scores_id, scores_ood)
    value = auroc(scores_id, scores_ood).item()
    return Area(value, 1 - ood_below, id_below, examples=examples, examples_ood=examples_ood)


def _aupr_statistic(
    scores_id: Tensor,
    scores_ood: Tensor,
    examples: Tensor | None = None,
    examples_ood: Tensor | None = None,
) -> Area:
    influence_ood, influence_id = _average_precision_influences(scores_ood, scores_id)
    value = aupr(scores_id, scores_ood).item()
    return Area(value, influence_id, influence_ood, examples=examples, examples_ood=examples_ood)


def _aupr_in_statistic(
    scores_id: Tensor,
    scores_ood: Tensor,
    examples: Tensor | None = None,
    examples_ood: Tensor | None = None,
) -> Area:
    influence_id, influence_ood = _average_precision_influences(-scores_id, -scores_ood)
    value = aupr_in(scores_id, scores_ood).item()
    return Area(value, influence_id, influence_ood, examples=examples, examples_ood=examples_ood)


def _average_precision_influences(
    positive: Tensor, negative: Tensor
) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"]]:
    """Compute the influence of each positive and negative example on the average precision.

    Let A and B be the fractions of positive and negative examples at or above a threshold, and λ
    the number of negative examples per positive example. The precision is `A / (A + λB)`. A
    positive example contributes the precision at its own score. In addition, every example changes
    A or B, and therefore the precision at all scores up to its own, with the derivatives
    `λB / (A + λB)²` and `-λA / (A + λB)²`.
    """
    ratio = len(negative) / len(positive)  # λ
    A = 1 - _share_below(positive, positive)
    B = 1 - _share_below(negative, positive)
    precision = A / (A + ratio * B)
    positive_slopes = ratio * B / (A + ratio * B).square()
    negative_slopes = -ratio * A / (A + ratio * B).square()
    changes = _sum_up_to(positive, positive_slopes, positive) / len(positive)
    return precision + changes, _sum_up_to(positive, negative_slopes, negative) / len(positive)


def _fpr95_statistic(
    scores_id: Tensor,
    scores_ood: Tensor,
    examples: Tensor | None = None,
    examples_ood: Tensor | None = None,
) -> Area:
    """Compute `fpr95` with its influence function, on which only differences are based.

    An OOD example below the threshold shifts the threshold down by a quantile of 1/n, where n is
    the number of OOD examples. This changes the false-positive rate along the ROC curve. The slope
    of the curve is estimated between two thresholds, which detect two standard errors more and two
    standard errors fewer of the OOD examples.
    """
    ordered = scores_ood.sort().values
    num_ood = len(scores_ood)
    num_examples = num_ood if examples_ood is None else len(examples_ood.unique())

    def threshold_that_misses(share: float) -> Tensor:
        """Return the score below which this fraction of the OOD rows lies."""
        return ordered[min(num_ood - 1, int(share * num_ood))]

    # Because of the margin, rounding errors do not turn a whole number 0.05 · n into the next lower
    # one.
    missed = 0.05 + 1e-8
    two_standard_errors = 2 * (missed * (1 - missed) / num_examples) ** 0.5
    fewest_missed = max(0.0, missed - two_standard_errors)
    most_missed = min(1.0, missed + two_standard_errors)
    alarms_if_fewest = (scores_id >= threshold_that_misses(fewest_missed)).double().mean()
    alarms_if_most = (scores_id >= threshold_that_misses(most_missed)).double().mean()
    slope = (alarms_if_fewest - alarms_if_most).item() / (most_missed - fewest_missed)
    threshold = threshold_that_misses(missed)
    is_alarm = (scores_id >= threshold).double()
    is_missed = (scores_ood < threshold).double()
    value = fpr95(scores_id, scores_ood).item()
    return FalseAlarmRate(
        value,
        is_alarm,
        slope * is_missed,
        examples=examples,
        examples_ood=examples_ood,
        scores_id=scores_id,
        scores_ood=scores_ood,
        threshold=threshold.item(),
        share_missed=0.05,
    )


def _share_below(
    reference: Float[Tensor, " m"], values: Float[Tensor, " n"], with_equal: bool = False
) -> Float[Tensor, " n"]:
    """Compute the fraction of `reference` below, or `with_equal` at or below, each value."""
    counts = torch.searchsorted(reference.sort().values, values.contiguous(), right=with_equal)
    return counts.double() / len(reference)


def _share_below_or_tied(
    reference: Float[Tensor, " m"], values: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Compute the fraction of `reference` below each value; equal numbers count half."""
    below = _share_below(reference, values)
    return (below + _share_below(reference, values, with_equal=True)) / 2


def _sum_up_to(keys: Tensor, weights: Tensor, values: Tensor) -> Float[Tensor, " n"]:
    """For each value, sum the weights of all keys that are at most this value."""
    ordered, order = keys.sort()
    sums = torch.nn.functional.pad(weights[order].cumsum(0), (1, 0))
    return sums[torch.searchsorted(ordered, values.contiguous(), right=True)]


OOD_METRICS = (
    Metric(
        "auroc",
        "AUROC",
        _auroc_statistic,
        "higher",
        interval=AREA_INTERVAL,
        meaning="Probability that an OOD example has a higher score than a test example.",
    ),
    Metric(
        "aupr_out",
        "AUPR (out)",
        _aupr_statistic,
        "higher",
        interval=AREA_INTERVAL,
        meaning=(
            "Mean precision with which OOD examples are detected. For a random score, it equals "
            "the fraction of OOD examples."
        ),
    ),
    Metric(
        "aupr_in",
        "AUPR (in)",
        _aupr_in_statistic,
        "higher",
        interval=AREA_INTERVAL,
        meaning=(
            "Mean precision with which test examples are detected. For a random score, it equals "
            "the fraction of test examples."
        ),
    ),
    Metric(
        "fpr95",
        "FPR95",
        _fpr95_statistic,
        interval=(
            "Wilson's interval, combined with a distribution-free interval for the threshold. "
            "With fewer than 72 OOD examples, it reaches up to 1 at the level of 95 %."
        ),
        meaning="Fraction of test examples mistaken for OOD if 95 % of OOD examples are detected.",
    ),
)

# ------------------------------------------- mean, standard deviation, targets of a regression


def per_example(values: Float[Tensor, "n *outputs"]) -> Float[Tensor, " n"]:
    """Average over the outputs of each example."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _mean(values: Float[Tensor, "n *outputs"], **options: Any) -> Mean:
    return Mean(values.mean().item(), per_example(values), **options)


def _gaussian_nll_statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    terms = gaussian_nll(mean, sd, targets, reduction="none")
    if terms.ndim > 1:
        terms = terms.flatten(1).sum(1)
    return nll_statistic(-terms)


def nll_statistic(log_probs: Float[Tensor, " n"]) -> Statistic:
    """Build the statistic of the mean negative log-probability in nats."""
    return _mean(-log_probs.double())


def rmse_statistic(mean: Tensor, targets: Tensor) -> Statistic:
    """Build the statistic of `rmse`, the root of a mean."""
    squares = (mean - targets).square().double()
    return Mean(squares.mean().sqrt().item(), per_example(squares), squared=True)


def _scaled_error_statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    squares = per_example(((mean - targets) / sd).square())
    return Mean(squares.mean().sqrt().item(), squares, squared=True, ideal=1)


def width_statistic(values: Float[Tensor, "n *outputs"]) -> Statistic:
    """Build the statistic of the mean width of intervals."""
    return _mean(values, lowest=0)


def _width_statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    low, high = gaussian_interval(mean, sd, level)
    return width_statistic(interval_width(low, high, reduction="none"))


def _coverage_statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    low, high = gaussian_interval(mean, sd, level)
    return share_statistic(interval_coverage(low, high, targets, reduction="none"))


def share_statistic(inside: Float[Tensor, "n *outputs"]) -> Statistic:
    """Build the statistic of the fraction of targets for which `inside` is 1, not 0."""
    if inside.numel() == len(inside):
        return Proportion(inside.mean().item(), per_example(inside))
    return MeanShare(inside.mean().item(), per_example(inside))


def _quantile_statistic(mean: Tensor, sd: Tensor, targets: Tensor, level: float) -> Statistic:
    return Statistic(quantile_calibration_error(gaussian_pit(mean, sd, targets)).item(), targets)


TARGET_UNIT = "units of the target"
"""The unit of a metric that is proportional to the scale of the targets."""

REGRESSION_METRICS = (
    Metric(
        "nll",
        "NLL",
        _gaussian_nll_statistic,
        unit="nats",
        meaning="Mean negative log-probability of the label.",
        is_main=True,
    ),
    Metric(
        "rmse",
        "RMSE",
        lambda m, sd, y, level: rmse_statistic(m, y),
        unit=TARGET_UNIT,
        interval=ROOT_INTERVAL,
        meaning="Root of the mean squared error.",
        is_main=True,
    ),
    Metric(
        "bias",
        "Bias",
        lambda m, sd, y, level: _mean(m - y, ideal=0),
        "ideal",
        unit=TARGET_UNIT,
        meaning="Mean of prediction minus target over all outputs. It should be 0.",
        is_main=True,
    ),
    Metric(
        "scaled_error",
        "Error in SDs",
        _scaled_error_statistic,
        "ideal",
        interval=ROOT_INTERVAL,
        meaning="Root mean square of error / predicted standard deviation. It should be 1.",
        is_main=True,
    ),
    Metric(
        "crps",
        "CRPS",
        lambda m, sd, y, level: _mean(crps(m, sd, y, reduction="none"), lowest=0),
        unit=TARGET_UNIT,
        meaning=(
            "Continuous ranked probability score: the distance between the predicted distribution "
            "and the target."
        ),
        is_main=True,
    ),
    Metric(
        "coverage",
        "Coverage",
        _coverage_statistic,
        "level",
        interval=SHARE_INTERVAL,
        meaning=(
            "Fraction of targets inside their central interval. It should equal the level of the "
            "interval."
        ),
        is_main=True,
    ),
    Metric(
        "width",
        "Interval width",
        _width_statistic,
        unit=TARGET_UNIT,
        meaning="Mean width of the central interval. Narrower is better if the coverage is equal.",
    ),
    Metric(
        "quantile_calibration_error",
        "Quantile calibration error",
        _quantile_statistic,
        interval=NO_INTERVAL,
        meaning=(
            "Mean difference between the level of a quantile and the fraction of targets below "
            "this quantile."
        ),
    ),
)

MEAN_ABSOLUTE_ERROR = Metric(
    "mae",
    "MAE",
    lambda m, sd, y, level: _mean((m - y).abs().double(), lowest=0),
    unit=TARGET_UNIT,
    meaning="Mean absolute difference between prediction and target.",
    is_main=True,
)
_MOMENTS = ("rmse", "bias", "scaled_error")
MOMENT_METRICS = (
    *(metric for metric in REGRESSION_METRICS if metric.name in _MOMENTS),
    MEAN_ABSOLUTE_ERROR,
)
"""Metrics of predicted numbers that need only the predictive mean and standard deviation."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *REGRESSION_METRICS,
        MEAN_ABSOLUTE_ERROR,
        *CLASSIFICATION_METRICS,
        EXACT_MATCH,
        *OOD_METRICS,
    )
}
"""All metrics by name, in the order in which they are shown."""
