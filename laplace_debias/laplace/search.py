"""A search over held-out data: a wide grid in one pass, and a finer one around the best.

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

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.outputs import targets_classes_last
from laplace_debias.laplace.evaluation import joined
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.tuning import Row, Tuning
from laplace_debias.laplace.validation_scores import (
    Evaluated,
    MetricOverTerms,
    NoiseProfile,
    examples_of,
)
from laplace_debias.system.ranks import current

DEFAULT_GRID = torch.logspace(-4, 8, 31, dtype=torch.float64)
"""Where a search begins without a grid."""

FEW = 100
"""Of fewer examples the simplest link is taken."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-8, 17))
"""Temperatures that are tried, from 1/2 to 4."""

# A refined grid's points between two neighbours of the first one, less one.
_FINER = 8
# Another link must be better by this share of the metric's standard error, too: of two that are
# nearly the same the paired error is nearly zero.
_SEEN = 1e-2


@dataclass(frozen=True)
class Look:
    """Predicts and scores at points of the search, a pass over the data each time.

    Attributes:
        predict: From inputs `[B, ...]`, prior precisions and links to numbers of these precisions
            with predictives there, as `predictive.predictives_by_links` gives them.
        data: The data, which a pass goes through.
        likelihood: What targets must fit.
        class_dim: As `targets_classes_last` takes it.
        scores: What is kept of predictives, and what is made of it.
    """

    predict: Callable[[Inputs, Tensor, Sequence[Link | None]], Iterable[tuple[int, Distribution]]]
    data: Pairs
    likelihood: Likelihood
    class_dim: int | None
    scores: MetricOverTerms | NoiseProfile

    def __call__(
        self, points: Sequence[float], links: Sequence[Link | None]
    ) -> list[list[Evaluated]]:
        """The metric at the points by the links, in one pass, and without any covariance.

        Returns:
            A row for each point, of a value for each link; none if there is no batch.

        Raises:
            ValueError: If no target counts.
        """
        grid = torch.tensor(points, dtype=torch.float64)
        num_points = len(points) + (None not in links)
        columns: list[list[Tensor]] = [[] for _ in range(num_points)]
        examples: list[Tensor] = []
        num_examples = 0
        for x, y in self.data:
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
        of_ranks = current().exchange(num_examples)
        if not any(of_ranks):
            return []
        none = torch.zeros(0, dtype=torch.long)
        ids = _of_all(torch.cat(examples or [none]), of_ranks)
        return [
            self.scores.of_all(point, joined([(x,) for x in of_point], "tune on")[0], ids, links)
            for point, of_point in zip([*points, math.inf], columns, strict=False)
        ]


def _of_all(examples: Int[Tensor, " n"], of_ranks: Sequence[int]) -> Int[Tensor, " m"]:
    """The example of each target of all processes, counted on from one process to the next."""
    ranks = current()
    before = sum(of_ranks[: ranks.rank])
    of_all = ranks.on_all([examples + before] if len(examples) else None)
    return examples if of_all is None else of_all[0]


@dataclass(frozen=True)
class Found:
    """Points of one pass.

    Attributes:
        points: In the order of what is searched over.
        others: The same by other links, and without any covariance, by what they are called.
    """

    points: list[Evaluated]
    others: dict[str, Evaluated] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The number of the best point; of several that are equal the middle of the longest run.

        If a temperature alone is best, at the largest prior precision, it is the smallest one that
        is not worse by more than a paired standard error: as much posterior as the data allow.

        Raises:
            ValueError: If no value is a number.
        """
        best, last = self._lowest, len(self.points) - 1
        link = self.points[best].link
        if link is None or link.temperature == 1 or best < last:
            return best
        while best > 0 and not _is_worse(self.points[best - 1], self.points[last]):
            best -= 1
        return best

    @property
    def _lowest(self) -> int:
        numbers = [point.value for point in self.points if point.value == point.value]
        if not numbers:
            raise ValueError("The metric is NaN at every prior precision: check the predictions.")
        lowest = min(numbers)
        runs: list[list[int]] = [[]]
        for index, point in enumerate(self.points):
            if point.value == lowest:
                runs[-1].append(index)
            elif runs[-1]:
                runs.append([])
        longest = max(runs, key=len)
        return longest[len(longest) // 2]

    def is_worse(self, index: int) -> bool:
        """Whether a point is worse than the best by more than one paired standard error."""
        one, best = self.points[index], self.points[self.best]
        # Of a temperature alone the best value is that of a larger prior precision.
        return not one.value < best.value and _is_worse(one, best)

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


def _is_worse(one: Evaluated, best: Evaluated) -> bool:
    difference, error = one.minus(best)
    # Not the other way round: what is NaN is worse.
    return not abs(difference) <= error


def first_look(look: Look, grid: Float[Tensor, " grid"], links: Sequence[Link | None]) -> Found:
    """Look at a grid by every link, and choose a link by the one-standard-error rule.

    The first link is the simplest. Then come the others of T = 1, the first one's formula at other
    temperatures, and the rest: each only if its best is better than what was chosen before by more
    than a standard error of the difference, paired over the examples, of which there must be 100.

    Args:
        look: What predicts and scores.
        grid: Where to begin, ascending.
        links: The simplest first; None alone for a likelihood that has none.

    Raises:
        ValueError: As `Look`; if no value is a number.
    """
    rows = look(grid.tolist(), links)
    if not rows:
        raise ValueError("The loader holds no batch: nothing to tune on.")
    points, without = rows[: len(grid)], rows[-1:]

    def best(numbers: Sequence[int], rows: Sequence[Sequence[Evaluated]]) -> Evaluated:
        some = [row[number] for row in rows for number in numbers]
        return min(some, key=lambda p: p.value if p.value == p.value else math.inf)

    by = [(number, link) for number, link in enumerate(links) if link is not None]
    names = list(dict.fromkeys(link.name for _, link in by))
    chosen, others = best([0], points), dict[str, Evaluated]()
    for tier in (1, 2, 3):
        some = [n for n, one in by if (one.name != names[0]) + 2 * (one.temperature != 1) == tier]
        if some and len(chosen.sums) >= FEW:
            one = best(some, points)
            difference, error = one.minus(chosen)
            if -difference > max(error, _SEEN * chosen.standard_error):
                chosen = one
    if len(by) > 1:
        others["network"] = best([0], without)
        others["temperature scaling"] = best(range(len(by)), without)
        for name in names:
            same = [(number, link) for number, link in by if link.name == name]
            others[name] = best([n for n, link in same if link.temperature == 1], points)
            others[f"{name}, tempered"] = best([n for n, _ in same], points)
    at_chosen = [point for row in points for point in row if point.link == chosen.link]
    return Found(at_chosen, others)


def refined(look: Look, found: Found) -> Found | None:
    """Divide the intervals between the best point and its neighbours by 8, in a pass more.

    Args:
        look: What predicts and scores.
        found: What the grid gave.

    Returns:
        What lies between the neighbours, these included; None if the data do not tell them from the
        best, if a temperature alone is best, or if the data can be read only once.

    Raises:
        ValueError: As `Look`; if no value is a number.
    """
    best = found.best
    neighbours = found.neighbours(best)
    if best != found._lowest or not any(found.is_worse(i) for i in neighbours):
        return None
    at = found.points[best].at
    ratios = [found.points[i].at / at for i in neighbours]
    points = [at, *(at * ratio ** (i / _FINER) for ratio in ratios for i in range(1, _FINER + 1))]
    rows = look(sorted(points), [found.points[best].link])
    if not rows:
        return None
    return replace(found, points=[row[0] for row in rows[: len(points)]])


def tuning_of(found: Found, finer: Found | None, metric: str, likelihood: Likelihood) -> Tuning:
    """The findings of a search, in terms of prior precisions and of the noise.

    Args:
        found: The points of the grid.
        finer: Those of the finer one.
        metric: The metric's name.
        likelihood: That of the fit.
    """
    last = finer or found
    best, rows = last.points[last.best], []
    ends = [point.at for point in finer.points[:: len(finer.points) - 1]] if finer else [0, 0]
    outside = [point for point in found.points if not ends[0] <= point.at <= ends[1]]
    for point in [*outside, *(last.points if finer else [])]:
        row: Row = {"prior_precision": point.prior_precision, metric: point.value}
        if point.sigma_factor is not None:
            row["sigma_factor"] = point.sigma_factor
        if int((point.counts > 0).sum()) > 1:
            row["standard_error"] = point.standard_error
        rows.append(row)
    sigma = flat = None
    if best.sigma_factor is not None:
        assert isinstance(likelihood, Gaussian)
        sigma = (likelihood.sigma * best.sigma_factor).tolist()
    if (within := last.flat) is not None:
        deltas = [point.prior_precision for point in last.points[within[0] : within[1] + 1]]
        flat = min(deltas), max(deltas)
    of_grid = found.points[found.best]
    return Tuning(
        best.prior_precision,
        metric,
        best.value,
        sorted(rows, key=lambda row: row["prior_precision"]),
        sigma,
        flat,
        _at_the_end(found),
        best.link,
        [_compared(name, other, of_grid, metric) for name, other in found.others.items()],
    )


_PASS = "tune again with a grid= (command tune: --prior_precisions) of"


def _at_the_end(found: Found) -> tuple[str, ...]:
    """The note on a best point that lies at the end of a grid."""
    best, last = found.best, len(found.points) - 1
    if 0 < best < last or last == 0 or found.flat == (0, last):
        return ()
    at = f"{found.points[best].prior_precision:.3g}"
    if best == 0:
        return (f"The best is the smallest value tried, {at}: {_PASS} smaller ones.",)
    return (
        f"The best is the largest value tried, {at}: {_PASS} larger ones, or predict with "
        "method='map', which has no uncertainty of the parameters.",
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
