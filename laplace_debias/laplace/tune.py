"""Ways to tune: on held-out data, or by the marginal likelihood; with the noise or without."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.fits.passes import NOT_SAVED, Passes
from laplace_debias.curvature.fits.saved_passes import SavedPasses
from laplace_debias.curvature.losses.likelihoods import Gaussian, HeteroscedasticGaussian
from laplace_debias.curvature.network.batches import Batches, Pairs, with_progress
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import evidence, links, noise, shards
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.resume import check_resumable, states_of_tuning
from laplace_debias.laplace.search import DEFAULT_GRID, Found, Look, search, tuning_of
from laplace_debias.laplace.subject import Subject
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.laplace.validation_scores import MetricOverTerms, NoiseProfile
from laplace_debias.system.randomness import replayed
from laplace_debias.system.ranks import current

# Metrics of class probabilities; True where more is better.
_OF_PROBABILITIES = {"accuracy": True, "brier": False, "ece": False, "nll": False}


@dataclass(frozen=True, eq=False)
class Wanted:
    """What to look for on held-out data; as `Laplace.tune` takes it.

    Attributes:
        metric: The metric.
        grid: Prior precisions; None for the default.
        extend: Whether to go on from the grid and to refine it; None if it is the default.
        sigma: Whether to tune the noise, too; None if it was never given.
        once: Whether the data can be read only once.
    """

    metric: str
    grid: Float[Tensor, " grid"] | Sequence[float] | None
    extend: bool | None
    sigma: bool | None
    once: bool

    def as_plain(self) -> dict[str, Any]:
        """The same as plain data, by the names of the arguments."""
        return {
            "metric": self.metric,
            "grid": self.points.tolist(),
            "extend": self.goes_on,
            "sigma": self.sigma,
            "the loader is read once": self.once,
        }

    @property
    def goes_on(self) -> bool:
        """Whether to go on from the grid."""
        return self.grid is None if self.extend is None else self.extend

    @property
    def points(self) -> Float[Tensor, " grid"]:
        """Where to begin.

        Raises:
            ValueError: If the grid is empty or not positive and finite.
        """
        if self.grid is None:
            return DEFAULT_GRID
        grid = torch.as_tensor(self.grid, dtype=torch.float64).cpu()
        if grid.ndim != 1 or len(grid) == 0 or not bool(((grid > 0) & grid.isfinite()).all()):
            raise ValueError(
                "The grid must hold positive, finite prior precisions, as "
                f"torch.logspace(-4, 4, 21) does; got {grid.tolist()}."
            )
        return grid.sort().values


def best(
    subject: Subject,
    fitted: Fitted,
    predict_grid: Callable[[Inputs, Tensor], list[Distribution]],
    loader: Batches | None,
    wanted: Wanted,
    *,
    method: str,
    link: str,
    per: str | None,
    generator: torch.Generator | None,
    progress: bool,
    resume: str | os.PathLike[str] | None,
) -> tuple[Tuning, Fitted | None]:
    """The best prior precision by one of the methods.

    Args:
        subject: What the fit is of.
        fitted: The fit.
        predict_grid: As `on_data` takes it, with that link.
        loader: As `Laplace.tune` takes it; so are the others.
        wanted: What to look for on held-out data; its `sigma` serves both methods.
        method: The method.
        link: Of `"grid"`.
        per: Of `"marglik"`.
        generator: What the loader draws from.
        progress: Whether to show a progress bar.
        resume: A folder for the state.

    Returns:
        What was found; the fit with it if its noise was tuned, too.

    Raises:
        ValueError: As `Laplace.tune`.
        OSError: Likewise.
    """
    if method == "marglik":
        of_data = (loader, wanted.grid, generator, wanted.extend, resume)
        is_given = progress or any(x is not None for x in of_data)
        if is_given or (wanted.metric, link) != ("nll", "probit"):
            raise ValueError(
                'method="marglik" uses neither a loader, a generator, a grid, extend, '
                "resume, progress, a link nor a metric."
            )
        return by_evidence(fitted, wanted.sigma, per)
    if method != "grid":
        raise ValueError(f"Unknown method={method!r}: use 'grid' or 'marglik'.")
    if loader is None:
        raise ValueError(
            'method="grid" needs held-out data: pass a loader, or use method="marglik".'
        )
    if per is not None:
        raise ValueError(
            f'per={per!r} tunes by the marginal likelihood: pass method="marglik", and no loader.'
        )
    fitted.check_model()
    links.check_link(link, fitted.likelihood)
    check_resumable(resume, "exact", generator, loader)
    shards.check_held_out(loader)
    passes = replayed(with_progress(loader, progress, "tune"), generator)

    def read() -> Pairs:
        return subject.on_device(passes())

    if resume is None:
        return on_data(fitted, predict_grid, read, wanted)
    if fitted.posterior.is_sharded:
        raise ValueError(
            "`resume` needs the whole posterior on each process: fit with "
            "`replicate=True`, or call `la.gather()` before `la.tune`."
        )
    ranks = current()
    states = states_of_tuning(resume, fitted, ranks, **wanted.as_plain(), link=link)
    saved = SavedPasses(states, fitted.posterior.mean.device, ranks, "tuning")
    found = on_data(fitted, predict_grid, read, wanted, saved)
    ranks.exchange(None)
    states.remove()
    return found


def on_data(
    fitted: Fitted,
    predict_grid: Callable[[Inputs, Tensor], list[Distribution]],
    read: Callable[[], Pairs],
    wanted: Wanted,
    passes: Passes = NOT_SAVED,
) -> tuple[Tuning, Fitted | None]:
    """The prior precision with the best metric on held-out data.

    Args:
        fitted: The fit.
        predict_grid: From inputs `[B, ...]` and a grid to the predictive at each of its points.
        read: Gives the data of a pass.
        wanted: What to look for.
        passes: The passes over the data, which may be saved as they go.

    Returns:
        What was found; the fit with it if its noise was tuned, too.

    Raises:
        ValueError: For a metric that does not fit, a grid that is empty or not positive, no batch,
            targets that are all ignored, or a metric that is NaN everywhere; for `sigma` where
            there is none, or no closed form.
    """
    metric, likelihood, class_dim = wanted.metric, fitted.likelihood, fitted.settings.class_dim
    is_regression = isinstance(likelihood, (Gaussian, HeteroscedasticGaussian))
    known = ["nll"] if is_regression else list(_OF_PROBABILITIES)
    if metric not in known:
        raise ValueError(
            f"Unknown metric={metric!r} for this likelihood: use one of {', '.join(known)}."
        )
    points, unit = wanted.points, 1.0
    with_noise = _tunes_noise(fitted, wanted)
    scores: MetricOverTerms | NoiseProfile = MetricOverTerms(metric, likelihood, class_dim)
    if with_noise:
        # The grid is of γ = δ k², about the k² that the residuals of the training data tell.
        of_noise = noise.noise_of(fitted)
        unit = noise.squared_residuals(fitted) / of_noise.num_targets
        scores, points = NoiseProfile(likelihood, class_dim), points * unit
    in_turn = fitted.posterior.is_sharded
    look = Look(predict_grid, read, likelihood, class_dim, scores, in_turn, passes)
    if wanted.goes_on and not wanted.once:
        found = search(look, points, _OF_PROBABILITIES[metric], unit)
    else:
        found = _only(look, points, _OF_PROBABILITIES[metric], wanted)

    def sigma_at(factor: float) -> float | list[float]:
        assert isinstance(likelihood, Gaussian)
        return (likelihood.sigma * factor).tolist()

    result = tuning_of(found, metric, sigma_at)
    if not with_noise:
        return _noting_assumed(result, fitted, wanted.sigma), None
    factor = found.points[found.best].sigma_factor
    assert factor is not None
    assert isinstance(result.prior_precision, float)
    return result, noise.rescaled(fitted, factor, result.prior_precision)


def by_evidence(
    fitted: Fitted, sigma: bool | None, per: str | None
) -> tuple[Tuning, Fitted | None]:
    """The largest marginal likelihood.

    Args:
        fitted: The fit.
        sigma: Whether to tune the noise, too; None if it was never given.
        per: As `groups_of` takes it.

    Returns:
        What was found; the fit with it if its noise was tuned, too.

    Raises:
        ValueError: As `evidence` and `noise` raise.
    """
    if sigma or (sigma is None and _is_assumed(fitted) and fitted.noise is not None):
        return noise.tune_noise(fitted) if per is None else noise.tune_noise_and_groups(fitted, per)
    if per is None:
        found = evidence.maximise_marginal_likelihood(fitted.log_marginal_likelihood)
    else:
        found = evidence.tune_groups(fitted, per)
    return _noting_assumed(found, fitted, sigma), None


def _only(look: Look, points: Tensor, more_is_better: bool, wanted: Wanted) -> Found:
    """What the grid alone gives, with a note if the best lies at its end."""
    found = Found(look(points.tolist()), more_is_better)
    if wanted.goes_on:
        return found.noting(
            "Searched on the grid alone: the data is an iterator, which can be read only once."
        )
    best, last = found.best, len(found.points) - 1
    if last > 0 and best in (0, last):
        advice = "leave out extend=False" if wanted.grid is None else "pass extend=True"
        return found.noting(
            f"The best is at the {'smallest' if best == 0 else 'largest'} value of the grid: "
            f"{advice} to go on from there."
        )
    return found


def _is_assumed(fitted: Fitted) -> bool:
    return type(fitted.likelihood) is Gaussian and fitted.likelihood.is_assumed


def _tunes_noise(fitted: Fitted, wanted: Wanted) -> bool:
    """Whether the noise is tuned with the prior precision.

    Raises:
        ValueError: If it is to be, and cannot.
    """
    is_closed = fitted.noise is not None and fitted.noise.power == 2
    if wanted.sigma is None:
        return _is_assumed(fitted) and is_closed and wanted.grid is None
    if not wanted.sigma:
        return False
    noise.noise_of(fitted)
    if wanted.grid is not None:
        raise ValueError(
            "sigma=True looks at every prior precision with the best sigma for it, and chooses the "
            "grid by that: leave out the grid, or sigma."
        )
    if not is_closed:
        raise ValueError(
            'sigma=True has no closed form on held-out data for fisher="empirical": pass '
            'method="marglik" and no loader, or fit with fisher="exact".'
        )
    return True


def _noting_assumed(found: Tuning, fitted: Fitted, sigma: bool | None) -> Tuning:
    """With a note if a noise that nobody gave stays."""
    if sigma is not None or not _is_assumed(fitted):
        return found
    note = "sigma was never given and is not tuned here: 1.0 is assumed (sigma=True tunes it)."
    return replace(found, notes=(*found.notes, note))
