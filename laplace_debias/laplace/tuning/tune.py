"""Tuning on held-out data: a search over prior precisions and links in one pass.

The search is over δ, or over γ = δ k² if σ = k σ₀ is also tuned. Links and temperatures cost little
compared with the covariances, so the same pass evaluates all of them. For a last layer, where
covariances are cheap, only temperatures around the best one are evaluated.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.network.inputs import take
from laplace_debias.laplace.functional.last_layer import recorded_inputs
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.laplace.prediction import predictive
from laplace_debias.laplace.prediction.evaluation import check_held_out
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.tuning.grid_metrics import (
    MIN_EXAMPLES,
    TIE_IN_STANDARD_ERRORS,
    GridMetrics,
    Setting,
    evaluate_grid,
    evaluate_grid_with_noise,
)
from laplace_debias.laplace.tuning.noise import (
    apply_with_noise,
    note_on_assumed_sigma,
    note_on_given_sigma,
    tunes_noise,
)
from laplace_debias.laplace.tuning.output_noise import tune_output_noise
from laplace_debias.laplace.tuning.result import Alternative, Row, TunedFit, Tuning
from laplace_debias.laplace.tuning.temperature_search import search_temperatures
from laplace_debias.system.checks import real
from laplace_debias.system.ranks import process_group
from laplace_debias.system.shown import warn

DEFAULT_GRID = torch.logspace(-4, 8, 49, dtype=torch.float64)
"""The prior precisions to try unless a grid is passed."""
TEMPERATURES = tuple(2 ** (k / 8) for k in range(-16, 17))
"""The candidate temperatures of a posterior: from 1/4 to 4."""
NETWORK_TEMPERATURES = tuple(2 ** (k / 8) for k in range(-56, 57))
"""The candidate temperatures of the network without a posterior: from 1/128 to 128. They are cheap,
because they are not combined with prior precisions.
"""
PER_OUTPUT = "per_output"
"""The value of `sigma=` that tunes the noise of each output."""
# The relative rounding error of a mean NLL in single precision.
_ROUNDING = 1e-6


def tune_on_data(
    fitted: FittedPosterior,
    loader: Batches,
    metric: str,
    grid: Float[Tensor, " grid"] | Sequence[float] | None,
    *,
    sigma: bool | str | None,
    link: str | Link | None,
    generator: torch.Generator | None,
    progress: bool,
) -> TunedFit:
    """Find the best prior precision, link and temperature on held-out data.

    Args:
        fitted: The fit.
        loader: Batches `(inputs, targets)` that were not used for the fit.
        metric: The metric to minimise: `"nll"`, or `"brier"` for classes and labels.
        grid: Prior precisions to try. Default: `DEFAULT_GRID`.
        sigma: Whether to tune σ of a regression as well. With `"per_output"`, the noise of each
            output is chosen afterwards. Default: σ is tuned if this is possible and σ was never
            set.
        link: The name of a link, to try only its temperatures, or a `Link`, to use only this one.
            Default: all links.
        generator: Seeds the order and augmentation of the data.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: For an unknown metric, a grid that is not positive and finite, a grid together
            with `sigma`, or if the metric is not finite at any prior precision.
    """
    check_held_out(loader)
    is_per_output = False
    if isinstance(sigma, str):
        _check_per_output(sigma, loader)
        is_per_output = True
        sigma = True
    stream = fitted.spec.stream(loader, fitted.device, generator, "tune" if progress else None)
    _check_metric(metric, fitted.likelihood)
    link_from(link, fitted.likelihood)  # Reject an unknown link before the data are read.
    points = None if grid is None else _ascending(grid)
    # A grid of prior precisions applies to the current noise, so the noise is not tuned by default.
    if (points is None or sigma) and tunes_noise(fitted, sigma):
        if points is not None:
            raise ValueError(
                "`sigma=True` finds the best sigma for each prior precision that it "
                "tries, and chooses the grid of prior precisions itself. Remove `grid=` "
                "(command line: --prior_precisions) or `sigma=`."
            )
        tuned = _tune_with_noise(fitted, stream)
        if is_per_output:
            tuned = _with_noise_per_output(tuned, stream)
    else:
        tuned = _tune_with_links(fitted, stream, metric, points, link)
    _warn_of_training_data(fitted, tuned.tuning)
    return tuned.with_notes(
        note_on_assumed_sigma(tuned.fitted, sigma),
        note_on_given_sigma(tuned, sigma),
        tuned.fitted.note_on_thinning(float(tuned.tuning)),
    )


def _warn_of_training_data(fitted: FittedPosterior, tuning: Tuning) -> None:
    """Warn if the network has the same NLL on the data of the search as on the training data.

    A network without any information has the same NLL on all data.
    """
    if tuning.metric != "nll" or tuning.all_alike:
        return
    training_nll = fitted.nll / fitted.posterior.num_data
    for alternative in tuning.alternatives:
        is_same = math.isclose(alternative.value, training_nll, rel_tol=_ROUNDING)
        if alternative.name == "network" and is_same:
            warn(
                f"The network has the same NLL, {training_nll:.4g}, on these data and on the "
                "training data, so these are probably the training data. Tune on data that were "
                "not used for training, or call `tune_evidence()`."
            )


def _tune_with_links(
    fitted: FittedPosterior,
    stream: Stream,
    metric: str,
    points: Float[Tensor, " grid"] | None,
    link: str | Link | None,
) -> TunedFit:
    """Find the best prior precision, and the best link if the likelihood has links.

    Args:
        fitted: The fit.
        stream: Held-out data.
        metric: `"nll"` or `"brier"`.
        points: The prior precisions, ascending; None for `DEFAULT_GRID`.
        link: See `links_to_try`.
    """
    if points is None:
        points = _representable(fitted.posterior, DEFAULT_GRID)
    else:
        for point in points[[0, -1]]:  # The points are ascending.
            fitted.posterior.check_prior_precision(point)
    # The default link depends on the number of classes, which is known from the first batch.
    default = None
    first = stream.first
    if first is not None:
        default = predictive.default_link_of_fit(fitted, first.inputs)
    default = next(filter(None, process_group().exchange(default)), None)
    links = links_to_try(default, link)
    network_links = links_of_network(links)
    if links and _records_last_layer(fitted, stream):
        table = search_temperatures(fitted, stream, metric, points.tolist(), links, network_links)
    else:
        table = evaluate_grid(
            partial(predictive.predictives_by_links, fitted),
            stream,
            fitted.likelihood,
            metric,
            prior_precisions=points.tolist(),
            links=links,
            network_links=network_links,
            class_dim=fitted.spec.class_dim,
        )
    return TunedFit.apply(summarise(table, choose(table), metric), fitted)


def _records_last_layer(fitted: FittedPosterior, stream: Stream) -> bool:
    """Whether predictions need only the inputs and outputs of the last layer."""
    first = stream.first
    is_recorded = False
    if first is not None:
        is_recorded = recorded_inputs(fitted, take(first.inputs, slice(1))) is not None
    return True in process_group().exchange(is_recorded)


def _tune_with_noise(fitted: FittedPosterior, stream: Stream) -> TunedFit:
    """Find the best prior precision of a regression, and a common factor for its noise levels."""
    # The search starts from the noise at which the curvature was measured, because the posterior at
    # any other σ follows from it.
    likelihood = fitted.likelihood.for_same_curvature()
    fitted = fitted.with_likelihood(likelihood)
    residuals = fitted.residuals
    assert residuals is not None
    # The grid is over γ = δ k²: the default grid of δ, times the k² estimated from the training
    # residuals.
    gammas = DEFAULT_GRID * (residuals.squared / residuals.num_targets)
    table = evaluate_grid_with_noise(
        partial(predictive.predictives_by_links, fitted),
        stream,
        likelihood,
        gammas=_representable(fitted.posterior, gammas).tolist(),
        class_dim=fitted.spec.class_dim,
    )
    assert table.sigma_factors is not None
    choice = choose(table)
    factor = float(table.sigma_factors[choice.setting.point])
    return apply_with_noise(summarise(table, choice, "nll"), fitted, factor)


def _check_metric(metric: str, likelihood: Likelihood) -> None:
    """Require a metric that the likelihood supports."""
    metrics = ["nll"] if likelihood.targets == "numbers" else ["brier", "nll"]
    if metric not in metrics:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood. Use one of {', '.join(metrics)}."
        )


def _check_per_output(sigma: str, loader: Batches) -> None:
    """Require that `sigma` is `PER_OUTPUT`, and that the data can be read twice."""
    if sigma != PER_OUTPUT:
        raise ValueError(f'Unknown sigma={sigma!r}. Use True, False or "{PER_OUTPUT}".')
    if isinstance(loader, Iterator):
        raise TypeError(
            f'sigma="{PER_OUTPUT}" reads the data twice, but this iterator can be read only once. '
            "Pass a DataLoader or a list of batches."
        )


def _with_noise_per_output(tuned: TunedFit, data: Iterable[Batch]) -> TunedFit:
    """Choose the noise of each output, but keep the posterior for the common factor."""
    fitted = tuned.fitted
    tuning = tuned.tuning
    assert isinstance(tuning.prior_precision, float)
    noise = tune_output_noise(fitted, data, tuning.prior_precision)
    assert isinstance(fitted.likelihood, Gaussian)
    likelihood = fitted.likelihood.with_predictive_sigma(noise.sigma)
    notes = [
        f"With a common factor for the noise of all outputs, the {tuning.metric} is "
        f"{tuning.value:.4g}."
    ]
    if noise.is_at_end:
        notes.append(
            "The noise of an output is at an end of the range that was searched. In comparison, "
            "the posterior's variance of this output is too large or too small."
        )
    tuned_per_output = TunedFit(
        replace(tuning, sigma=noise.sigma.tolist(), value=noise.nll),
        fitted.with_likelihood(likelihood),
    )
    return tuned_per_output.with_notes(*notes)


def _ascending(grid: Float[Tensor, " grid"] | Sequence[float]) -> Float[Tensor, " grid"]:
    """Sort a user's grid, and require that every value is positive and finite."""
    points = real(grid, "grid").cpu()
    if points.ndim != 1 or len(points) == 0 or not bool(((points > 0) & points.isfinite()).all()):
        raise ValueError(
            f"`grid` must contain positive, finite prior precisions, got {points.tolist()}. Pass "
            "for example torch.logspace(-4, 4, 21)."
        )
    return points.sort().values


def _representable(
    posterior: GaussianPosterior, points: Float[Tensor, " grid"]
) -> Float[Tensor, " representable"]:
    """Leave out prior precisions that are too small or too large for the posterior's dtype.

    Raises:
        ValueError: If none of the prior precisions can be used.
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
    """List the links that the search compares, starting with the simplest.

    Args:
        default: The default link of the likelihood, or None if it has no links, in which case the
            result is empty.
        link: A `Link`, to use only this link; or the name of a formula, to try it at all
            temperatures; or None, to try the default formula and the probit at all temperatures.
    """
    if default is None:
        return []
    if isinstance(link, Link):
        return [link]
    formulas = [link] if link else list(dict.fromkeys([default.name, "probit"]))
    simplest = Link(formulas[0])
    combinations = itertools.starmap(Link, itertools.product(formulas, TEMPERATURES))
    return [simplest, *(combination for combination in combinations if combination != simplest)]


def links_of_network(links: Sequence[Link]) -> list[Link]:
    """List the links to try for the network without a posterior, starting with the simplest.

    Without covariances, all formulas are equal, so only the first one is tried. If there is only
    one link, its temperature is not compared with others.
    """
    if len(links) < 2:
        return list(links)
    simplest = links[0]
    tempered = [Link(simplest.name, T) for T in NETWORK_TEMPERATURES]
    return [simplest, *(link for link in tempered if link != simplest)]


@dataclass(frozen=True)
class Choice:
    """The setting that a search chooses.

    Attributes:
        setting: The prior precision and the link.
        flat: The indices of the prior precisions around the chosen one that are worse by at most
            one paired standard error.
    """

    setting: Setting
    flat: range


def choose(table: GridMetrics) -> Choice:
    """Choose the link, and the best prior precision for this link.

    The chosen prior precision has the lowest value of the metric. If several prior precisions share
    this value, the middle of their longest run is chosen. A temperature other than 1 can itself
    soften the predictions, so the smallest prior precision that is tied with the best one is chosen
    then, which makes the posterior as wide as the data allows.
    """
    link = table.choose_link()
    values = table.values[:, link]
    if not values.isfinite().any():
        raise ValueError(
            "The metric is NaN or infinite at every prior precision. Check the outputs of the "
            "network, or convert it to a wider dtype."
        )
    is_lowest = values == values.nan_to_num(math.inf).min()
    lowest = _middle_of_longest_run(is_lowest.tolist())
    best = lowest
    if table.links and table.links[link].temperature != 1:
        while best > 0 and table.is_tied(Setting(best - 1, link), Setting(lowest, link)):
            best -= 1
    choice = Setting(best, link)
    return Choice(choice, _flat_range(table, choice))


def _middle_of_longest_run(flags: Sequence[bool]) -> int:
    """Return the index in the middle of the longest run of true entries; one must be true."""
    runs: list[list[int]] = [[]]
    for index, flag in enumerate(flags):
        if flag:
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len)
    return longest[len(longest) // 2]


def _flat_range(table: GridMetrics, choice: Setting) -> range:
    """Return the prior precisions around a choice that are worse by at most one standard error.

    The standard errors are paired. The result contains indices of prior precisions.
    """
    num_points = len(table.points)
    values = table.values[:, choice.link]
    sums = table.sums[:, choice.link]
    chosen_value = values[choice.point]
    # If a temperature was chosen, a larger prior precision may have a lower value than the chosen
    # one. The comparisons are written so that NaN counts as worse.
    errors = table.standard_errors(sums - sums[choice.point])
    is_near = (values - chosen_value).abs() <= errors
    is_worse = ~is_near & ~(values < chosen_value)
    low = choice.point
    while low > 0 and not is_worse[low - 1]:
        low -= 1
    high = choice.point
    while high < num_points - 1 and not is_worse[high + 1]:
        high += 1
    return range(low, high + 1)


def summarise(table: GridMetrics, choice: Choice, metric: str) -> Tuning:
    """Describe a choice and its alternatives; the result does not yet contain σ."""
    setting = choice.setting
    link = None
    if table.links:
        link = _with_temperatures(table, setting)
    alternatives: tuple[Alternative, ...] = ()
    if len(table.links) > 1:
        alternatives = _alternatives(table, setting)
    flat = None
    if table.has_errors:
        flat_precisions = [table.prior_precisions[point] for point in choice.flat]
        flat = min(flat_precisions), max(flat_precisions)
    return Tuning(
        prior_precision=table.prior_precisions[setting.point],
        metric=metric,
        value=float(table.values[setting]),
        table=_rows(table, setting.link, metric),
        flat=flat,
        notes=tuple(_notes(table, choice, alternatives)),
        link=link,
        alternatives=alternatives,
    )


def _with_temperatures(table: GridMetrics, choice: Setting) -> Link:
    """Return the chosen link, including the temperatures of draws and of the network.

    The best temperature of the probit also corrects the errors of its formula, so it would be wrong
    for draws. The pairwise formula has smaller errors. If it was part of the search, its best
    temperature at the chosen prior precision is therefore used for draws.
    """
    chosen = table.links[choice.link]
    if len(table.links) == 1:
        return chosen
    network = _network_of(table)
    network_temperature = network.choose_temperature(0, _candidates_of_network(network))
    draw_temperature = chosen.temperature
    pairwise = [index for index, link in enumerate(table.links) if link.name == "pairwise"]
    if chosen.name == "probit" and pairwise:
        draw_temperature = table.choose_temperature(choice.point, pairwise)
    return Link(chosen.name, chosen.temperature, draw_temperature, network_temperature)


def _network_of(table: GridMetrics) -> GridMetrics:
    """Return the metric of the network, which all tables with links contain."""
    assert table.network is not None
    return table.network


def _candidates_of_network(network: GridMetrics) -> Sequence[int]:
    """Return the indices of the links among which the best one for the network is chosen.

    If the network classifies all examples correctly, the smallest temperature is best, but it would
    make the network much too certain of its errors on other examples. The temperature is then at
    least as large as the smallest one of a posterior.
    """
    temperatures = [link.temperature for link in network.links]
    candidates = range(len(temperatures))
    lowest = network.lowest(network.points, candidates)
    if temperatures[lowest.link] > NETWORK_TEMPERATURES[0]:
        return candidates
    return [index for index in candidates if temperatures[index] >= TEMPERATURES[0]]


def _rows(table: GridMetrics, link: int, metric: str) -> list[Row]:
    """Return the rows of `Tuning.table`: a link's metric at every prior precision, ascending."""
    errors = table.standard_errors(table.sums[:, link]).tolist()
    rows: list[Row] = []
    for point in table.points:
        row: Row = {
            "prior_precision": table.prior_precisions[point],
            metric: float(table.values[point, link]),
        }
        if table.sigma_factors is not None:
            row["sigma_factor"] = float(table.sigma_factors[point])
        if table.has_errors:
            row["standard_error"] = errors[point]
        rows.append(row)
    return sorted(rows, key=itemgetter("prior_precision"))


def _alternatives(table: GridMetrics, choice: Setting) -> tuple[Alternative, ...]:
    """Compare the choice with the network, temperature scaling and every link.

    If the choice is none of these at its best prior precision, it is added as "choice".
    """
    network = _network_of(table)
    indices_by_formula = dict[str, list[int]]()
    for index, link in enumerate(table.links):
        indices_by_formula.setdefault(link.name, []).append(index)
    candidates: dict[str, tuple[GridMetrics, Sequence[int]]] = {
        "network": (network, [0]),
        "temperature scaling": (network, _candidates_of_network(network)),
    }
    for formula, indices in indices_by_formula.items():
        candidates[formula] = (table, [table.links.index(Link(formula))])
        candidates[f"{formula}, tempered"] = (table, indices)
    settings = {
        name: (compared, compared.lowest(compared.points, links))
        for name, (compared, links) in candidates.items()
    }
    if (table, choice) not in settings.values():
        settings["choice"] = (table, choice)
    alternatives = []
    for name, (compared, setting) in settings.items():
        delta = compared.prior_precisions[setting.point]
        paired_error = float(table.standard_errors(compared.sums[setting] - table.sums[choice]))
        alternatives.append(
            Alternative(
                name,
                prior_precision=None if delta == math.inf else delta,
                link=compared.links[setting.link],
                value=float(compared.values[setting]),
                difference=float(compared.values[setting] - table.values[choice]),
                half_width=1.96 * paired_error,
            )
        )
    return tuple(alternatives)


def _notes(
    table: GridMetrics, choice: Choice, alternatives: Sequence[Alternative]
) -> Iterator[str]:
    """Explain a choice at an end of the search range, and why a better score was not chosen."""
    point, link = choice.setting
    num_points = len(table.points)
    is_flat = table.has_errors and len(choice.flat) == num_points
    if num_points > 1 and not is_flat:
        yield from _notes_on_grid_ends(table, choice.setting)
    if len(table.links) > 1:
        yield from _notes_on_temperature_ends(table.links[link])
    if point > 0 and not table.values[point - 1, link].isfinite():
        yield (
            "The best prior precision is the smallest one at which the metric is finite, "
            f"{table.prior_precisions[point]:.3g}. To try smaller ones, convert the model to a "
            "wider dtype."
        )
    if alternatives:
        yield from _notes_on_lower_scores(table, choice.setting, alternatives)


def _notes_on_grid_ends(table: GridMetrics, choice: Setting) -> Iterator[str]:
    """Explain that the best prior precision is the first or the last value of the grid."""
    point = choice.point
    delta = table.prior_precisions[point]
    method = "map" if table.network is None else "temperature"
    at_this_noise = "" if table.sigma_factors is None else ", at the present sigma"
    if point == 0:
        grid = f"{delta / 1000:.1e},{delta / 100:.1e},{delta / 10:.1e}"
        yield (
            f"The best value is the smallest that was tried, {delta:.3g}. Tune this posterior "
            f"again with smaller ones{at_this_noise}: grid=[{grid}] in Python, or the command "
            f"laplace-debias tune with --prior_precisions {grid}."
        )
    elif point == table.points[-1] and _scores_like_network(table, choice):
        yield (
            f"The best value is the largest that was tried, {delta:.3g}, at which the posterior "
            "scores no better than the network. Larger values would not help. Predict with the "
            f'method "{method}", which has no uncertainty of the parameters.'
        )
    elif point == table.points[-1]:
        grid = f"{delta * 10:.1e},{delta * 100:.1e},{delta * 1000:.1e}"
        yield (
            f"The best value is the largest that was tried, {delta:.3g}. Tune this posterior again "
            f"with larger ones{at_this_noise}: grid=[{grid}] in Python, or the command "
            f"laplace-debias tune with --prior_precisions {grid}. Or predict with the method "
            f'"{method}", which has no uncertainty of the parameters.'
        )


def _scores_like_network(table: GridMetrics, choice: Setting) -> bool:
    """Whether the network has the score of the choice, up to a tie, at the same temperature.

    A regression has no temperature, and its table lacks the network. As the prior precision grows,
    the score approaches that of the network, with a difference inversely proportional to the prior
    precision. The score of the network is therefore reached if the score at half the chosen prior
    precision, or less, is the same.
    """
    tie = TIE_IN_STANDARD_ERRORS * float(table.standard_errors(table.sums[choice]))
    if table.network is None:
        half = table.prior_precisions[choice.point] / 2
        point = bisect_right(table.prior_precisions, half) - 1
        if point < 0:
            return False
        return abs(float(table.values[point, choice.link] - table.values[choice])) <= tie
    temperature = table.links[choice.link].temperature
    return any(
        abs(float(table.network.values[0, index] - table.values[choice])) <= tie
        for index, link in enumerate(table.network.links)
        if link.temperature == temperature
    )


def _notes_on_temperature_ends(link: Link) -> Iterator[str]:
    """Explain that the best temperature is the lowest or the highest temperature tried."""
    ends = {TEMPERATURES[0]: "smallest", TEMPERATURES[-1]: "largest"}
    temperature = link.temperature
    if temperature in ends:
        reason = "Check that these data are like the data of the fit."
        if temperature == TEMPERATURES[0]:
            reason = "The posterior is wide, or the network is strongly under-confident."
        yield (
            f"The best temperature, {temperature:g}, is the {ends[temperature]} of those tried. "
            f"{reason} To try other temperatures in Python, pass "
            f"link=laplace_debias.Link({link.name!r}, T)."
        )


def _notes_on_lower_scores(
    table: GridMetrics, choice: Setting, alternatives: Sequence[Alternative]
) -> Iterator[str]:
    """Explain why an alternative with a better score was not chosen, if there is one."""
    lowest = min(alternatives, key=attrgetter("difference"))
    improvement = -lowest.difference
    standard_error = float(table.standard_errors(table.sums[choice]))
    # With a single example, the standard error is NaN, and nothing is explained.
    if not improvement > TIE_IN_STANDARD_ERRORS * standard_error:
        return
    num_examples = len(table.counts)
    is_default = choice.link == 0
    temperature = lowest.link.temperature
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[-1]:
        rule = f"Its temperature, {temperature:.3g}, is outside the range tried for a posterior."
    elif num_examples < MIN_EXAMPLES and is_default:
        rule = (
            f"With fewer than {MIN_EXAMPLES} examples (here {num_examples}), tune keeps the "
            "default link at temperature 1."
        )
    elif is_default:
        rule = (
            "If the difference is small compared with its standard error, tune keeps the default "
            "link at temperature 1."
        )
    else:
        rule = (
            "If a difference is small compared with its standard error, tune prefers the simpler "
            "link and, at a temperature other than 1, the smaller prior precision, so that the "
            "posterior has an effect."
        )
    yield (
        f'The score of "{lowest.name}" is better (lower by {improvement:.2g}), but '
        f"this option was not chosen. {rule}"
    )
