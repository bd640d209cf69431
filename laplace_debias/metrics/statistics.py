"""A metric of one set of predictions: its value, its interval, its difference to another's.

Which kind of interval it has depends on what the metric is: a proportion, (to first order) a mean,
or an area under a curve. Of some no interval is known that holds what it promises: they have none.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from laplace_debias.metrics.intervals import (
    Interval,
    normal_quantile,
    of_area,
    of_mean,
    of_paired_proportions,
    of_proportion,
)


@dataclass(frozen=True, eq=False)
class Statistic:
    """One metric of one set of predictions, of which no interval is known.

    Attributes:
        value: The metric.
        influence: How much each example contributes, `[n]`; without an interval only n counts.
    """

    value: float
    influence: Shaped[Tensor, "n *rest"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of: of one set, or of in- and out-of-distribution."""
        return (len(self.influence),)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        return Interval(self.value)

    def difference(self, other: Any, level: float) -> Interval:
        """This minus another method's statistic of the same metric on the same examples."""
        return Interval(self.value - other.value)


@dataclass(frozen=True, eq=False)
class Proportion(Statistic):
    """The share of examples with a property; `influence` is 1 or 0 of each."""

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        ends = of_proportion(self.influence.double().sum().item(), len(self.influence), level)
        return Interval(self.value, *ends)

    def difference(self, other: "Proportion", level: float) -> Interval:
        """This minus another method's, on the same examples."""
        ends = of_paired_proportions(self.influence - other.influence, level)
        return Interval(self.value - other.value, *ends)


@dataclass(frozen=True, eq=False)
class Mean(Statistic):
    """A mean over examples, or what is one to first order; `influence` are the values of a mean.

    Attributes:
        lowest: A bound of the metric from below.
        squared: Whether `influence` is that of the metric's square, as of a root mean square.
        ideal: Best value of the metric, where neither lower nor higher is better: differences are
            then of the distances from it.
    """

    lowest: float = -math.inf
    squared: bool = False
    ideal: float | None = None

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        if self.squared:
            low, high = of_mean(self.value**2, self.influence, level)
            return Interval(self.value, math.sqrt(max(0.0, low)), math.sqrt(max(0.0, high)))
        low, high = of_mean(self.value, self.influence, level)
        return Interval(self.value, max(low, self.lowest), high)

    def difference(self, other: "Mean", level: float) -> Interval:
        """This minus another method's, on the same examples."""
        (mine, my_influence), (its, its_influence) = self._compared(), other._compared()
        return Interval(mine - its, *of_mean(mine - its, my_influence - its_influence, level))

    def _compared(self) -> tuple[float, Float[Tensor, " n"]]:
        """The number compared, and how much each example contributes to it, to first order."""
        slope = 1 / max(2 * self.value, torch.finfo(torch.float64).tiny) if self.squared else 1.0
        if self.ideal is None:
            return self.value, self.influence.double() * slope
        slope = -slope if self.value < self.ideal else slope
        return abs(self.value - self.ideal), self.influence.double() * slope


@dataclass(frozen=True, eq=False)
class Area(Statistic):
    """A quantity in [0, 1] that compares two sets of examples; `influence` is of the first."""

    of_ood: Float[Tensor, " m"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return len(self.influence), len(self.of_ood)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        error = _standard_error(self.influence, self.of_ood)
        return Interval(self.value, *of_area(self.value, error, min(self.sizes), level))

    def difference(self, other: "Area", level: float) -> Interval:
        """This minus another method's, on the same examples."""
        error = _standard_error(self.influence - other.influence, self.of_ood - other.of_ood)
        half, value = normal_quantile(level) * error, self.value - other.value
        return Interval(value, max(-1.0, value - half), min(1.0, value + half))


def _standard_error(*influences: Tensor) -> float:
    if min(map(len, influences)) < 2:
        return math.nan
    return math.sqrt(sum(part.double().var().item() / len(part) for part in influences))
