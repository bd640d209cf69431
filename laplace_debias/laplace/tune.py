"""Tuning on held-out data: a wide grid of prior precisions by all links, in one pass.

Searched over is δ, or γ = δ k² where σ = k σ₀ is tuned with it. Links and temperatures cost nothing
beside the covariances, and are all looked at in the same pass.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal
from torch.nn.functional import one_hot

from laplace_debias.curvature.losses.likelihoods import (
    Likelihood,
)
from laplace_debias.curvature.network.batches import Batches, Pairs
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import evidence, predictive
from laplace_debias.laplace.evaluation import (
    check_held_out,
    check_targets,
    classified,
    concatenate_batches,
    probabilities_or_means,
)
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.state import FittedPosterior
from laplace_debias.laplace.tuning import Comparison, Row, Tuning
from laplace_debias.metrics.checks import check_classification
from laplace_debias.system.checks import real
from laplace_debias.system.ranks import current

DEFAULT_GRID = torch.logspace(-4, 8, 49, dtype=torch.float64)
"""Where a search begins without a grid."""
_FEW = 100
# Two prior precisions are equal to the rounding of single precision.
_SINGLE_PRECISION = 1e-6
"""Of fewer examples the simplest link is taken."""
_ALIKE, _NOTHING = 0.25, 1e-3
"""What is worse than the best by at most the one part of the paired standard error, or the other of
the best one's own, is as good: of two that are nearly the same the paired error is nearly zero."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-8, 17))
"""Temperatures that are tried, from 1/2 to 4."""
_PASS = "tune again with a grid= (command tune: --prior_precisions) of"


def on_data(
    fitted: FittedPosterior,
    loader: Batches,
    metric: str,
    grid: Float[Tensor, " grid"] | Sequence[float] | None,
    sigma: bool | None,
    link: str | Link | None,
    generator: torch.Generator | None,
    progress: bool,
) -> tuple[Tuning, FittedPosterior | None]:
    """The best prior precision, link and temperature on held-out data; the fit if σ was tuned."""
    check_held_out(loader)
    stream = fitted.spec.stream(loader, fitted.device, generator, "tune" if progress else None)
    likelihood, class_dim = fitted.likelihood, fitted.spec.class_dim
    is_regression = likelihood.targets == "numbers"
    known = ["nll"] if is_regression else ["brier", "nll"]
    if metric not in known:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood: use one of {', '.join(known)}."
        )
    link_from(link, likelihood)
    posterior = fitted.posterior
    points = DEFAULT_GRID if grid is None else _checked(grid)
    with_noise = sigma or (is_regression and grid is None)
    with_noise = with_noise and evidence.tunes_noise(fitted, sigma)
    if with_noise:
        if grid is not None:
            raise ValueError(
                "sigma=True looks at every prior precision with the best sigma for it, and chooses "
                "the grid by that: leave out the grid, or sigma."
            )
        # The grid is of γ = δ k², about the k² that the residuals of the training data tell.
        assert fitted.num_targets is not None
        points = points * (evidence.squared_residuals(fitted) / fitted.num_targets)
    if grid is None:
        points = _representable(posterior, points)
    else:
        for point in points[[0, -1]]:  # They ascend.
            posterior.check_prior_precision(point)
    # The first batch shows how many classes there are.
    default = None
    for x, _ in stream.first:
        default = predictive.default_link(fitted, x)
    default = next(filter(None, current().exchange(default)), None)
    by_links = partial(predictive.predictives_by_links, fitted)
    at = points.tolist(), links_to_try(default, link)
    table = look(by_links, stream, likelihood, class_dim, metric, *at, with_noise)
    result, best = search(table, metric)
    if table.factors is None:
        if is_regression:
            result = evidence.noting_assumed(result, fitted, sigma)
        return _noting_thinning(result, fitted), None
    tuned, sigmas = evidence.rescaled(fitted, float(table.factors[best]), float(result))
    return _noting_thinning(replace(result, sigma=sigmas), tuned), tuned


def _noting_thinning(result: Tuning, fitted: FittedPosterior) -> Tuning:
    """Add a note if a thinned posterior is used below the prior precision of the thinning."""
    if fitted.thinned_at is None:
        return result
    limit = max(fitted.thinned_at)
    if float(result) >= limit * (1 - _SINGLE_PRECISION):
        return result
    note = (
        f"The posterior was thinned at the prior precision {limit:.3g}. At {float(result):.3g} the "
        "error of its standard deviations is larger than thin reported. Tune before thin, or load "
        "the posterior that was saved before it."
    )
    return replace(result, notes=(*result.notes, note))


def _checked(grid: Float[Tensor, " grid"] | Sequence[float]) -> Float[Tensor, " grid"]:
    """A user's grid, ascending."""
    points = real(grid, "grid").cpu()
    if points.ndim != 1 or len(points) == 0 or not bool(((points > 0) & points.isfinite()).all()):
        raise ValueError(
            "The grid must hold positive, finite prior precisions, as "
            f"torch.logspace(-4, 4, 21) does; got {points.tolist()}."
        )
    return points.sort().values


def _representable(
    posterior: GaussianPosterior, points: Float[Tensor, " grid"]
) -> Float[Tensor, " representable"]:
    """Leave out points that the posterior's dtype cannot represent, unless these are all."""
    representable = []
    for point in points:
        try:
            posterior.check_prior_precision(point)
        except ValueError as error:
            last_error = error
        else:
            representable.append(point)
    if not representable:
        raise last_error
    return torch.stack(representable)


def links_to_try(default: Link | None, given: str | Link | None) -> list[Link]:
    """The links that are searched over, the simplest first; none for a likelihood that has none.

    A formula alone is tried at all temperatures; without one the default and, where covariances are
    at hand, the probit.
    """
    if default is None:
        return []
    if isinstance(given, Link):
        return [given]
    names = [given] if given else list(dict.fromkeys([default.name, "probit"]))
    others = list(itertools.product(names, TEMPERATURES))
    others.remove((names[0], 1.0))
    return [Link(names[0]), *itertools.starmap(Link, others)]


@dataclass(frozen=True, eq=False)
class Table:
    """A metric at every prior precision of a search, by every link.

    A metric (`values`) is a sum over the terms that count (targets, positions, labels) over their
    number. The terms of one example belong together, so errors are taken over examples. The points
    ascend; of links there is one more, infinity, without any covariance. Without links the sums
    have one column. At each point σ is multiplied by its factor; None where it is not tuned.
    """

    at: Sequence[float]
    links: Sequence[Link]
    sums: Float[Tensor, "points links examples"]
    counts: Float[Tensor, " examples"]
    values: Float[Tensor, "points links"]
    factors: Float[Tensor, " points"] | None = None

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

    def is_as_good(self, one: tuple[int, int], best: tuple[int, int]) -> bool:
        """Whether a place is worse than the best one by next to nothing; what is NaN is not."""
        paired, own = self.errors(self.sums[one] - self.sums[best]), self.errors(self.sums[best])
        difference = float(self.values[one] - self.values[best])
        return difference <= max(_ALIKE * float(paired), _NOTHING * float(own))


def look(
    predict: Callable[
        [Inputs, Tensor, Sequence[Link]], Iterable[tuple[int, Distribution | ValueError]]
    ],
    data: Pairs,
    likelihood: Likelihood,
    class_dim: int | None,
    metric: str,
    points: Sequence[float],
    links: Sequence[Link],
    with_noise: bool = False,
) -> Table:
    """The metric at points by links, in one pass over the data.

    The NLL of a regression `with_noise` is that at the best σ for each γ. A point whose predictive
    cannot be computed for some batch has the metric infinity. If no point has a predictive for a
    batch, the error of the last one is raised.
    """
    grid, parts = torch.tensor(points, dtype=torch.float64), []
    at = [*points, math.inf] if links else list(points)
    for x, y in data:
        examples, rows, errors = None, dict[int, list[Tensor]](), dict[int, ValueError]()
        for number, predicted in predict(x, grid, links):
            if isinstance(predicted, ValueError):
                errors[number] = predicted
                continue
            if examples is None:
                # The same by every link and at every point.
                targets = check_targets(likelihood, predicted, y, class_dim, leading=1)
                labels, counted, log_prob_of = targets
            if with_noise:
                terms = _noise_terms(predicted, labels)
            elif metric == "nll":
                # No class probabilities: for a thousand classes a thousandth of the memory.
                shape = predicted.batch_shape + predicted.event_shape
                log_probs = predicted.log_prob(log_prob_of.expand(shape))
                terms = -log_probs.flatten(1)[:, counted].double().T
            else:
                terms = _brier_terms(predicted, labels, counted)
            if examples is None:
                # That of every term that counts.
                examples = counted.view(predicted.batch_shape[1:]).nonzero()[:, 0]
                examples = examples.repeat_interleave(len(terms) // max(1, len(examples)))
            sums = terms.new_zeros(len(y), terms.shape[1]).index_add_(0, examples, terms)
            rows.setdefault(number, []).append(sums)
        if errors.keys() >= set(range(len(points))):
            raise errors[len(points) - 1]
        assert examples is not None
        counts = examples.bincount(minlength=len(y)).double()
        part = [counts[counts > 0]]
        num_columns = 3 if with_noise else max(1, len(links))
        for number in range(len(at)):
            if number in errors:
                row = counts.new_full((len(y), num_columns), math.inf)
            else:
                row = torch.cat(rows[number], 1)
            part.append(row[counts > 0])
        parts.append(part)
    counts, *columns = concatenate_batches(parts, "tune on")
    sums, factors = torch.stack(columns).mT.contiguous(), None
    if with_noise:
        sums, factors = _with_best_noise(sums)
        at = [gamma / factor**2 for gamma, factor in zip(at, factors.tolist(), strict=True)]
    return Table(at, links, sums, counts, sums.sum(-1) / counts.sum(), factors)


def _noise_terms(predicted: Distribution, labels: Tensor) -> Float[Tensor, "terms 3"]:
    """Of each term the squared whitened residuals, log det S, and how many numbers they are."""
    assert isinstance(predicted, MultivariateNormal)
    root = predicted.scale_tril.flatten(0, -3).double()
    residuals = (labels.double() - probabilities_or_means(predicted).double()).unsqueeze(-1)
    rounding = 8 * torch.finfo(predicted.mean.dtype).eps * labels.double().abs()
    residuals = residuals.masked_fill(residuals.abs() <= rounding.unsqueeze(-1), 0)
    # Not from the log-density: beside its constant small residuals are lost in float32.
    whitened = torch.linalg.solve_triangular(root, residuals, upper=False)
    squares = whitened.square().sum((-2, -1))
    log_dets = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.stack([squares, log_dets, torch.full_like(squares, root.shape[-1])], -1)


def _with_best_noise(
    sums: Float[Tensor, "points 3 examples"],
) -> tuple[Float[Tensor, "points 1 examples"], Float[Tensor, " points"]]:
    """The NLL at the best σ = k σ₀ for each γ, and k.

    With C ∝ σ⁻² the posterior's precision at σ = k σ₀ is k⁻² (N C + γ), so the predictive's
    covariance is k² times that at δ = γ: of q = rᵀ S⁻¹ r the NLL of M numbers is least at
    k² = Σ q / M. A point that has no predictive has none at any σ, and keeps σ₀.
    """
    squares, log_dets, outputs = sums.unbind(1)
    factors = (squares.sum(-1) / outputs.sum(-1)).sqrt()
    is_computed = factors.isfinite()
    factors = torch.where(is_computed, factors, 1)
    if not factors.all():
        raise ValueError(
            "The residuals of the validation data are zero: there is no noise to estimate. "
            "Check that the targets are not the outputs, or pass sigma=False."
        )
    k = factors.unsqueeze(1)
    half = (squares / k**2 + log_dets + outputs * math.log(2 * math.pi)) / 2
    nll = torch.where(is_computed.unsqueeze(1), half + outputs * k.log(), math.inf)
    return nll.unsqueeze(1), factors


def _brier_terms(
    predicted: Distribution, labels: Tensor, counted: Bool[Tensor, " terms"]
) -> Float[Tensor, "counted links"]:
    """Of each term that counts Σ_k (p_k − y_k)², a column for each link."""
    num_links, labels = predicted.batch_shape[0], labels[counted]
    if not len(labels):  # A batch may hold ignored targets alone.
        return torch.zeros(0, num_links, dtype=torch.float64, device=labels.device)
    values = probabilities_or_means(predicted)[counted.repeat(num_links)]
    labels = labels.repeat(num_links, *[1] * (labels.ndim - 1))
    probs, labels = check_classification(*classified(values, labels))
    return (probs - one_hot(labels, probs.shape[1])).double().square().sum(1).view(num_links, -1).T


def search(table: Table, metric: str) -> tuple[Tuning, int]:
    """The choice among what was looked at: the findings, without σ, and the point's number."""
    by = table.links
    points = range(len(table.at) - (len(by) > 0))
    number = _chosen(table, by, points) if len(by) > 1 else 0
    best, is_worse = _lowest(table, number, points)
    values, errors = table.values[:, number], table.errors(table.sums[:, number]).tolist()
    can_tell = len(table.counts) > 1
    rows: list[Row] = []
    for point in points:
        row: Row = {"prior_precision": table.at[point], metric: float(values[point])}
        if table.factors is not None:
            row["sigma_factor"] = float(table.factors[point])
        if can_tell:
            row["standard_error"] = errors[point]
        rows.append(row)
    low = high = best
    while low > 0 and not is_worse[low - 1]:
        low -= 1
    while high < points[-1] and not is_worse[high + 1]:
        high += 1
    within = table.at[low : high + 1]
    is_flat = can_tell and len(within) == len(points)
    notes = _at_the_end(table.at[best], () if is_flat else points, best, by, number)
    if best > 0 and not values[best - 1].isfinite():
        notes += (
            f"The best is the smallest value at which the metric is finite, {table.at[best]:.3g}. "
            "To try smaller ones, convert the model to a wider dtype.",
        )
    compared = Comparison()
    if len(by) > 1:
        compared = _compared(table, by, (best, number), points, metric)
        notes += _why_not_the_lowest(compared, len(table.counts), number == 0, errors[best])
    result = Tuning(
        table.at[best],
        metric,
        float(values[best]),
        sorted(rows, key=itemgetter("prior_precision")),
        None,
        (min(within), max(within)) if can_tell else None,
        notes,
        by[number] if by else None,
        compared,
    )
    return result, best


def _chosen(table: Table, by: Sequence[Link], points: range) -> int:
    """The number of the link that is taken.

    The first link is the simplest. Then come the others of T = 1, the first one's formula at other
    temperatures, and the rest: the first of these whose best is as good as the best of all is
    taken, and of fewer than 100 examples the simplest.
    """
    chosen = best = table.least(points, range(len(by)))
    for tier in range(4):
        some = [
            number
            for number, link in enumerate(by)
            if (link.name != by[0].name) + 2 * (link.temperature != 1) <= tier
        ]
        chosen = table.least(points, some)
        if len(table.counts) < _FEW or table.is_as_good(chosen, best):
            break
    return chosen[1]


def _lowest(table: Table, link: int, points: range) -> tuple[int, Bool[Tensor, " points"]]:
    """The best point by a link, and which are worse by more than a paired standard error.

    It is the lowest point, of several that are equal the middle of the longest run; but beside a
    temperature, which can do a posterior's work, the smallest point that is as good: as much
    posterior as the data allow.
    """
    values, sums = table.values[: len(points), link], table.sums[: len(points), link]
    if not values.isfinite().any():
        raise ValueError(
            "The metric is NaN or infinite at every prior precision. Check the outputs of the "
            "network, or convert it to a wider dtype."
        )
    runs: list[list[int]] = [[]]
    for index, is_least in enumerate((values == values.nan_to_num(math.inf).min()).tolist()):
        if is_least:
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len)
    lowest = best = longest[len(longest) // 2]
    if table.links and table.links[link].temperature != 1:
        while best > 0 and table.is_as_good((best - 1, link), (lowest, link)):
            best -= 1
    # Beside a temperature the lowest value can be that of a larger prior precision; and not the
    # other way round: what is NaN is worse.
    is_near = (values - values[best]).abs() <= table.errors(sums - sums[best])
    return best, ~is_near & ~(values < values[best])


def _compared(
    table: Table, by: Sequence[Link], best: tuple[int, int], points: range, metric: str
) -> Comparison:
    """The rows of `Tuning.compared`."""
    without, of_names = range(len(points), len(points) + 1), dict[str, list[int]]()
    for number, link in enumerate(by):
        of_names.setdefault(link.name, []).append(number)
    others = {
        "network": table.least(without, [0]),
        "temperature scaling": table.least(without, range(len(by))),
    }
    for name, numbers in of_names.items():
        others[name] = table.least(points, [by.index(Link(name))])
        others[f"{name}, tempered"] = table.least(points, numbers)
    rows = Comparison()
    for name, place in others.items():
        difference = float(table.values[place] - table.values[best])
        error = float(table.errors(table.sums[place] - table.sums[best]))
        delta = table.at[place[0]]
        row = {"name": name, "prior_precision": None if delta == math.inf else delta}
        row |= {"temperature": by[place[1]].temperature, metric: float(table.values[place])}
        rows.append({**row, "difference": difference, "half_width": 1.96 * error})
    return rows


def _why_not_the_lowest(
    compared: Comparison, num_examples: int, is_first: bool, standard_error: float
) -> tuple[str, ...]:
    """Explain why an alternative that scores lower is not taken; empty if none does.

    Args:
        compared: The alternatives.
        num_examples: How many examples have a target that counts.
        is_first: Whether the default link at temperature 1 is taken.
        standard_error: That of the metric of the choice.
    """
    lowest = min(compared, key=itemgetter("difference"))
    if not -lowest["difference"] > _NOTHING * standard_error:
        return ()
    beginning = f"{lowest['name']} scores lower by {-lowest['difference']:.2g} but is not taken: "
    if num_examples < _FEW and is_first:
        reason = (
            f"with fewer than {_FEW} examples (here {num_examples}) the default link at "
            "temperature 1 is kept."
        )
    else:
        reason = (
            "settings whose difference is small beside its standard error count as equally good, "
            "and the simpler one is taken."
        )
    return (beginning + reason,)


def _at_the_end(
    delta: float, points: Sequence[int], best: int, by: Sequence[Link], link: int
) -> tuple[str, ...]:
    """Notes on a prior precision and a temperature that lie at the end of those tried."""
    notes = []
    if len(points) > 1 and best == 0:
        notes.append(f"The best is the smallest value tried, {delta:.3g}: {_PASS} smaller ones.")
    elif len(points) > 1 and best == points[-1]:
        notes.append(
            f"The best is the largest value tried, {delta:.3g}: {_PASS} larger ones, or predict "
            "with method='map', which has no uncertainty of the parameters."
        )
    if len(by) > 1 and by[link].temperature in (TEMPERATURES[0], TEMPERATURES[-1]):
        name, T = by[link].name, by[link].temperature
        notes.append(
            f"The best temperature is the {'smallest' if T < 1 else 'largest'} tried, {T:g}: "
            + (
                "the posterior is wide, or the network far under-confident"
                if T < 1
                else "look whether these data are like those of the fit"
            )
            + f". Try another by link=Link({name!r}, T)."
        )
    return tuple(notes)
