"""A search over held-out data: a wide grid in one pass, on from its end, finer around the best.

What is searched over is δ, or γ = δ k² where σ = k σ₀ is tuned with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.fits.passes import NOT_SAVED, Passes, Sums
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.curvature.network.shards import place_of
from laplace_debias.laplace.evaluation import Scored
from laplace_debias.laplace.sharded_calls import predicted
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

# Points of one further pass; a factor of 10⁴.
_AT_ONCE = 10
# A refined grid's points between two neighbours of the first one, less one.
_FINER = 8
# A metric has levelled off if a step changes it by less than this share of its standard error.
_LEVEL = 1e-3
# The share of examples whose scores must be what they were when the data are read again.
_SAME = 0.98


@dataclass(frozen=True)
class Look:
    """What predicts and scores at points of the search, a pass over the data each time.

    Attributes:
        predict_grid: From inputs `[B, ...]` and prior precisions to the predictive at each.
        read: Gives the data of a pass, in the order of the first one.
        likelihood: What targets must fit.
        class_dim: As `score` takes it.
        scores: What is kept of predictives, and what is made of it.
        in_turn: As `predicted` takes it.
        passes: The passes over the data, which may be saved as they go.
    """

    predict_grid: Callable[[Inputs, Tensor], list[Distribution]]
    read: Callable[[], Pairs]
    likelihood: Likelihood
    class_dim: int | None
    scores: MetricOverTerms | NoiseProfile
    in_turn: bool = False
    passes: Passes = NOT_SAVED

    def __call__(self, points: Sequence[float]) -> list[Evaluated]:
        """The metric at the points, in one pass.

        Raises:
            ValueError: If there is no batch, or no target that counts.
        """
        grid = torch.tensor(points, dtype=torch.float64)
        # The columns of the scores of every point, part by part, so that they can be saved.
        kept: list[dict[str, list[Tensor]]] = [{} for _ in points]
        examples: dict[str, list[Tensor]] = {"examples": []}

        def add(predictives: Sequence[Distribution], y: Tensor, before: int) -> int:
            of_part = examples_of(self.likelihood, predictives[0], y, self.class_dim)
            examples["examples"].append(of_part + before)
            for of_point, predictive in zip(kept, predictives, strict=True):
                for name, column in self.scores.of_batch(predictive, y)._asdict().items():
                    if column is not None:
                        of_point.setdefault(name, []).append(column)
            return before + predictives[0].batch_shape[0]

        num_examples = 0
        if self.in_turn:
            for predictives, y in predicted(
                self.read(), lambda x: self.predict_grid(x, grid), True
            ):
                num_examples = add(predictives, y, num_examples)
        else:
            place, num_read = place_of(current(), None, list), 0
            with self.passes.begin(Sums([*kept, examples], {}, _nothing, [grid])) as one_pass:
                num_examples = one_pass.num_examples
                for number, (all_x, all_y) in enumerate(one_pass.batches(self.read())):
                    left = one_pass.left(all_x, all_y, place(number, num_read))
                    num_read += len(all_y)
                    for part in left:
                        predictives = self.predict_grid(take(all_x, part), grid)
                        num_examples = add(predictives, all_y[part], num_examples)
                    if left:
                        one_pass.done(num_examples, 0.0, 0)
        none = torch.zeros(0, dtype=torch.long)
        ids = _of_all(torch.cat(examples["examples"] or [none]), num_examples)
        return [
            self.scores.of_all(point, _scored(of_point), ids)
            for point, of_point in zip(points, kept, strict=True)
        ]


def _nothing() -> None:
    """Predictions are checked at once: no batch turns out to be wrong later."""


def _scored(columns: dict[str, list[Tensor]]) -> list[Scored]:
    """What was kept of a point, part by part: nothing, if there was no batch."""
    parts = zip(*columns.values(), strict=True)
    return [Scored(**dict(zip(columns, part, strict=True))) for part in parts]


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
    """

    points: list[Evaluated]
    more_is_better: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> int:
        """The number of the best point; of several that are equal the middle of the longest run.

        Raises:
            ValueError: If no value is a number.
        """
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
        difference, error = self.points[index].minus(self.points[self.best])
        # Not the other way round: what is NaN is worse.
        return not abs(difference) <= error

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


def search(
    look: Look, grid: Float[Tensor, " grid"], more_is_better: bool, unit: float = 1.0
) -> Found:
    """Look at a grid, go on from its end as long as the best lies there, and refine.

    The first pass is over the grid. As long as the best lies at its end, where the metric has not
    levelled off, one more goes on by up to ten points, up to the `LIMITS`. Unless the neighbours of
    the best are within a standard error of it, a last one divides the intervals to them by 8. A
    further pass begins with the best point again: where it is not what it was, the data differ from
    pass to pass, and the search ends with what it has.

    Args:
        look: What predicts and scores.
        grid: Where to begin, ascending.
        more_is_better: Whether the metric is to be large.
        unit: What the `LIMITS` are multiplied by.

    Raises:
        ValueError: As `Look`; if no value is a number.
    """
    found = Found(look(grid.tolist()), more_is_better)
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
    """What a search found, in terms of prior precisions and of the noise.

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
    )


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
    """What to say of a best point that lies at the end; None of another."""
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
        again, *more = look([best.at, *points])
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
