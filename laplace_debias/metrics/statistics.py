"""A metric of one set of predictions: its value, its interval, its difference to another's.

Which kind of interval it has depends on what the metric is: a proportion, (to first order) a mean,
an area under a curve, or a sum over bins, of which only resampling tells the spread.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.intervals import (
    Interval,
    normal_quantile,
    of_area,
    of_mean,
    of_paired_proportions,
    of_proportion,
    student_quantile,
)

_COUNTS_AT_ONCE = 2**23


@dataclass(frozen=True)
class Sampling:
    """How intervals are made.

    Attributes:
        level: Coverage aimed at.
        num_resamples: Draws of the examples with replacement, for metrics that need them.
        seed: Of these draws: the same for all metrics and methods, so that differences are paired.
    """

    level: float = 0.95
    num_resamples: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.num_resamples < 2:
            raise ValueError(
                f"`num_resamples` is {self.num_resamples}; expected at least 2, for example 500."
            )

    def counts(self, sizes: Sequence[int], device: torch.device) -> Iterator[list[Tensor]]:
        """How often each draw has each example, `[draws, n]` for each set, float32, in chunks."""
        generator = torch.Generator().manual_seed(self.seed)
        chunk = max(1, _COUNTS_AT_ONCE // max(sizes))
        for start in range(0, self.num_resamples, chunk):
            draws = min(chunk, self.num_resamples - start)
            yield [resampled_counts(draws, size, generator).to(device) for size in sizes]


def resampled_counts(
    draws: int, size: int, generator: torch.Generator | None
) -> Float[Tensor, "draws size"]:
    """How often each of `size` examples is among as many drawn with replacement."""
    device = None if generator is None else generator.device
    chosen = torch.randint(size, (draws, size), generator=generator, device=device)
    counts = torch.zeros(draws, size, dtype=torch.float32, device=device)
    return counts.scatter_add_(1, chosen, counts.new_ones(()).expand(draws, size))


class Statistic(ABC):
    """One metric of one set of predictions."""

    value: float

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of: of one set, or of in- and out-of-distribution."""

    @abstractmethod
    def interval(self, how: Sampling) -> Interval:
        """The value with its confidence interval."""

    @abstractmethod
    def difference(self, other: Any, how: Sampling) -> Interval:
        """This minus another method's statistic of the same metric on the same examples."""


@dataclass(frozen=True, eq=False)
class Proportion(Statistic):
    """The share of examples with a property.

    Attributes:
        value: The share.
        holds: 1 or 0 of each example, `[n]`.
    """

    value: float
    holds: Float[Tensor, " n"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return (len(self.holds),)

    def interval(self, how: Sampling) -> Interval:
        """The value with its confidence interval."""
        ends = of_proportion(self.holds.double().sum().item(), len(self.holds), how.level)
        return Interval(self.value, *ends)

    def difference(self, other: "Proportion", how: Sampling) -> Interval:
        """This minus another method's, on the same examples."""
        ends = of_paired_proportions(self.holds - other.holds, how.level)
        return Interval(self.value - other.value, *ends)


@dataclass(frozen=True, eq=False)
class Mean(Statistic):
    """A mean over examples, or what is one to first order.

    Attributes:
        value: The metric.
        influence: How much each example contributes, `[n]`: for a mean its value.
        lowest: A bound of the metric from below.
        squared: Whether `influence` is that of the metric's square, as of a root mean square.
    """

    value: float
    influence: Float[Tensor, " n"]
    lowest: float = -math.inf
    squared: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return (len(self.influence),)

    def interval(self, how: Sampling) -> Interval:
        """The value with its confidence interval."""
        if self.squared:
            low, high = of_mean(self.value**2, self.influence, how.level)
            return Interval(self.value, math.sqrt(max(0.0, low)), math.sqrt(max(0.0, high)))
        low, high = of_mean(self.value, self.influence, how.level)
        return Interval(self.value, max(low, self.lowest), high)

    def difference(self, other: "Mean", how: Sampling) -> Interval:
        """This minus another method's, on the same examples."""
        value = self.value - other.value
        return Interval(value, *of_mean(value, self._linear - other._linear, how.level))

    @property
    def _linear(self) -> Float[Tensor, " n"]:
        if not self.squared:
            return self.influence.double()
        return self.influence.double() / max(2 * self.value, torch.finfo(torch.float64).tiny)


@dataclass(frozen=True, eq=False)
class Area(Statistic):
    """A quantity in [0, 1] that compares two sets of examples.

    Attributes:
        value: The metric.
        influences: How much each example of either set contributes, `[n]` and `[m]`.
    """

    value: float
    influences: tuple[Float[Tensor, " n"], Float[Tensor, " m"]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return tuple(len(influence) for influence in self.influences)

    def interval(self, how: Sampling) -> Interval:
        """The value with its confidence interval."""
        error = _standard_error(self.influences)
        return Interval(self.value, *of_area(self.value, error, min(self.sizes), how.level))

    def difference(self, other: "Area", how: Sampling) -> Interval:
        """This minus another method's, on the same examples."""
        pairs = zip(self.influences, other.influences, strict=True)
        half = normal_quantile(how.level) * _standard_error([mine - its for mine, its in pairs])
        value = self.value - other.value
        return Interval(value, max(-1.0, value - half), min(1.0, value + half))


def _standard_error(influences: Sequence[Tensor]) -> float:
    if min(map(len, influences)) < 2:
        return math.nan
    return math.sqrt(sum(part.double().var().item() / len(part) for part in influences))


@dataclass(frozen=True, eq=False)
class Resampled(Statistic):
    """A metric whose spread only resampling tells.

    The interval reaches from the value to where its bias, as the draws show it, is taken away, and
    on both sides as far as the draws spread. It is wider than it need be rather than too narrow.

    Attributes:
        value: The metric.
        num_examples: Of each set.
        resample: From counts `[draws, n]` of each set to the metric of each draw, `[draws]`.
        device: Where `resample` computes.
        highest: A bound of the metric from above.
        share_of: Of how many examples it is a share, if it is one. Its interval is then at least
            Wilson's, also where no draw differs from another.
    """

    value: float
    num_examples: tuple[int, ...]
    resample: Callable[..., Float[Tensor, " draws"]]
    device: torch.device
    highest: float = 1.0
    share_of: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples it is of."""
        return self.num_examples

    def interval(self, how: Sampling) -> Interval:
        """The value with its confidence interval."""
        return self.of_draws(draws_of([self], how)[0], how)

    def of_draws(self, draws: Float[Tensor, " draws"], how: Sampling) -> Interval:
        """The interval by the metric of draws of the examples."""
        low, high = _bias_corrected(self.value, draws, how)
        if self.share_of is not None:
            ends = of_proportion(self.value * self.share_of, self.share_of, how.level)
            low, high = min(low, ends[0]), max(high, ends[1])
        return Interval(self.value, max(0.0, low), min(self.highest, high))

    def difference(self, other: "Resampled", how: Sampling) -> Interval:
        """This minus another method's, on the same examples."""
        mine, its = draws_of([self, other], how)
        return self.difference_of_draws(other, mine - its, how)

    def difference_of_draws(
        self, other: "Resampled", draws: Float[Tensor, " draws"], how: Sampling
    ) -> Interval:
        """The interval by the differences of draws of the examples."""
        value = self.value - other.value
        return Interval(value, *_bias_corrected(value, draws, how))


def draws_of(statistics: Sequence[Resampled], how: Sampling) -> list[Float[Tensor, " draws"]]:
    """Each metric of the same draws of the examples, float64; counts are made once for all."""
    found: dict[int, list[Tensor]] = {index: [] for index in range(len(statistics))}
    groups: dict[tuple[tuple[int, ...], torch.device], list[int]] = {}
    for index, statistic in enumerate(statistics):
        groups.setdefault((statistic.sizes, statistic.device), []).append(index)
    for (sizes, device), members in groups.items():
        for counts in how.counts(sizes, device):
            for index in members:
                found[index].append(statistics[index].resample(*counts))
    return [torch.cat(draws).double() for draws in found.values()]


def intervals_of(statistics: Mapping[str, Statistic], how: Sampling) -> dict[str, Interval]:
    """Each statistic with its interval."""
    resampled = {name: one for name, one in statistics.items() if isinstance(one, Resampled)}
    draws = dict(zip(resampled, draws_of(list(resampled.values()), how), strict=True))
    return {
        name: one.of_draws(draws[name], how) if isinstance(one, Resampled) else one.interval(how)
        for name, one in statistics.items()
    }


def differences_of(
    a: Mapping[str, Statistic], b: Mapping[str, Statistic], how: Sampling
) -> dict[str, Interval]:
    """Differences a - b of statistics with the same names, paired over the examples."""
    pairs = {name: (one, b[name]) for name, one in a.items()}
    resampled = {
        name: (mine, its)
        for name, (mine, its) in pairs.items()
        if isinstance(mine, Resampled) and isinstance(its, Resampled)
    }
    both = [one for pair in resampled.values() for one in pair]
    draws = iter(draws_of(both, how))
    found = {
        name: mine.difference_of_draws(its, next(draws) - next(draws), how)
        for name, (mine, its) in resampled.items()
    }
    return {
        name: found[name] if name in found else mine.difference(its, how)
        for name, (mine, its) in pairs.items()
    }


def _bias_corrected(value: float, draws: Tensor, how: Sampling) -> tuple[float, float]:
    # Draws show the bias, but on draws it is larger: the truth may lie where the value is, or where
    # all of the bias is taken away.
    unbiased = 2 * value - draws.mean().item()
    half = student_quantile(how.level, len(draws) - 1) * draws.std().item()
    return min(value, unbiased) - half, max(value, unbiased) + half
