"""A search over held-out data: a wide grid in one pass.

Searched over is δ, or γ = δ k² where σ = k σ₀ is tuned with it. Links and temperatures cost nothing
beside the covariances, and are all looked at in the same pass.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal
from torch.nn.functional import one_hot

from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.outputs import targets_classes_last
from laplace_debias.laplace.evaluation import joined, score
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.tuning import Row, Tuning
from laplace_debias.metrics.checks import check_classification

DEFAULT_GRID = torch.logspace(-4, 8, 49, dtype=torch.float64)
"""Where a search begins without a grid."""
_FEW = 100
"""Of fewer examples the simplest link is taken."""
_ALIKE, _NOTHING = 0.25, 1e-3
"""What is worse than the best by at most the one part of the paired standard error, or the other of
the best one's own, is as good: of two that are nearly the same the paired error is nearly zero."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-8, 17))
"""Temperatures that are tried, from 1/2 to 4."""


@dataclass(frozen=True, eq=False)
class Table:
    """A metric at every point of a search, by every link.

    A metric is a sum over the terms that count (targets, positions, labels) over their number. The
    terms of one example belong together, so errors are taken over examples. The points ascend; of
    links there is one more, infinity, without any covariance. At each point σ is multiplied by its
    factor; None where it is not tuned.
    """

    at: Sequence[float]
    links: Sequence[Link | None]
    sums: Float[Tensor, "points links examples"]
    counts: Float[Tensor, " examples"]
    factors: Float[Tensor, " points"] | None = None

    @cached_property
    def values(self) -> Float[Tensor, "points links"]:
        """The metric."""
        return self.sums.sum(-1) / self.counts.sum()

    def least(self, points: range, links: Sequence[int]) -> tuple[int, int]:
        """Point and link with the least value among some; what is NaN is passed over."""
        some = self.values[points.start : points.stop, links].nan_to_num(math.inf, math.inf)
        point, link = divmod(int(some.argmin()), len(links))
        return points[point], links[link]

    def errors(self, sums: Float[Tensor, "*k examples"]) -> Float[Tensor, "*k"]:
        """Standard errors of Σ sums / Σ counts, over the examples; NaN for one."""
        n, total = len(self.counts), self.counts.sum()
        residuals = sums - (sums.sum(-1) / total).unsqueeze(-1) * self.counts
        return (residuals.square().sum(-1) * (n / (n - 1) if n > 1 else math.nan)).sqrt() / total

    def minus(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        """The difference of the metric at two places, and its paired standard error."""
        difference = self.values[one] - self.values[other]
        return float(difference), float(self.errors(self.sums[one] - self.sums[other]))

    def is_as_good(self, one: tuple[int, int], best: tuple[int, int]) -> bool:
        """Whether a place is worse than the best one by next to nothing; what is NaN is not."""
        difference, error = self.minus(one, best)
        return difference <= max(_ALIKE * error, _NOTHING * float(self.errors(self.sums[best])))

    def prior_precision(self, point: int) -> float:
        """δ at a point."""
        return self.at[point] / (1 if self.factors is None else float(self.factors[point]) ** 2)


@dataclass(frozen=True)
class Look:
    """Predicts and scores at points of the search, in one pass over the data.

    The NLL of a regression `with_noise` is that at the best σ for each γ.
    """

    predict: Callable[[Inputs, Tensor, Sequence[Link | None]], Iterable[tuple[int, Distribution]]]
    data: Pairs
    likelihood: Likelihood
    class_dim: int | None
    metric: str
    with_noise: bool = False

    def __call__(self, points: Sequence[float], links: Sequence[Link | None]) -> Table:
        """The metric at the points by the links."""
        grid, parts = torch.tensor(points, dtype=torch.float64), []
        at = list(points) if None in links else [*points, math.inf]
        for x, y in self.data:
            rows: list[list[Tensor]] = [[] for _ in at]
            counts, examples = torch.zeros(0), None
            for number, predictive in self.predict(x, grid, links):
                size = predictive.batch_shape
                if examples is None:
                    # Without the links' dimension, with one for the outputs.
                    y = targets_classes_last(y, len(size), self.class_dim)
                    examples = _examples_of(self.likelihood, predictive, y)
                terms = self._terms(predictive, y.expand(size[0], *y.shape))
                of_terms = examples.repeat_interleave(len(terms) // max(1, len(examples)))
                counts = of_terms.bincount(minlength=size[1]).double()
                sums = terms.new_zeros(size[1], terms.shape[1]).index_add_(0, of_terms, terms)
                rows[number].append(sums[counts > 0])
            parts.append([counts[counts > 0], *(torch.cat(row, 1) for row in rows)])
        counts, *columns = joined(parts, "tune on")
        sums = torch.stack([of_point.T for of_point in columns])
        if not self.with_noise:
            return Table(at, links, sums, counts)
        # With C ∝ σ⁻² the posterior's precision at σ = k σ₀ is k⁻² (N C + γ), so the predictive's
        # covariance is k² times that at δ = γ: of q = rᵀ S⁻¹ r the NLL of M numbers is least at
        # k² = Σ q / M.
        squares, log_dets, outputs = sums.unbind(1)
        factors = (squares.sum(-1) / outputs.sum(-1)).sqrt()
        if not factors.all():
            raise ValueError(
                "The residuals of the validation data are zero: there is no noise to estimate. "
                "Check that the targets are not the outputs, or pass sigma=False."
            )
        k = factors.unsqueeze(1)
        sums = (squares / k**2 + log_dets + outputs * math.log(2 * math.pi)) / 2 + outputs * k.log()
        return Table(at, links, sums.unsqueeze(1), counts, factors)

    def _terms(self, predicted: Distribution, y: Tensor) -> Float[Tensor, "terms columns"]:
        """Each term of the metric, a column for each link; of a noise its squares, log-det, M."""
        scored = score(self.likelihood, predicted, y)
        num_links = predicted.batch_shape[0]
        if self.with_noise:
            assert isinstance(predicted, MultivariateNormal)
            root = predicted.scale_tril.flatten(0, -3).double()
            residuals = (scored.labels.double() - scored.values.double()).unsqueeze(-1)
            rounding = 8 * torch.finfo(scored.values.dtype).eps * scored.labels.double().abs()
            residuals = residuals.masked_fill(residuals.abs() <= rounding.unsqueeze(-1), 0)
            # Not from the log-density: beside its constant small residuals are lost in float32.
            whitened = torch.linalg.solve_triangular(root, residuals, upper=False)
            squares = whitened.square().sum((-2, -1))
            log_dets = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            outputs = torch.full_like(squares, float(root.shape[-1]))
            return torch.stack([squares, log_dets, outputs], -1)
        if self.metric == "nll":
            # No class probabilities: for a thousand classes a thousandth of the memory.
            return -scored.log_probs.double().view(num_links, -1).T
        if not len(scored.log_probs):  # A batch may hold ignored targets alone.
            return scored.log_probs.new_zeros(0, num_links, dtype=torch.float64)
        probs, labels = check_classification(*scored.classified)
        squares = (probs - one_hot(labels, probs.shape[1])).double().square().sum(1)
        return squares.view(num_links, -1).T


def _examples_of(likelihood: Likelihood, predicted: Distribution, y: Tensor) -> Tensor:
    """The example of each target that counts, as `score` has them, `[n]`."""
    shape = predicted.batch_shape
    values = predicted.probs if hasattr(predicted, "probs") else predicted.mean
    outputs, labels = flat_terms(values[0].reshape(*shape[1:], -1), y)
    likelihood.check_predicted(outputs, labels)
    examples = torch.arange(len(labels), device=labels.device) // math.prod(shape[2:])
    counted = likelihood.counted(labels)
    return examples if counted is None else examples[counted]


@dataclass(frozen=True, eq=False)
class Curve:
    """The metric at the points of a table, by one of its links.

    The `best` is the lowest point, of several that are equal the middle of the longest run; but
    beside a temperature, which can do a posterior's work, the smallest point that is as good: as
    much posterior as the data allow. Points that are worse than it by more than a paired standard
    error are marked by `is_worse`.
    """

    table: Table
    link: int
    num_points: int
    best: int
    is_worse: Bool[Tensor, " points"]

    @classmethod
    def of(cls, table: Table, link: int, num_points: int) -> "Curve":
        """The curve of a link of a table."""
        values = table.values[:num_points, link]
        if values.isnan().all():
            raise ValueError("The metric is NaN at every prior precision: check the predictions.")
        runs: list[list[int]] = [[]]
        for index, is_least in enumerate((values == values.nan_to_num(math.inf).min()).tolist()):
            if is_least:
                runs[-1].append(index)
            elif runs[-1]:
                runs.append([])
        longest = max(runs, key=len)
        lowest = best = longest[len(longest) // 2]
        by = table.links[link]
        if by is not None and by.temperature != 1:
            while best > 0 and table.is_as_good((best - 1, link), (lowest, link)):
                best -= 1
        # Beside a temperature the lowest value can be that of a larger prior precision.
        sums = table.sums[:num_points, link]
        # Not the other way round: what is NaN is worse.
        is_near = (values - values[best]).abs() <= table.errors(sums - sums[best])
        is_worse = ~is_near & ~(values < values[best])
        return cls(table, link, num_points, best, is_worse)

    @property
    def flat(self) -> tuple[int, int] | None:
        """The points between which none is worse than the best; None for one example."""
        if len(self.table.counts) < 2:
            return None
        low = high = self.best
        while low > 0 and not self.is_worse[low - 1]:
            low -= 1
        while high < self.num_points - 1 and not self.is_worse[high + 1]:
            high += 1
        return low, high


def first_look(
    look: Look, grid: Float[Tensor, " grid"], links: Sequence[Link | None]
) -> tuple[Curve, list[Row]]:
    """Look at a grid by every link, and choose one.

    The first link is the simplest. Then come the others of T = 1, the first one's formula at other
    temperatures, and the rest: the first of these whose best is as good as the best of all is
    taken, and of fewer than 100 examples the simplest. The rows are `Tuning.compared`.
    """
    table = look(grid.tolist(), links)
    points, without = range(len(grid)), range(len(grid), len(grid) + 1)
    by = [(number, link) for number, link in enumerate(links) if link is not None]
    names = list(dict.fromkeys(link.name for _, link in by))
    chosen = best = table.least(points, range(len(links)))
    for tier in range(4):
        some = [n for n, one in by if (one.name != names[0]) + 2 * (one.temperature != 1) <= tier]
        chosen = table.least(points, some or [0])
        if len(table.counts) < _FEW or table.is_as_good(chosen, best):
            break
    curve = Curve.of(table, chosen[1], len(grid))
    if len(by) < 2:
        return curve, []
    others = {"network": table.least(without, [0])}
    others["temperature scaling"] = table.least(without, range(len(by)))
    for name in names:
        same = [number for number, link in by if link.name == name]
        plain = [number for number, link in by if link == Link(name)]
        others[name] = table.least(points, plain)
        others[f"{name}, tempered"] = table.least(points, same)
    compared: list[Row] = []
    for name, (point, number) in others.items():
        difference, error = table.minus((point, number), (curve.best, curve.link))
        row = {"name": name, "prior_precision": None, "temperature": by[number][1].temperature}
        if point < len(grid):
            row["prior_precision"] = table.at[point]
        row[look.metric] = float(table.values[point, number])
        compared.append({**row, "difference": difference, "half_width": 1.96 * error})
    return curve, compared


def tuning_of(curve: Curve, compared: list[Row], metric: str, likelihood: Likelihood) -> Tuning:
    """The findings of a search, in terms of prior precisions and of the noise."""
    table, link, rows = curve.table, curve.link, list[Row]()
    errors = table.errors(table.sums[:, link]).tolist()
    for point in range(curve.num_points):
        row: Row = {"prior_precision": table.prior_precision(point)}
        row[metric] = float(table.values[point, link])
        if table.factors is not None:
            row["sigma_factor"] = float(table.factors[point])
        if len(table.counts) > 1:
            row["standard_error"] = errors[point]
        rows.append(row)
    sigma, flat = None, None
    if table.factors is not None:
        assert isinstance(likelihood, Gaussian)
        sigma = (likelihood.sigma * float(table.factors[curve.best])).tolist()
    if (within := curve.flat) is not None:
        deltas = [rows[point]["prior_precision"] for point in range(within[0], within[1] + 1)]
        flat = min(deltas), max(deltas)
    return Tuning(
        rows[curve.best]["prior_precision"],
        metric,
        rows[curve.best][metric],
        sorted(rows, key=lambda row: row["prior_precision"]),
        sigma,
        flat,
        _at_the_end(curve),
        table.links[link],
        compared,
    )


_PASS = "tune again with a grid= (command tune: --prior_precisions) of"


def _at_the_end(curve: Curve) -> tuple[str, ...]:
    """The note on a best point that lies at the end of a grid."""
    best, last = curve.best, curve.num_points - 1
    if 0 < best < last or last == 0 or curve.flat == (0, last):
        return ()
    at = f"{curve.table.prior_precision(best):.3g}"
    if best == 0:
        return (f"The best is the smallest value tried, {at}: {_PASS} smaller ones.",)
    return (
        f"The best is the largest value tried, {at}: {_PASS} larger ones, or predict with "
        "method='map', which has no uncertainty of the parameters.",
    )
