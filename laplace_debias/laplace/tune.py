"""Tuning on held-out data: a grid of prior precisions and links, in one pass.

The search is over δ, or over γ = δ k² if σ = k σ₀ is tuned with it. Links and temperatures cost
little compared with the covariances, so the same pass evaluates all of them.
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

from laplace_debias.curvature.losses.likelihoods import Likelihood
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
from laplace_debias.system.ranks import process_group

DEFAULT_GRID = torch.logspace(-4, 8, 49, dtype=torch.float64)
"""Prior precisions that are tried unless a grid is passed."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-8, 17))
"""Temperatures that are tried, from 1/2 to 4."""
_MIN_EXAMPLES = 100
"""With fewer examples the simplest link is kept."""
_TIE_IN_PAIRED_ERRORS = 0.25
"""Two settings count as equally good if they differ by less than this part of the paired standard
error."""
_TIE_IN_STANDARD_ERRORS = 1e-3
"""They also do if they differ by less than this part of the best setting's standard error, because
the paired error of two nearly identical settings is nearly zero."""
_PASS = "tune again with a grid= (command tune: --prior_precisions) of"


def tune_on_data(
    fitted: FittedPosterior,
    loader: Batches,
    metric: str,
    grid: Float[Tensor, " grid"] | Sequence[float] | None,
    *,
    sigma: bool | None,
    link: str | Link | None,
    generator: torch.Generator | None,
    progress: bool,
) -> tuple[Tuning, FittedPosterior | None]:
    """Find the best prior precision, link and temperature on held-out data, in one pass.

    Args:
        fitted: The fit.
        loader: Batches `(inputs, targets)` that the fit has not read.
        metric: `"nll"`, or for classes and labels `"brier"`; the lowest is the best.
        grid: Prior precisions to try; None for `DEFAULT_GRID`.
        sigma: Whether σ of a regression is tuned, too; None if it can be and was never set.
        link: A link's name, to only try its temperatures; a `Link`, to only use this; None for all.
        generator: Seeds the order of the data.
        progress: Whether to show a progress bar.

    Returns:
        The choice, and if σ was tuned the fit with the best σ; otherwise None.

    Raises:
        ValueError: For an unknown metric, a grid that is not positive and finite, a grid together
            with `sigma`, or if the metric is not finite at any prior precision.
    """
    check_held_out(loader)
    stream = fitted.spec.stream(loader, fitted.device, generator, "tune" if progress else None)
    likelihood = fitted.likelihood
    is_regression = likelihood.targets == "numbers"
    metrics = ["nll"] if is_regression else ["brier", "nll"]
    if metric not in metrics:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood. Use one of {', '.join(metrics)}."
        )
    link_from(link, likelihood)
    posterior = fitted.posterior
    points = DEFAULT_GRID if grid is None else _ascending(grid)
    with_noise = sigma or (is_regression and grid is None)
    with_noise = with_noise and evidence.tunes_noise(fitted, sigma)
    if with_noise:
        if grid is not None:
            raise ValueError(
                "sigma=True evaluates every prior precision at the best sigma for it, and chooses "
                "the grid accordingly. Remove grid= or sigma=."
            )
        # The grid is one of γ = δ k², around the k² of the residuals of the training data.
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
    default = next(filter(None, process_group().exchange(default)), None)
    table = evaluate_grid(
        partial(predictive.predictives_by_links, fitted),
        stream,
        likelihood,
        metric,
        prior_precisions=points.tolist(),
        links=links_to_try(default, link),
        class_dim=fitted.spec.class_dim,
        with_noise=with_noise,
    )
    result, best = choose(table, metric)
    if table.sigma_factors is None:
        if is_regression:
            result = evidence.note_assumed_sigma(result, fitted, sigma)
        return _note_thinning(result, fitted), None
    tuned, sigmas = evidence.rescaled(fitted, float(table.sigma_factors[best]), float(result))
    return _note_thinning(replace(result, sigma=sigmas), tuned), tuned


def _note_thinning(result: Tuning, fitted: FittedPosterior) -> Tuning:
    """Add a note if a thinned posterior is used below the prior precision of the thinning."""
    note = fitted.note_on_thinning(float(result))
    if note is None:
        return result
    return replace(result, notes=(*result.notes, note))


def _ascending(grid: Float[Tensor, " grid"] | Sequence[float]) -> Float[Tensor, " grid"]:
    """Sort a user's grid, once every value is positive and finite."""
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
    """Leave out prior precisions that the posterior's dtype cannot represent.

    Raises:
        ValueError: If it can represent none.
    """
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


def links_to_try(default: Link | None, link: str | Link | None) -> list[Link]:
    """List the links that the search compares, the simplest one first.

    Args:
        default: The likelihood's default link; None if it has no links, which gives an empty list.
        link: A `Link`, which is then the only one; the name of a formula, which is tried at all
            temperatures; None for the default formula and the probit at all temperatures.
    """
    if default is None:
        return []
    if isinstance(link, Link):
        return [link]
    formulas = [link] if link else list(dict.fromkeys([default.name, "probit"]))
    simplest = Link(formulas[0])
    combinations = itertools.starmap(Link, itertools.product(formulas, TEMPERATURES))
    return [simplest, *(combination for combination in combinations if combination != simplest)]


@dataclass(frozen=True, eq=False)
class GridMetrics:
    """A metric at every prior precision of a search, for every link.

    The metric is Σ sums / Σ counts over the examples. An example has one term or several (targets,
    positions, labels), which are not independent, so standard errors are those over examples. A
    setting is a pair of indices, of a prior precision and of a link.

    Attributes:
        prior_precisions: P values, ascending. With links the last one is infinity, at which there
            is no covariance.
        links: The L links, the simplest one first; empty for a likelihood without links, whose
            tensors have L = 1.
        sums: Sum of the metric's terms of each example, `[P, L, examples]`.
        counts: Number of terms of each example, `[examples]`.
        values: The metric, `[P, L]`.
        sigma_factors: The number that σ is multiplied by at each prior precision, `[P]`; None if σ
            is not tuned.
    """

    prior_precisions: Sequence[float]
    links: Sequence[Link]
    sums: Float[Tensor, "points links examples"]
    counts: Float[Tensor, " examples"]
    values: Float[Tensor, "points links"]
    sigma_factors: Float[Tensor, " points"] | None = None

    @property
    def finite_points(self) -> range:
        """Return the indices of the prior precisions whose metric is finite."""
        return range(len(self.prior_precisions) - (1 if self.links else 0))

    def lowest(self, points: range, links: Sequence[int]) -> tuple[int, int]:
        """Return the setting with the lowest metric among these points and links.

        It is the first one of several with the same value.
        """
        values = self.values[points.start : points.stop, links].nan_to_num(math.inf, math.inf)
        point, link = divmod(int(values.argmin()), len(links))
        return points[point], links[link]

    def standard_errors(self, sums: Float[Tensor, "*k examples"]) -> Float[Tensor, "*k"]:
        """Compute the standard errors of Σ sums / Σ counts over examples; NaN for one example."""
        n = len(self.counts)
        correction = n / (n - 1) if n > 1 else math.nan
        total = self.counts.sum()
        residuals = sums - (sums.sum(-1) / total).unsqueeze(-1) * self.counts
        return (residuals.square().sum(-1) * correction).sqrt() / total

    def is_tied(self, setting: tuple[int, int], best: tuple[int, int]) -> bool:
        """Whether a setting counts as equally good as the best one; False if its value is NaN."""
        paired_error = self.standard_errors(self.sums[setting] - self.sums[best])
        standard_error = self.standard_errors(self.sums[best])
        tolerance = max(
            _TIE_IN_PAIRED_ERRORS * float(paired_error),
            _TIE_IN_STANDARD_ERRORS * float(standard_error),
        )
        return float(self.values[setting] - self.values[best]) <= tolerance


def evaluate_grid(
    predict: Callable[
        [Inputs, Tensor, Sequence[Link]], Iterable[tuple[int, Distribution | ValueError]]
    ],
    data: Pairs,
    likelihood: Likelihood,
    metric: str,
    *,
    prior_precisions: Sequence[float],
    links: Sequence[Link],
    class_dim: int | None = None,
    with_noise: bool = False,
) -> GridMetrics:
    """Compute a metric at every prior precision, for every link, in one pass over the data.

    Args:
        predict: From inputs, prior precisions and links to pairs of a prior precision's index and
            a predictive or its error, as `predictives_by_links` yields them.
        data: Batches `(inputs, targets)`.
        likelihood: The likelihood, which checks the targets.
        metric: `"nll"` or `"brier"`.
        prior_precisions: Ascending; with noise these are γ = δ k².
        links: The links; empty for a likelihood that has none.
        class_dim: The dimension of the outputs that has the classes; None for the last.
        with_noise: Whether the NLL of a regression is that at the best σ for each γ.

    Returns:
        The metric; it is infinite where a predictive could not be computed for every batch.

    Raises:
        ValueError: If the data are empty or have no target that counts; the predictive's error, if
            a batch has no predictive at any prior precision.
    """
    grid = torch.tensor(prior_precisions, dtype=torch.float64)
    points = list(prior_precisions)
    if links:
        points.append(math.inf)
    num_columns = 3 if with_noise else max(1, len(links))
    batches = []
    for x, y in data:
        example_indices = None
        columns = dict[int, list[Tensor]]()
        errors = dict[int, ValueError]()
        for point, predicted in predict(x, grid, links):
            if isinstance(predicted, ValueError):
                errors[point] = predicted
                continue
            if example_indices is None:
                # These are the same for every link and every prior precision.
                labels, counted, targets = check_targets(
                    likelihood, predicted, y, class_dim, leading=1
                )
            if with_noise:
                terms = _noise_terms(predicted, labels)
            elif metric == "nll":
                # No class probabilities: for a thousand classes a thousandth of the memory.
                shape = predicted.batch_shape + predicted.event_shape
                log_probs = predicted.log_prob(targets.expand(shape))
                terms = -log_probs.flatten(1)[:, counted].double().T
            else:
                terms = _brier_terms(predicted, labels, counted)
            if example_indices is None:
                # Index of the example that each counted term belongs to.
                example_indices = counted.view(predicted.batch_shape[1:]).nonzero()[:, 0]
                terms_per_target = len(terms) // max(1, len(example_indices))
                example_indices = example_indices.repeat_interleave(terms_per_target)
            sums = terms.new_zeros(len(y), terms.shape[1]).index_add_(0, example_indices, terms)
            columns.setdefault(point, []).append(sums)
        if errors.keys() >= set(range(len(prior_precisions))):
            raise errors[len(prior_precisions) - 1]
        assert example_indices is not None
        counts = example_indices.bincount(minlength=len(y)).double()
        batch = [counts[counts > 0]]
        for point in range(len(points)):
            if point in errors:
                sums = counts.new_full((len(y), num_columns), math.inf)
            else:
                sums = torch.cat(columns[point], 1)
            batch.append(sums[counts > 0])
        batches.append(batch)
    counts, *sums_by_point = concatenate_batches(batches, "tune on")
    sums = torch.stack(sums_by_point).mT.contiguous()
    factors = None
    if with_noise:
        sums, factors = _with_best_noise(sums)
        points = [gamma / factor**2 for gamma, factor in zip(points, factors.tolist(), strict=True)]
    return GridMetrics(
        prior_precisions=points,
        links=links,
        sums=sums,
        counts=counts,
        values=sums.sum(-1) / counts.sum(),
        sigma_factors=factors,
    )


def _noise_terms(predicted: Distribution, labels: Tensor) -> Float[Tensor, "terms 3"]:
    """Compute for each term the squared whitened residual, log det S, and the number of outputs."""
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
    """Compute the NLL at the best σ = k σ₀ for each γ, and k.

    With C ∝ σ⁻² the posterior's precision at σ = k σ₀ is k⁻² (N C + γ), so the predictive's
    covariance is k² times that at δ = γ. With q = rᵀ S⁻¹ r, the NLL of M numbers is lowest at
    k² = Σ q / M. A point that has no predictive has none at any σ, and keeps σ₀.

    Args:
        sums: For each γ and example the sums of `_noise_terms`; infinite without a predictive.
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
    nll = (squares / k**2 + log_dets + outputs * math.log(2 * math.pi)) / 2 + outputs * k.log()
    nll = torch.where(is_computed.unsqueeze(1), nll, math.inf)
    return nll.unsqueeze(1), factors


def _brier_terms(
    predicted: Distribution, labels: Tensor, counted: Bool[Tensor, " terms"]
) -> Float[Tensor, "counted links"]:
    """Compute Σ_k (p_k − y_k)² of each term that counts, with a column for each link."""
    num_links = predicted.batch_shape[0]
    labels = labels[counted]
    if not len(labels):  # All targets of a batch may be ignored.
        return torch.zeros(0, num_links, dtype=torch.float64, device=labels.device)
    values = probabilities_or_means(predicted)[counted.repeat(num_links)]
    labels = labels.repeat(num_links, *[1] * (labels.ndim - 1))
    probs, labels = check_classification(*classified(values, labels))
    return (probs - one_hot(labels, probs.shape[1])).double().square().sum(1).view(num_links, -1).T


def choose(table: GridMetrics, metric: str) -> tuple[Tuning, int]:
    """Choose a link and a prior precision.

    Returns:
        The choice, without σ, and the index of its prior precision.
    """
    links = table.links
    points = table.finite_points
    link = _choose_link(table) if len(links) > 1 else 0
    best, is_worse = _choose_point(table, link)
    values = table.values[:, link]
    errors = table.standard_errors(table.sums[:, link]).tolist()
    has_errors = len(table.counts) > 1
    rows: list[Row] = []
    for point in points:
        row: Row = {
            "prior_precision": table.prior_precisions[point],
            metric: float(values[point]),
        }
        if table.sigma_factors is not None:
            row["sigma_factor"] = float(table.sigma_factors[point])
        if has_errors:
            row["standard_error"] = errors[point]
        rows.append(row)
    low = best
    while low > 0 and not is_worse[low - 1]:
        low -= 1
    high = best
    while high < points[-1] and not is_worse[high + 1]:
        high += 1
    not_worse = table.prior_precisions[low : high + 1]
    is_flat = has_errors and len(not_worse) == len(points)
    best_delta = table.prior_precisions[best]
    notes = []
    if len(points) > 1 and not is_flat:
        notes += _notes_on_grid_ends(best_delta, is_first=best == 0, is_last=best == points[-1])
    if len(links) > 1:
        notes += _notes_on_temperature_ends(links[link])
    if best > 0 and not values[best - 1].isfinite():
        notes.append(
            f"The best is the smallest value at which the metric is finite, {best_delta:.3g}. "
            "To try smaller ones, convert the model to a wider dtype."
        )
    comparison = Comparison()
    if len(links) > 1:
        comparison = _compare(table, (best, link), metric)
        notes += _notes_on_lower_scores(comparison, len(table.counts), link == 0, errors[best])
    tuning = Tuning(
        prior_precision=best_delta,
        metric=metric,
        value=float(values[best]),
        table=sorted(rows, key=itemgetter("prior_precision")),
        flat=(min(not_worse), max(not_worse)) if has_errors else None,
        notes=tuple(notes),
        link=links[link] if links else None,
        compared=comparison,
    )
    return tuning, best


def _choose_link(table: GridMetrics) -> int:
    """Choose the simplest link whose best value is tied with the best of all; return its index.

    From simple to complex: the default formula at temperature 1, other formulas at temperature 1,
    the default formula at other temperatures, all links. With fewer than 100 examples it is the
    default formula at temperature 1.
    """
    default = table.links[0]
    indices = range(len(table.links))
    same_formula = [index for index in indices if table.links[index].name == default.name]
    untempered = [index for index in indices if table.links[index].temperature == 1]
    simplest_first = [
        [index for index in same_formula if index in untempered],
        untempered,
        sorted({*same_formula, *untempered}),
        list(indices),
    ]
    best = table.lowest(table.finite_points, indices)
    for candidates in simplest_first:
        setting = table.lowest(table.finite_points, candidates)
        if len(table.counts) < _MIN_EXAMPLES or table.is_tied(setting, best):
            break
    return setting[1]


def _choose_point(table: GridMetrics, link: int) -> tuple[int, Bool[Tensor, " points"]]:
    """Choose the prior precision for a link.

    It is the one with the lowest value; of several equal ones, the middle of their longest run. At
    a temperature other than 1, which can itself soften the predictions, it is the smallest prior
    precision that is tied with the lowest value: as wide a posterior as the data allow.

    Returns:
        Its index, and which prior precisions are worse by more than a paired standard error.
    """
    num_points = len(table.finite_points)
    values = table.values[:num_points, link]
    sums = table.sums[:num_points, link]
    if not values.isfinite().any():
        raise ValueError(
            "The metric is NaN or infinite at every prior precision. Check the outputs of the "
            "network, or convert it to a wider dtype."
        )
    runs: list[list[int]] = [[]]
    for index, is_lowest in enumerate((values == values.nan_to_num(math.inf).min()).tolist()):
        if is_lowest:
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len)
    lowest = longest[len(longest) // 2]
    best = lowest
    if table.links and table.links[link].temperature != 1:
        while best > 0 and table.is_tied((best - 1, link), (lowest, link)):
            best -= 1
    # With a temperature, a larger prior precision may have a lower value than the chosen one. The
    # comparisons are written so that NaN counts as worse.
    is_near = (values - values[best]).abs() <= table.standard_errors(sums - sums[best])
    return best, ~is_near & ~(values < values[best])


def _compare(table: GridMetrics, best: tuple[int, int], metric: str) -> Comparison:
    """Compare the choice with the network, temperature scaling and every link."""
    points = table.finite_points
    infinity = range(len(points), len(points) + 1)  # The network, without a posterior.
    indices_by_formula = dict[str, list[int]]()
    for index, link in enumerate(table.links):
        indices_by_formula.setdefault(link.name, []).append(index)
    alternatives = {
        "network": table.lowest(infinity, [0]),
        "temperature scaling": table.lowest(infinity, range(len(table.links))),
    }
    for formula, indices in indices_by_formula.items():
        alternatives[formula] = table.lowest(points, [table.links.index(Link(formula))])
        alternatives[f"{formula}, tempered"] = table.lowest(points, indices)
    comparison = Comparison()
    for name, setting in alternatives.items():
        point, link_index = setting
        delta = table.prior_precisions[point]
        paired_error = float(table.standard_errors(table.sums[setting] - table.sums[best]))
        comparison.append(
            {
                "name": name,
                "prior_precision": None if delta == math.inf else delta,
                "temperature": table.links[link_index].temperature,
                metric: float(table.values[setting]),
                "difference": float(table.values[setting] - table.values[best]),
                "half_width": 1.96 * paired_error,
            }
        )
    return comparison


def _notes_on_lower_scores(
    comparison: Comparison, num_examples: int, is_default: bool, standard_error: float
) -> list[str]:
    """Explain why an alternative that scores lower is not taken; empty if none does.

    Args:
        comparison: The alternatives.
        num_examples: Number of examples with a target that counts.
        is_default: Whether the default link at temperature 1 is taken.
        standard_error: Standard error of the metric of the choice.
    """
    lowest = min(comparison, key=itemgetter("difference"))
    if not -lowest["difference"] > _TIE_IN_STANDARD_ERRORS * standard_error:
        return []
    lower_score = (
        f'The score of "{lowest["name"]}" is lower by {-lowest["difference"]:.2g}, but it was not '
        "chosen."
    )
    if num_examples < _MIN_EXAMPLES and is_default:
        rule = (
            f"With fewer than {_MIN_EXAMPLES} examples (here {num_examples}), tune keeps the "
            "default link at temperature 1."
        )
    else:
        rule = (
            "If a difference is small compared with its standard error, tune chooses the simpler "
            "setting."
        )
    return [f"{lower_score} {rule}"]


def _notes_on_grid_ends(delta: float, *, is_first: bool, is_last: bool) -> list[str]:
    """Note that the best prior precision is the first or the last of the grid."""
    if is_first:
        return [f"The best is the smallest value tried, {delta:.3g}: {_PASS} smaller ones."]
    if is_last:
        return [
            f"The best is the largest value tried, {delta:.3g}: {_PASS} larger ones, or predict "
            "with method='map', which has no uncertainty of the parameters."
        ]
    return []


def _notes_on_temperature_ends(link: Link) -> list[str]:
    """Note that a link's temperature is the lowest or the highest of those tried."""
    temperature = link.temperature
    if temperature == TEMPERATURES[0]:
        end = "smallest"
        reason = "the posterior is wide, or the network far under-confident"
    elif temperature == TEMPERATURES[-1]:
        end = "largest"
        reason = "look whether these data are like those of the fit"
    else:
        return []
    return [
        f"The best temperature is the {end} tried, {temperature:g}: {reason}. "
        f"Try another by link=Link({link.name!r}, T)."
    ]
