"""The noise of a regression, tuned together with the prior precision.

A fit at σ₀ tells the posterior at every σ = k σ₀: the residuals stay, and the curvature C of the
mean loss becomes k⁻² C. So the marginal likelihood reads no data.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.posterior import scaled
from laplace_debias.laplace.tuning import OF_EVIDENCE, Tuning

# The range of γ = δ k² that is searched, in powers of ten.
_RANGE = 20


def rescaled(fitted: Fitted, factor: float, prior_precision: float | Sequence[float]) -> Fitted:
    """The fit with σ multiplied by a factor, under another prior."""
    old, share = fitted.posterior, factor**-2
    assert isinstance(fitted.likelihood, Gaussian)
    assert fitted.num_targets is not None
    deltas = torch.tensor(prior_precision, dtype=torch.float64, device=old.mean.device)
    curvature = old.curvature.map(lambda _, block: scaled(block, share))
    squares = squared_residuals(fitted)
    return replace(
        fitted,
        subject=replace(
            fitted.subject,
            likelihood=Gaussian(fitted.likelihood.sigma * factor),
            prior_precision=deltas,
        ),
        posterior=replace(old, curvature=curvature, prior_precision=deltas),
        nll=fitted.nll + 0.5 * squares * (factor**-2 - 1) + fitted.num_targets * math.log(factor),
    )


def squared_residuals(fitted: Fitted) -> float:
    """Q = Σ ‖(f − y)/σ‖² over the N examples."""
    assert isinstance(fitted.likelihood, Gaussian)
    assert fitted.num_targets is not None
    sigma = fitted.likelihood.sigma
    # The mean over outputs, of which there are as many as sigmas, or whose sigma is the same.
    normaliser = fitted.likelihood.log_normaliser(sigma.numel()) / sigma.numel()
    return 2 * (fitted.nll - fitted.num_targets * normaliser)


def check_noise(fitted: Fitted) -> None:
    """Require a σ that can be tuned."""
    if type(fitted.likelihood) is not Gaussian:
        raise ValueError(
            f"sigma=True tunes the noise of Gaussian, not of {type(fitted.likelihood).__name__}: "
            "leave it out."
        )
    if fitted.num_targets is None:
        raise ValueError(
            'sigma=True is not there for fisher="empirical", nor for a posterior file from before '
            'sigma could be tuned: fit again, with fisher="exact" or "mc".'
        )
    # What `squared_residuals` takes the difference of, in double precision.
    if 1e-12 * (abs(fitted.nll) + fitted.num_targets) >= squared_residuals(fitted):
        raise ValueError(
            "The residuals are zero beside sigma, to rounding: there is no noise to estimate. "
            "Check that the targets are not the outputs, or fit with a smaller sigma."
        )


def tune_noise(fitted: Fitted) -> tuple[Tuning, Fitted]:
    r"""Maximise the log marginal likelihood over σ = k σ₀ and one prior precision δ.

    With $P = k^{-2}(N C + \gamma)$, $\gamma = \delta k^2$, S = ‖θ* − μ‖² for the prior's mean μ and
    the residuals' Q, the log marginal likelihood is, up to a constant,
    $$-\frac{Q + \gamma S}{2k^2} - M\log k + \frac D2\log\gamma
    - \frac12\log\det(N C + \gamma),$$
    whose best k has a closed form, $k^2 = (Q + \gamma S)/M$. What is left is a search over γ. A σ
    for each output keeps the ratios that it has.

    Reference:
        MacKay (1992), "Bayesian interpolation", for both hyperparameters by the evidence.
    """
    # Here, as it takes a third of a second to import.
    from scipy.optimize import minimize_scalar

    check_noise(fitted)
    assert fitted.num_targets is not None
    posterior = fitted.posterior
    # At a temperature the likelihood is that of N/T examples.
    M, Q, nll = (
        value / posterior.temperature
        for value in (fitted.num_targets, squared_residuals(fitted), fitted.nll)
    )
    D = len(posterior.mean)
    S = posterior.from_prior_mean.double().square().sum().item()
    table: list[dict[str, float]] = []

    def loss(log_gamma: float) -> float:
        gamma = 10.0**log_gamma
        k = math.sqrt((Q + gamma * S) / M)
        at_k = nll + 0.5 * Q * (k**-2 - 1) + M * math.log(k)
        log_det = posterior.log_det_precision(
            torch.tensor(gamma, dtype=torch.float64, device=posterior.mean.device)
        ).item()
        value = -at_k + 0.5 * (D * math.log(gamma) - gamma * S * k**-2 - log_det)
        table.append({"prior_precision": gamma * k**-2, "sigma_factor": k, OF_EVIDENCE: value})
        return -value

    # With the noise free there may be several optima: a grid finds the best of them.
    coarse = [loss(power) for power in range(-_RANGE, _RANGE + 1)]
    start = min(range(len(coarse)), key=coarse.__getitem__) - _RANGE
    if abs(start) == _RANGE:
        raise ValueError(
            "The marginal likelihood has no optimum in sigma and the prior precision together: "
            "give sigma, and tune the prior precision on validation data."
        )
    result = minimize_scalar(
        loss, bounds=(start - 1, start + 1), method="bounded", options={"xatol": 1e-4}
    )
    k = math.sqrt((Q + 10.0**result.x * S) / M)
    delta = 10.0**result.x * k**-2
    tuned = rescaled(fitted, k, delta)
    assert isinstance(tuned.likelihood, Gaussian)
    table.sort(key=lambda row: row["prior_precision"])
    return Tuning(delta, OF_EVIDENCE, -result.fun, table, tuned.likelihood.sigma.tolist()), tuned
