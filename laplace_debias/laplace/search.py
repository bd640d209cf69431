"""A search over held-out data: a wide grid in one pass, on from its end, finer around the best.

What is searched over is δ, or γ = δ k² where σ = k σ₀ is tuned with it. Links and temperatures cost
nothing beside the covariances, and are all looked at in the first pass.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.class_dim import targets_classes_last
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace.evaluation import Scored, joined
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.tuning import Row, Tuning
from laplace_debias.laplace.validation_scores import (
    Evaluated,
    MetricOverTerms,
    NoiseProfile,
    examples_of,
)
from laplace_debias.system.ranks import current

STEP = 0.4
"""Powers of ten between two points of the default grid, and of a grid that goes on."""
LIMITS = (1e-8, 1e12)
"""Where a grid that goes on ends."""
DEFAULT_GRID = torch.logspace(-4, 8, 31, dtype=torch.float64)
"""Where a search begins without a grid."""

FEW = 100
"""Of fewer examples the simplest link is taken."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-8, 17))
"""Temperatures that are tried, from 1/2 to 4."""

# Points of one further pass; a factor of 10⁴.
_AT_ONCE = 10
# A refined grid's points between two neighbours of the first one, less one.
_FINER = 8
# A metric has levelled off if a step changes it by less than this share of its standard error.
_LEVEL = 1e-3
# Another link must be better by this share of the metric's standard error, too: of two that are
# nearly the same the paired error is nearly zero.
_SEEN = 1e-2
# The share of examples whose scores must be what they were when the data are read again.
_SAME = 0.98


@dataclass(frozen=True)
class Look:
    """Predicts and scores at points of the search, a pass over the data each time.

    Attributes:
        predict: From inputs `[B, ...]`, prior precisions and links to numbers of these precisions
            with predictives there, as `predictive.predictives_by_links` gives them.
        read: Gives the data of a pass, in the order of the first one.
        likelihood: What targets must fit.
        class_dim: As `targets_classes_last` takes it.
        scores: What is kept of predictives, and what is made of it.
    """

    predict: Callable[[Inputs, Tensor, Sequence[Link | None]], Iterable[tuple[int, Distribution]]]
    read: Callable[[], Pairs]
    likelihood: Likelihood
    class_dim: int | None
    scores: MetricOverTerms | NoiseProfile

    def __call__(
        self, points: Sequence[float], links: Sequence[Link | None]
    ) -> list[list[Evaluated]]:
        """The metric at the points by the links, in one pass, and without any covariance.

        Raises:
            ValueError: If there is no batch, or no target that counts.
        """
        grid = torch.tensor(points, dtype=torch.float64)
        num_points = len(points) + (None not in links)
        columns: list[list[Tensor]] = [[] for _ in range(num_points)]
        examples: list[Tensor] = []
        num_examples = 0
        for x, y in self.read():
            of_batch: list[list[Tensor]] = [[] for _ in columns]
            for number, predictive in self.predict(x, grid, links):
                size = predictive.batch_shape
                if not any(of_batch):
                    # Without the links' dimension, with one for the outputs.
                    y = targets_classes_last(y, len(size), self.class_dim)
                    of_targets = examples_of(self.likelihood, predictive, y)
                    examples.append(of_targets + num_examples)
                    num_examples += size[1]
                again = y.expand(size[0], *y.shape)
                of_batch[number].append(self.scores.of_batch(predictive, again))
            for of_point, parts in zip(columns, of_batch, strict=True):
                of_point.append(torch.cat(parts, 1))
        none = torch.zeros(0, dtype=torch.long)
        ids = _of_all(torch.cat(examples or [none]), num_examples)
        return [
            self.scores.of_all(point, _joined(of_point), ids, links)
            for point, of_point in zip([*points, math.inf], columns, strict=False)
        ]


def _joined(columns: Sequence[Tensor]) -> Tensor:
    """The columns of all batches and processes."""
    parts = [Scored(part, part[:, 0], part[:, 0]) for part in columns]
    return joined(parts, "tune on").values


def _of_all(examples: Int[Tensor, " n"], num_examples: int) -> Int[Tensor, " m"]:
    """The example of each target of all processes, counted on from one process to the next."""
    ranks = current()
    before = sum(ranks.exchange(num_examples)[: ranks.rank])
    of_all = ranks.on_all([examples + before] if len(examples) else None)
    return examples if of_all is None else of_all[0]


@dataclass(frozen=True)
class Found:
    """Points that were looked at.

    Attributes:
        points: In the order of what is searched over.
        more_is_better: Whether the metric is to be large.
        notes: What a user should know of the search.
        others: The same by other links, and without any covariance, by what they are called.
    """

    points: list[Evaluated]
    more_is_better: bool
    notes: tuple[str, ...] = field(default=())
    others: dict[str, Evaluated] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The number of the best point; of several that are equal the middle of the longest run.

        If a temperature alone is best, at the largest prior precision, it is the smallest one that
        is not worse by more than a paired standard error: as much posterior as the data allow.

        Raises:
            ValueError: If no value is a number.
        """
        best, last = self._highest, len(self.points) - 1
        link = self.points[best].link
        if link is None or link.temperature == 1 or best < last:
            return best
        while best > 0 and not _is_worse(self.points[best - 1], self.points[last]):
            best -= 1
        return best

    @property
    def _highest(self) -> int:
        sign = 1 if self.more_is_better else -1
        values = [sign * point.value for point in self.points]
        numbers = [value for value in values if value == value]
        if not numbers:
            raise ValueError("The metric is NaN at every prior precision: check the predictions.")
        highest = max(numbers)
        runs: list[list[int]] = [[]]
        for index, value in enumerate(values):
            if value == highest:
                runs[-1].append(index)
            elif runs[-1]:
                runs.append([])
        longest = max(runs, key=len)
        return longest[len(longest) // 2]

    def is_worse(self, index: int) -> bool:
        """Whether a point is worse than the best by more than one paired standard error."""
        return _is_worse(self.points[index], self.points[self.best])

    @property
    def flat(self) -> tuple[int, int] | None:
        """The points between which none is worse than the best; None for one example."""
        best = self.best
        if self.points[best].standard_error != self.points[best].standard_error:
            return None
        low = high = best
        while low > 0 and not self.is_worse(low - 1):
            low -= 1
        while high < len(self.points) - 1 and not self.is_worse(high + 1):
            high += 1
        return low, high

    def neighbours(self, index: int) -> list[int]:
        """The points beside one."""
        return [i for i in (index - 1, index + 1) if 0 <= i < len(self.points)]

    def noting(self, note: str) -> "Found":
        """The same, with something that a user should know."""
        return replace(self, notes=(*self.notes, note))


def _is_worse(one: Evaluated, best: Evaluated) -> bool:
    difference, error = one.minus(best)
    # Not the other way round: what is NaN is worse.
    return not abs(difference) <= error


def first_look(
    look: Look, grid: Float[Tensor, " grid"], links: Sequence[Link | None], more_is_better: bool
) -> Found:
    """Look at a grid by every link, and choose a link by the one-standard-error rule.

    The first link is the simplest. Then come the others of T = 1, the first one's formula at other
    temperatures, and the rest: each only if its best is better than what was chosen before by more
    than a standard error of the difference, paired over the examples, of which there must be 100.

    Args:
        look: What predicts and scores.
        grid: Where to begin, ascending.
        links: The simplest first; None alone for a likelihood that has none.
        more_is_better: Whether the metric is to be large.

    Raises:
        ValueError: As `Look`; if no value is a number.
    """
    rows = look(grid.tolist(), links)
    points, without = rows[: len(grid)], rows[-1:]
    sign = 1 if more_is_better else -1

    def best(numbers: Sequence[int], rows: Sequence[Sequence[Evaluated]]) -> Evaluated:
        some = [row[number] for row in rows for number in numbers]
        return max(some, key=lambda p: sign * p.value if p.value == p.value else -math.inf)

    by = [(number, link) for number, link in enumerate(links) if link is not None]
    names = list(dict.fromkeys(link.name for _, link in by))
    chosen, others = best([0], points), dict[str, Evaluated]()
    for tier in (1, 2, 3):
        some = [n for n, one in by if (one.name != names[0]) + 2 * (one.temperature != 1) == tier]
        if some and len(chosen.sums) >= FEW:
            one = best(some, points)
            difference, error = one.minus(chosen)
            if sign * difference > max(error, _SEEN * chosen.standard_error):
                chosen = one
    if len(by) > 1:
        others["network"] = best([0], without)
        others["temperature scaling"] = best(range(len(by)), without)
        for name in names:
            same = [(number, link) for number, link in by if link.name == name]
            others[name] = best([n for n, link in same if link.temperature == 1], points)
            others[f"{name}, tempered"] = best([n for n, _ in same], points)
    at_chosen = [point for row in points for point in row if point.link == chosen.link]
    return Found(at_chosen, more_is_better, others=others)


def search(look: Look, found: Found, unit: float = 1.0) -> Found:
    """Go on from a grid's end as long as the best lies there, and refine.

    The first pass was over the grid. As long as the best lies at its end, where the metric has not
    levelled off, one more goes on by up to ten points, up to the `LIMITS`. Unless the neighbours of
    the best are within a standard error of it, a last one divides the intervals to them by 8. A
    further pass begins with the best point again: where it is not what it was, the data differ from
    pass to pass, and the search ends with what it has.

    Args:
        look: What predicts and scores.
        found: What the grid gave.
        unit: What the `LIMITS` are multiplied by.

    Raises:
        ValueError: If no value is a number.
    """
    while beyond := _beyond(found, unit):
        more = _looked_at(look, found, beyond)
        if isinstance(more, str):
            return found.noting(more)
        found = more
    if note := _at_the_end(found, unit):
        return found.noting(note)
    between = _between(found)
    if not between:
        return found
    more = _looked_at(look, found, between)
    return found.noting(more) if isinstance(more, str) else more


def tuning_of(found: Found, metric: str, sigma: Callable[[float], float | list[float]]) -> Tuning:
    """The findings of a search, in terms of prior precisions and of the noise.

    Args:
        found: The points.
        metric: The metric's name.
        sigma: From the factor that the fit's σ is multiplied by to σ.
    """
    best = found.points[found.best]
    rows = []
    for point in found.points:
        row: Row = {"prior_precision": point.prior_precision, metric: point.value}
        if point.sigma_factor is not None:
            row["sigma_factor"] = point.sigma_factor
        if int((point.counts > 0).sum()) > 1:
            row["standard_error"] = point.standard_error
        rows.append(row)
    flat = None
    if (ends := found.flat) is not None:
        deltas = [point.prior_precision for point in found.points[ends[0] : ends[1] + 1]]
        flat = min(deltas), max(deltas)
    beside = [found.points[i].at / best.at for i in found.neighbours(found.best)]
    return Tuning(
        best.prior_precision,
        metric,
        best.value,
        sorted(rows, key=lambda row: row["prior_precision"]),
        None if best.sigma_factor is None else sigma(best.sigma_factor),
        flat,
        max((max(ratio, 1 / ratio) for ratio in beside), default=None),
        found.notes,
        best.link,
        [_compared(name, other, best, metric) for name, other in found.others.items()],
    )


def _compared(name: str, other: Evaluated, best: Evaluated, metric: str) -> Row:
    """A row of `Tuning.compared`."""
    difference, error = other.minus(best)
    return {
        "name": name,
        "prior_precision": other.prior_precision if math.isfinite(other.at) else None,
        "temperature": other.link.temperature if other.link else None,
        metric: other.value,
        "difference": difference,
        "half_width": 1.96 * error,
    }


def _beyond(found: Found, unit: float) -> list[float]:
    """Points beyond the ends that the best lies at; none where the metric has levelled off."""
    best, last = found.best, len(found.points) - 1
    at, beyond = found.points[best].at, []
    if best == 0 and not _levelled(found, unit, 1):
        downwards = [at * 10 ** (-STEP * i) for i in range(1, _AT_ONCE + 1)]
        beyond += [point for point in downwards if point > LIMITS[0] * unit * 0.99]
    if best == last and not _levelled(found, unit, last - 1):
        upwards = [at * 10 ** (STEP * i) for i in range(1, _AT_ONCE + 1)]
        beyond += [point for point in upwards if point < LIMITS[1] * unit * 1.01]
    return beyond


def _levelled(found: Found, unit: float, inner: int) -> bool:
    """Whether the metric has stopped to change from an inner point to the best at the end.

    Within the default grid it may change again further on.
    """
    best = found.points[found.best]
    if not 0 <= inner < len(found.points):
        return False
    if float(DEFAULT_GRID[0]) * unit * 1.01 < best.at < float(DEFAULT_GRID[-1]) * unit * 0.99:
        return False
    change = abs(best.value - found.points[inner].value)
    return change == 0 or change <= _LEVEL * best.standard_error


def _at_the_end(found: Found, unit: float) -> str | None:
    """The note on a best point that lies at the end; None of another."""
    best, last = found.best, len(found.points) - 1
    if 0 < best < last or last == 0:
        return None
    at = found.points[best].prior_precision
    inner, side = (1, "smallest") if best == 0 else (last - 1, "largest")
    if not _levelled(found, unit, inner):
        return (
            f"The best is the {side} value tried, {at:.3g}, the limit of the search: the metric is "
            "still getting better there."
        )
    if best == last:
        return (
            "The metric levels off towards larger values: no finite prior precision does better "
            "than the network without uncertainty of its parameters (predict with method='map')."
        )
    return "The metric levels off towards smaller values: they are all alike."


def _between(found: Found) -> list[float]:
    """Points between the best and its neighbours; none if the data do not tell these apart."""
    best, between = found.best, []
    neighbours = found.neighbours(best)
    if not any(found.is_worse(i) for i in neighbours):
        return []
    at = found.points[best].at
    for neighbour in neighbours:
        ratio = found.points[neighbour].at / at
        between += [at * ratio ** (i / _FINER) for i in range(1, _FINER)]
    return between


def _looked_at(look: Look, found: Found, points: list[float]) -> Found | str:
    """With further points; or what went wrong with them."""
    best = found.points[found.best]
    try:
        again, *more = [row[0] for row in look([best.at, *points], [best.link])[: len(points) + 1]]
    except ValueError as error:
        # At the first points the same data passed.
        return f"Not searched from {min(points):.3g} to {max(points):.3g}: {error}"
    if not _is_same(again, best):
        return (
            "Not searched further: the loader gave other examples, or in another order, when it "
            "was read again. Pass one that does not shuffle or augment."
        )
    return replace(found, points=sorted([*found.points, *more], key=lambda point: point.at))


def _is_same(one: Evaluated, other: Evaluated) -> bool:
    """Whether the scores of two passes are of the same examples in the same order.

    Rounding may move a few examples to another class or bin, or turn the sign of a bin's gap.
    """
    if len(one.sums) != len(other.sums):
        return False
    close = torch.isclose(one.sums.abs(), other.sums.abs(), rtol=1e-3, atol=1e-4, equal_nan=True)
    return float(close.double().mean()) > _SAME
