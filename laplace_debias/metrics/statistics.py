"""A metric of a set of predictions, its confidence interval, and its difference from a reference.

The kind of interval depends on whether the metric is a proportion, a mean (at least to first order)
or an area under a curve. Some metrics have no interval, because none with nominal coverage is
known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from laplace_debias.metrics.clusters import by_example, effective_size, num_independent_rows
from laplace_debias.metrics.intervals import (
    Interval,
    area_interval,
    combined_interval,
    mean_interval,
    paired_proportions_interval,
    proportion_interval,
    quantile_rank_limits,
    student_quantile,
)


@dataclass(frozen=True, eq=False)
class Statistic:
    """A metric of a set of predictions. It has no confidence interval; subclasses add one.

    Attributes:
        value: The metric.
        influence: The contribution of each row to the metric, `[n]`. If there is no interval, only
            the length is used.
        examples: The example of each row, `[n]`, if examples have several rows, such as positions.
            Intervals treat only the examples as independent. None if each row is an example.
    """

    value: float
    influence: Shaped[Tensor, "n *rest"]
    examples: Integer[Tensor, " n"] | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of the set, or the numbers of ID and OOD rows."""
        return (len(self.influence),)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        return Interval(self.value)

    def difference(self, reference: Any, level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples."""
        return Interval(self.value - reference.value)

    def _examples_with(self, reference: "Statistic") -> Integer[Tensor, " n"] | None:
        """Return the example of each row, which only one of two methods may know."""
        return reference.examples if self.examples is None else self.examples


@dataclass(frozen=True, eq=False)
class Proportion(Statistic):
    """The fraction of rows with a property, for which `influence` is 1, otherwise 0."""

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        num_hits = self.influence.double().sum().item()
        size = effective_size(self.influence, self.examples, level)
        low, high = proportion_interval(num_hits * size / len(self.influence), size, level)
        return Interval(self.value, low, high)

    def difference(self, reference: "Proportion", level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples."""
        difference = self.influence - reference.influence
        size = effective_size(difference, self._examples_with(reference), level)
        low, high = paired_proportions_interval(difference, size, level)
        return Interval(self.value - reference.value, low, high)


@dataclass(frozen=True, eq=False)
class Mean(Statistic):
    """A metric that is a mean over rows, at least to first order.

    Attributes:
        lowest: A lower bound of the metric.
        highest: An upper bound of the metric.
        squared: Whether the metric is the root of the mean of `influence`, as for a root mean
            square.
        ideal: Best value of the metric, if neither lower nor higher is always better. Differences
            are then those between the distances from this value.
    """

    lowest: float = -math.inf
    highest: float = math.inf
    squared: bool = False
    ideal: float | None = None

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        influence = by_example(self.influence, self.examples)
        if self.squared:
            low, high = mean_interval(self.value**2, influence, level)
            # Pass `low` and `high` first, because `max` then returns them if they are NaN.
            return Interval(self.value, math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0)))
        low, high = mean_interval(self.value, influence, level)
        return Interval(self.value, max(low, self.lowest), min(high, self.highest))

    def difference(self, reference: "Mean", level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples."""
        examples = self._examples_with(reference)
        influence, reference_influence = self._influence(), reference._influence()
        difference = self.value - reference.value
        ends = mean_interval(
            difference, by_example(influence - reference_influence, examples), level
        )
        if self.ideal is None:
            return Interval(difference, *ends)
        # The sign of each deviation from the ideal value may be uncertain. The difference of the
        # distances is monotonic in the difference and in the sum of the deviations, so its extremes
        # are at ends of their intervals. If both values are near the ideal, the interval is
        # conservative, because it excludes 0 only if both intervals exclude 0.
        total = self.value + reference.value - 2 * self.ideal
        total_ends = mean_interval(
            total, by_example(influence + reference_influence, examples), level
        )
        candidates = [(abs(t + d) - abs(t - d)) / 2 for d in ends for t in total_ends]
        value = abs(self.value - self.ideal) - abs(reference.value - self.ideal)
        return Interval(value, min(candidates), max(candidates))

    def _influence(self) -> Float[Tensor, " n"]:
        """Return the contribution of each row to the value, also if it is a root."""
        if self.squared:
            return self.influence.double() / max(2 * self.value, torch.finfo(torch.float64).tiny)
        return self.influence.double()


@dataclass(frozen=True, eq=False)
class MeanShare(Mean):
    """The mean of a fraction per row, such as the fraction of its labels that are right."""

    lowest: float = 0
    highest: float = 1

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        if self.value not in (0, 1):
            return super().interval(level)
        # All examples have the same fraction, 0 or 1, so the mean is a proportion.
        n = len(by_example(self.influence, self.examples))
        return Interval(self.value, *proportion_interval(self.value * n, n, level))


@dataclass(frozen=True, eq=False)
class Area(Statistic):
    """A quantity in [0, 1] that depends on ID rows (`influence`) and OOD rows.

    Attributes:
        influence_ood: The contribution of each OOD row to the metric.
        examples_ood: The example of each OOD row; None if each row is an example.
    """

    influence_ood: Float[Tensor, " m"]
    examples_ood: Integer[Tensor, " m"] | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ID and OOD rows."""
        return len(self.influence), len(self.influence_ood)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval.

        If the value is near 0 or 1, a small set may contain none of the rare rows whose influence
        is extreme. Therefore, the variance due to each set of n independent rows is increased by
        that of one more row among n, whose influence is 0 or 1 and has the value as its mean.
        """
        influence = by_example(self.influence, self.examples)
        influence_ood = by_example(self.influence_ood, self.examples_ood)
        variance_of_rare_row = max(0.0, self.value * (1 - self.value))
        size = num_independent_rows(self.influence, self.examples)
        size_ood = num_independent_rows(self.influence_ood, self.examples_ood)
        rare_rows = variance_of_rare_row * (1 / size**2 + 1 / size_ood**2)
        half_width = _half_width(influence, influence_ood, level, further_variance=rare_rows)
        smaller_size = min(len(influence), len(influence_ood))
        low, high = area_interval(self.value, half_width, smaller_size, level)
        return Interval(self.value, low, high)

    def difference(self, reference: "Area", level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples."""
        examples_ood = self.examples_ood
        if examples_ood is None:
            examples_ood = reference.examples_ood
        half_width = _half_width(
            by_example(self.influence - reference.influence, self._examples_with(reference)),
            by_example(self.influence_ood - reference.influence_ood, examples_ood),
            level,
        )
        value = self.value - reference.value
        return Interval(value, max(-1.0, value - half_width), min(1.0, value + half_width))


@dataclass(frozen=True, eq=False)
class FalseAlarmRate(Area):
    """The fraction of ID rows whose score is at least a quantile of the scores of OOD rows.

    Attributes:
        scores_id: The scores of the ID rows. `influence` is 1 for false alarms, otherwise 0.
        scores_ood: The scores of the OOD rows.
        threshold: The quantile.
        share_missed: The fraction of OOD rows that lie below the quantile.
    """

    scores_id: Float[Tensor, " n"] = field(kw_only=True)
    scores_ood: Float[Tensor, " m"] = field(kw_only=True)
    threshold: float = field(kw_only=True)
    share_missed: float = field(kw_only=True)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval.

        It combines Wilson's interval for a known quantile with the rates at the ends of an interval
        for the quantile, which holds for every continuous distribution of the scores. If there are
        too few OOD rows for a lower end of the quantile's interval, the rate may be as high as 1.
        """
        size = effective_size(self.influence, self.examples, level)
        at_known_quantile = proportion_interval(self.value * size, size, level)
        at_ends_of_quantile = self._rates_at_ends_of_quantile(level)
        low, high = combined_interval(self.value, at_known_quantile, at_ends_of_quantile)
        return Interval(self.value, low, high)

    def difference(self, reference: "Area", level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples.

        The interval is unknown if there are too few OOD rows for a lower end of the quantile's
        interval.
        """
        lowest_rank, _ = quantile_rank_limits(self.share_missed, self._num_ood(level), level)
        if lowest_rank == 0:
            return Interval(self.value - reference.value)
        return super().difference(reference, level)

    def _num_ood(self, level: float) -> int:
        """Return the number of independent OOD rows that determine the quantile as well."""
        is_missed = (self.scores_ood < self.threshold).double()
        return max(1, int(effective_size(is_missed, self.examples_ood, level)))

    def _rates_at_ends_of_quantile(self, level: float) -> tuple[float, float]:
        """Return the rates at the upper and lower ends of the quantile's confidence interval."""
        ordered = self.scores_ood.sort().values
        num_rows = len(ordered)
        size = self._num_ood(level)
        fewest_below, most_below = quantile_rank_limits(self.share_missed, size, level)
        # Several rows may count as one independent row.
        upper_rank = min(num_rows, math.ceil((most_below + 1) * num_rows / size))
        lowest_rate = self._rate_at(ordered[upper_rank - 1])
        highest_rate = 1.0
        if fewest_below > 0:
            lower_rank = fewest_below * num_rows // size
            highest_rate = self._rate_at(ordered[lower_rank - 1])
        return min(lowest_rate, self.value), max(highest_rate, self.value)

    def _rate_at(self, threshold: Tensor) -> float:
        """Return the fraction of ID rows whose score is at least a threshold."""
        return (self.scores_id >= threshold).double().mean().item()


def with_examples(
    statistics: Mapping[str, Statistic], examples: Integer[Tensor, " n"] | None
) -> dict[str, Statistic]:
    """Set the example of each row; None if each row is an example."""
    return {name: replace(statistic, examples=examples) for name, statistic in statistics.items()}


def _half_width(
    influence: Tensor, influence_ood: Tensor, level: float, further_variance: float = 0.0
) -> float:
    """Compute the half-width of a t interval for a quantity that depends on two sets.

    The degrees of freedom are those of Welch and Satterthwaite. The half-width is NaN if a set has
    fewer than two examples.

    Args:
        influence: The influence of each ID example.
        influence_ood: The influence of each OOD example.
        level: The confidence level.
        further_variance: A variance that is added to that of the quantity.

    Reference:
        Welch. The generalization of "Student's" problem when several different population variances
        are involved. Biometrika, 1947.
    """
    sizes = len(influence), len(influence_ood)
    if min(sizes) < 2:
        return math.nan
    variances = [
        values.double().var().item() / len(values) for values in (influence, influence_ood)
    ]
    variance = sum(variances)
    degrees_of_freedom: float = min(sizes) - 1
    if variance > 0:
        shares = (part / variance for part in variances)
        degrees_of_freedom = 1 / sum(
            share**2 / (size - 1) for share, size in zip(shares, sizes, strict=True)
        )
    return student_quantile(level, degrees_of_freedom) * math.sqrt(variance + further_variance)
