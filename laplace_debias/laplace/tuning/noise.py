"""The noise of a regression: a fit at σ₀ determines the posterior at every σ = k σ₀.

The residuals do not change, and the curvature C of the mean loss becomes k⁻² C, so no data is read.
"""

from dataclasses import replace

import torch

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.laplace.state.fitted import FittedPosterior, Residuals
from laplace_debias.laplace.state.prior import Prior
from laplace_debias.laplace.tuning.result import TunedFit, Tuning
from laplace_debias.system.shown import counted


def tunes_noise(fitted: FittedPosterior, sigma: bool | None) -> bool:
    """Whether σ is tuned: if `sigma` is True, or if it is None and the user has not set σ.

    Raises:
        ValueError: If σ cannot be tuned.
    """
    if sigma is None:
        sigma = fitted.likelihood.has_free_sigma and fitted.residuals is not None
    if sigma:
        _check_can_tune_noise(fitted)
    return sigma


def _check_can_tune_noise(fitted: FittedPosterior) -> None:
    r"""Require a curvature that scales with the noise, and residuals that are not zero.

    Raises:
        ValueError: If the likelihood is not for regression, if the curvature is not proportional to
            $\sigma^{-2}$, or if the residuals are zero.
    """
    likelihood = fitted.likelihood
    if not likelihood.has_sigma:
        raise ValueError(
            "`sigma=True` tunes the noise of a regression, but the likelihood is "
            f"{type(likelihood).__name__}. Remove `sigma=`."
        )
    residuals = fitted.residuals
    if residuals is None and fitted.posterior.prior.information is not None:
        raise ValueError(
            "`sigma=True` does not work after a fit with `prior=`, because the precision of this "
            "prior does not change with the noise. Pass the noise, as Laplace(..., sigma=)."
        )
    if residuals is None:
        raise ValueError(
            '`sigma=True` does not work after a fit with `fisher="empirical"`, or '
            "with a posterior file saved by an early version of this library. Fit "
            'again with `fisher="exact"` or `fisher="mc"`.'
        )
    # The squared residuals are a difference of terms of this size, so smaller values are rounding
    # errors.
    if 1e-12 * (abs(fitted.nll) + residuals.num_targets) >= residuals.squared:
        raise ValueError(
            "The residuals are so small compared with `sigma` that they are zero up "
            "to rounding, so the noise cannot be estimated. Check that the targets "
            "are not the model's own outputs, or fit with a smaller `sigma`."
        )


def note_on_assumed_sigma(fitted: FittedPosterior, sigma: bool | None) -> str | None:
    """Return a note if σ was never set and is not tuned, or else None."""
    likelihood = fitted.likelihood
    if sigma is not None or not isinstance(likelihood, Gaussian) or not likelihood.is_assumed:
        return None
    if likelihood.sigma.ndim:
        value = "Its value is estimated from the residuals of each output"
    else:
        value = "Its value is assumed to be 1.0"
    advice = (
        "To tune it, pass `sigma=True` without `grid=` (command line: --sigma without "
        "--prior_precisions)"
    )
    if fitted.residuals is None:
        advice = "Fit again with Laplace(..., sigma=) (command line: fit --sigma)"
    return f"`sigma` was not specified, and is not tuned here. {value}. {advice}."


def note_on_given_sigma(tuned: TunedFit, sigma: bool | None) -> str | None:
    """Return a note if a given σ may be the reason for the largest prior precision, or else None.

    If σ is larger than the noise of the held-out data, any variance of the weights makes the
    predictive variance worse, so that the largest prior precision is best.
    """
    likelihood = tuned.fitted.likelihood
    tuning = tuned.tuning
    is_given = isinstance(likelihood, Gaussian) and not likelihood.is_assumed
    if sigma is not None or not is_given or tuned.fitted.residuals is None or tuning.all_alike:
        return None
    largest = max(row["prior_precision"] for row in tuning.table)
    if len(tuning.table) == 1 or tuning.sigma is not None or tuning.prior_precision != largest:
        return None
    return (
        "`sigma` is not tuned here, because it was set before. If it is too large, this can be the "
        "reason why the largest prior precision is best. To tune both, pass `sigma=True` without "
        "`grid=` (command line: --sigma without --prior_precisions)."
    )


def apply_with_noise(tuning: Tuning, fitted: FittedPosterior, factor: float) -> TunedFit:
    """Multiply σ by a factor, and set the prior precision that was chosen along with it."""
    tuned = rescaled(fitted, factor, fitted.prior.with_precision(tuning.prior_precision))
    assert isinstance(tuned.likelihood, Gaussian)
    return TunedFit(replace(tuning, sigma=tuned.likelihood.sigma.tolist()), tuned)


def rescaled(fitted: FittedPosterior, factor: float, prior: Prior) -> FittedPosterior:
    """Multiply σ by a factor, and set the prior."""
    posterior = fitted.posterior
    curvature_factor = factor**-2
    residuals = fitted.residuals
    assert isinstance(fitted.likelihood, Gaussian)
    assert residuals is not None
    likelihood = fitted.likelihood.scaled(factor)
    curvature = posterior.curvature.map(lambda _, block: curvature_factor * block)
    limits = fitted.thinned_at
    if limits is not None:
        # The limits are scaled like the curvature, because thinning depends only on their ratio.
        limits = tuple(limit * curvature_factor for limit in limits)
    return replace(
        fitted.with_likelihood(likelihood),
        posterior=posterior.changed(
            curvature=curvature,
            prior=prior.for_parameters(fitted.parameters),
        ),
        nll=fitted.nll + nll_change(residuals, factor),
        thinned_at=limits,
    )


def nll_change(residuals: Residuals, factor: float) -> float:
    """Compute how much the negative log-likelihood grows if σ is multiplied by a factor."""
    return float(residuals.nll_change(torch.tensor(factor, dtype=torch.float64).log()))


def with_noise(fitted: FittedPosterior, likelihood: Likelihood) -> FittedPosterior:
    r"""Return the posterior for a different noise, under the same prior.

    The curvature is proportional to $\sigma^{-2}$ if the noise levels of all outputs are multiplied
    by the same factor.

    Raises:
        ValueError: If the noise levels change by different factors, or if the curvature is not
            proportional to $\sigma^{-2}$.
    """
    assert isinstance(fitted.likelihood, Gaussian)
    assert isinstance(likelihood, Gaussian)
    earlier = fitted.likelihood.curvature_sigma
    sigma = likelihood.sigma
    if sigma.ndim and earlier.shape != sigma.shape:
        at_the_fit = "a single entry"
        if earlier.ndim:
            at_the_fit = counted(len(earlier), "entry", "entries")
        raise ValueError(
            f"`sigma` has {counted(len(sigma), 'entry', 'entries')}, but had {at_the_fit} at the "
            "fit. Pass the same number, or fit again with Laplace(..., sigma=)."
        )
    factors = (sigma / earlier).reshape(-1)
    is_common = bool((factors / factors[0] - 1).abs().max() < 1e-6)
    if fitted.residuals is None or not is_common:
        raise ValueError(
            "The curvature at this `sigma` is not known: it can be computed only if the noise "
            "levels of all outputs change by the same factor, and not after a fit with "
            '`fisher="empirical"` or `prior=`. Fit again with Laplace(..., sigma=).'
        )
    return rescaled(fitted, float(factors[0]), fitted.prior).with_likelihood(likelihood)
