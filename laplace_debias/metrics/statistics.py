"""A metric of one set of predictions: its value, its interval, its difference to another's.

Which kind of interval it has depends on what the metric is: a proportion, (to first order) a mean,
or an area under a curve. Of some no interval is known that holds what it promises: they have none.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.intervals import (
    Interval,
    normal_quantile,
    of_area,
    of_mean,
    of_paired_proportions,
    of_proportion,
)


class Statistic(ABC):
    """One metric of one set of predictions."""

    value: float
    influence: Float[Tensor, " n"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of: of one set, or of in- and out-of-distribution."""
        return (len(self.influence),)

    @abstractmethod
    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""

    @abstractmethod
    def difference(self, other: Any, level: float) -> Interval:
        """This minus another method's statistic of the same metric on the same examples."""


@dataclass(frozen=True, eq=False)
class Proportion(Statistic):
    """The share of examples with a property; `influence` is 1 or 0 of each."""

    value: float
    influence: Float[Tensor, " n"]

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
    """A mean over examples, or what is one to first order.

    Attributes:
        value: The metric.
        influence: How much each example contributes, `[n]`: for a mean its value.
        lowest: A bound of the metric from below.
        squared: Whether `influence` is that of the metric's square, as of a root mean square.
        ideal: Best value of the metric, where neither lower nor higher is better: differences are
            then of the distances from it.
    """

    value: float
    influence: Float[Tensor, " n"]
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
        value = self._compared - other._compared
        return Interval(value, *of_mean(value, self._linear - other._linear, level))

    @property
    def _compared(self) -> float:
        return self.value if self.ideal is None else abs(self.value - self.ideal)

    @property
    def _linear(self) -> Float[Tensor, " n"]:
        """How much each example contributes to what is compared, to first order."""
        slope = 1.0
        if self.squared:
            slope = 1 / max(2 * self.value, torch.finfo(torch.float64).tiny)
        if self.ideal is not None and self.value < self.ideal:
            slope = -slope
        return self.influence.double() * slope


@dataclass(frozen=True, eq=False)
class Area(Statistic):
    """A quantity in [0, 1] that compares two sets of examples, each with its influences."""

    value: float
    influences: tuple[Float[Tensor, " n"], Float[Tensor, " m"]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return tuple(len(influence) for influence in self.influences)

    def interval(self, level: float) -> Interval:
        """The value with its confidence interval."""
        error = _standard_error(self.influences)
        return Interval(self.value, *of_area(self.value, error, min(self.sizes), level))

    def difference(self, other: "Area", level: float) -> Interval:
        """This minus another method's, on the same examples."""
        pairs = zip(self.influences, other.influences, strict=True)
        half = normal_quantile(level) * _standard_error([mine - its for mine, its in pairs])
        value = self.value - other.value
        return Interval(value, max(-1.0, value - half), min(1.0, value + half))


def _standard_error(influences: Sequence[Tensor]) -> float:
    if min(map(len, influences)) < 2:
        return math.nan
    return math.sqrt(sum(part.double().var().item() / len(part) for part in influences))


@dataclass(frozen=True, eq=False)
class Alone(Statistic):
    """A metric without an interval."""

    value: float
    num_examples: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return (self.num_examples,)

    def interval(self, level: float) -> Interval:
        """The value, without ends."""
        return Interval(self.value)

    def difference(self, other: "Alone", level: float) -> Interval:
        """This minus another method's, without ends."""
        return Interval(self.value - other.value)
