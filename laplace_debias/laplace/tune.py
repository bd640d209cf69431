"""Ways to tune: on held-out data, or by the marginal likelihood; with the noise or without."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Gaussian, HeteroscedasticGaussian
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.laplace import evidence, noise, predictive
from laplace_debias.laplace.data_size import check_held_out
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.laplace.search import (
    DEFAULT_GRID,
    TEMPERATURES,
    Look,
    first_look,
    tuning_of,
)
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.system.checks import real
from laplace_debias.system.ranks import current


def on_data(
    fitted: Fitted,
    loader: Batches,
    metric: str,
    grid: Float[Tensor, " grid"] | Sequence[float] | None,
    sigma: bool | None,
    link: str | Link | None,
    generator: torch.Generator | None,
    progress: bool,
) -> tuple[Tuning, Fitted | None]:
    """The best prior precision, link and temperature on held-out data; the fit if σ was tuned."""
    fitted.check_model()
    check_held_out(loader)
    stream = fitted.subject.stream(loader, generator, "tune" if progress else None)
    likelihood, class_dim = fitted.likelihood, fitted.subject.settings.class_dim
    is_regression = isinstance(likelihood, (Gaussian, HeteroscedasticGaussian))
    known = ["nll"] if is_regression else ["brier", "nll"]
    if metric not in known:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood: use one of {', '.join(known)}."
        )
    link_from(link, likelihood)
    points = _points(grid)
    with_noise = _tunes_noise(fitted, grid, sigma)
    if with_noise:
        # The grid is of γ = δ k², about the k² that the residuals of the training data tell.
        assert fitted.num_targets is not None
        points = points * (noise.squared_residuals(fitted) / fitted.num_targets)

    # The first batch shows how many classes there are.
    defaults = [predictive.default_link(fitted, x) for x, _ in stream.first]
    default = next(filter(None, current().exchange(next(iter(defaults), None))), None)
    by = links_to_try(default, link)
    predict = partial(predictive.predictives_by_links, fitted)
    look = Look(predict, stream, likelihood, class_dim, metric, with_noise)
    curve, compared = first_look(look, points, by)
    result, factors = tuning_of(curve, compared, metric, likelihood), curve.table.factors
    if factors is None:
        return _noting_assumed(result, fitted, sigma), None
    assert isinstance(result.prior_precision, float)
    return result, noise.rescaled(fitted, float(factors[curve.best]), result.prior_precision)


def links_to_try(default: Link | None, given: str | Link | None) -> list[Link | None]:
    """The links that are searched over, the simplest first.

    A formula alone is tried at all temperatures; without one the default and, where covariances are
    at hand, the probit.
    """
    if default is None or isinstance(given, Link):
        return [given if isinstance(given, Link) else None]
    names = [given] if given else list(dict.fromkeys([default.name, "probit"]))
    return [
        Link(names[0]),
        *(Link(n, T) for n in names for T in TEMPERATURES if (n, T) != (names[0], 1)),
    ]


def by_evidence(
    fitted: Fitted, sigma: bool | None, per: str | None
) -> tuple[Tuning, Fitted | None]:
    """The largest marginal likelihood; the fit with it if its noise was tuned, too."""
    with_noise = sigma or (sigma is None and _is_assumed(fitted) and fitted.num_targets is not None)
    found, tuned = noise.tune_noise(fitted) if with_noise else (None, fitted)
    if per is not None:
        of_groups = evidence.tune_groups(tuned, per)
        deltas = torch.tensor(of_groups.prior_precision, dtype=torch.float64)
        tuned = replace(tuned, posterior=tuned.posterior.changed(prior_precision=deltas))
        found = of_groups if found is None else replace(of_groups, sigma=found.sigma)
    elif found is None:
        found = evidence.maximise_marginal_likelihood(fitted.log_marginal_likelihood)
    return (found, tuned) if with_noise else (_noting_assumed(found, fitted, sigma), None)


def _is_assumed(fitted: Fitted) -> bool:
    return type(fitted.likelihood) is Gaussian and fitted.likelihood.is_assumed


def _points(grid: Float[Tensor, " grid"] | Sequence[float] | None) -> Float[Tensor, " grid"]:
    """Where a search begins."""
    if grid is None:
        return DEFAULT_GRID
    points = real(grid, "grid").cpu()
    if points.ndim != 1 or len(points) == 0 or not bool(((points > 0) & points.isfinite()).all()):
        raise ValueError(
            "The grid must hold positive, finite prior precisions, as "
            f"torch.logspace(-4, 4, 21) does; got {points.tolist()}."
        )
    return points.sort().values


def _tunes_noise(fitted: Fitted, grid: object, sigma: bool | None) -> bool:
    """Whether the noise is tuned with the prior precision."""
    if sigma is None:
        return _is_assumed(fitted) and fitted.num_targets is not None and grid is None
    if not sigma:
        return False
    noise.check_noise(fitted)
    if grid is not None:
        raise ValueError(
            "sigma=True looks at every prior precision with the best sigma for it, and chooses the "
            "grid by that: leave out the grid, or sigma."
        )
    return True


def _noting_assumed(found: Tuning, fitted: Fitted, sigma: bool | None) -> Tuning:
    """With a note if a noise that nobody gave stays."""
    if sigma is not None or not _is_assumed(fitted):
        return found
    note = "sigma was never given and is not tuned here: 1.0 is assumed (sigma=True tunes it)."
    return replace(found, notes=(*found.notes, note))
