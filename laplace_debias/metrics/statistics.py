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

from laplace_debias.metrics.clusters import by_example, effective_size
from laplace_debias.metrics.intervals import (
    Interval,
    area_interval,
    mean_interval,
    normal_quantile,
    paired_proportions_interval,
    proportion_interval,
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
        """The value with its confidence interval."""
        influence = by_example(self.influence, self.examples)
        influence_ood = by_example(self.influence_ood, self.examples_ood)
        error = _standard_error(influence, influence_ood)
        smaller_size = min(len(influence), len(influence_ood))
        low, high = area_interval(self.value, error, smaller_size, level)
        return Interval(self.value, low, high)

    def difference(self, reference: "Area", level: float) -> Interval:
        """This metric minus a reference method's metric on the same examples."""
        examples_ood = self.examples_ood
        if examples_ood is None:
            examples_ood = reference.examples_ood
        error = _standard_error(
            by_example(self.influence - reference.influence, self._examples_with(reference)),
            by_example(self.influence_ood - reference.influence_ood, examples_ood),
        )
        half_width = normal_quantile(level) * error
        value = self.value - reference.value
        return Interval(value, max(-1.0, value - half_width), min(1.0, value + half_width))


def with_examples(
    statistics: Mapping[str, Statistic], examples: Integer[Tensor, " n"] | None
) -> dict[str, Statistic]:
    """Set the example of each row; None if each row is an example."""
    return {name: replace(statistic, examples=examples) for name, statistic in statistics.items()}


def _standard_error(*influences: Tensor) -> float:
    if min(map(len, influences)) < 2:
        return math.nan
    variances = (influence.double().var().item() / len(influence) for influence in influences)
    return math.sqrt(sum(variances))
