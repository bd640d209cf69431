"""Prior precisions and noise, optimised by gradient steps on the marginal likelihood."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Optimizer

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.tuning.noise import rescaled


@dataclass(eq=False)
class HyperParameters:
    """The logarithms of the prior precisions and of the noise, with their optimizer.

    Attributes:
        log_deltas: log δ for each group of blocks.
        groups: The index of the group of each block.
        log_noise: The logarithm of the noise relative to the initial noise; None if the noise is
            fixed.
        initial: The likelihood with the initial noise.
        optimizer: Adam, which updates these logarithms.
    """

    log_deltas: Float[Tensor, " groups"]
    groups: Int[Tensor, " blocks"]
    log_noise: Float[Tensor, ""] | None
    initial: Likelihood
    optimizer: Optimizer = field(repr=False)

    @classmethod
    def at_start(
        cls,
        fitted: FittedPosterior,
        per: str | None,
        prior_precision: float,
        tunes_noise: bool,
        learning_rate: float,
    ) -> "HyperParameters":
        """Create the hyper-parameters before the first step."""
        device = fitted.posterior.mean.device
        groups = torch.tensor(_groups(fitted, per), device=device)
        log_deltas = torch.full(
            (int(groups.max()) + 1,),
            math.log(prior_precision),
            dtype=torch.float64,
            device=device,
            requires_grad=True,
        )
        tuned = [log_deltas]
        log_noise = None
        if tunes_noise:
            if fitted.residuals is None:
                raise ValueError(
                    'The noise cannot be optimised with `fisher="empirical"`, because the '
                    "curvature of the empirical Fisher is not proportional to the noise "
                    'precision. Pass `sigma=`, or use `fisher="exact"` or `fisher="mc"`.'
                )
            log_noise = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
            tuned.append(log_noise)
        optimizer = torch.optim.Adam(tuned, lr=learning_rate)
        return cls(
            log_deltas=log_deltas,
            groups=groups,
            log_noise=log_noise,
            initial=fitted.likelihood,
            optimizer=optimizer,
        )

    def deltas(self) -> Float[Tensor, " blocks"]:
        """Return δ for each block, detached from the graph."""
        return self.log_deltas.detach().exp()[self.groups]

    def improve(self, fitted: FittedPosterior, steps: int) -> FittedPosterior:
        """Take steps towards a larger marginal likelihood, and return the updated posterior."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            deltas = self.log_deltas.exp()[self.groups]
            (-log_marginal_likelihood(fitted, deltas, self._log_factor(fitted))).backward()
            self.optimizer.step()
        prior = fitted.prior.with_precision(self.deltas())
        if self.log_noise is None:
            return fitted.with_prior(prior)
        factor = math.exp(float(self._log_factor(fitted).detach()))
        return rescaled(fitted, factor, prior)

    def _log_factor(self, fitted: FittedPosterior) -> Float[Tensor, ""]:
        """Compute the logarithm of the ratio between the current noise and the noise of a fit."""
        if self.log_noise is None:
            return torch.zeros((), dtype=torch.float64)
        assert isinstance(self.initial, Gaussian)
        assert isinstance(fitted.likelihood, Gaussian)
        ratio = self.initial.sigma.double().mean() / fitted.likelihood.sigma.double().mean()
        return self.log_noise + ratio.log().to(self.log_noise)


def log_marginal_likelihood(
    fitted: FittedPosterior, deltas: Float[Tensor, " blocks"], log_factor: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    r"""Compute log p(D) for other prior precisions, with the noise multiplied by a factor k.

    $$-\tfrac1T\big(\ell + \tfrac12 Q(k^{-2} - 1) + M\log k\big) + \log p(\theta^*) +
    \tfrac D2\log 2\pi - \tfrac12\log\det\big(k^{-2}\tfrac NT C + \delta\big)$$

    where Q = Σ‖(f − y)/σ‖² is the sum over residuals, and M is the number of target values. The
    result is differentiable in δ and log k.
    """
    posterior = fitted.posterior
    if not log_factor.requires_grad and float(log_factor) == 0:
        return fitted.log_marginal_likelihood(deltas)
    share = (-2 * log_factor).exp()
    size = sum(posterior.curvature.sizes)
    log_det = size * share.log() + posterior.log_det_precision(deltas / share)
    assert fitted.residuals is not None
    nll = fitted.nll + fitted.residuals.nll_change(log_factor)
    return posterior.log_marginal_likelihood(nll, deltas, log_det)


def _groups(fitted: FittedPosterior, per: str | None) -> list[int]:
    """Return the index of the group of each block."""
    names = fitted.parameters.block_names
    if per is None:
        return [0] * len(names)
    if fitted.config.structure.is_dense:
        raise ValueError(
            f"`curvature={fitted.config.structure.name!r}` treats all parameters as one "
            "block with a single prior precision. Pass `per=None`, or use "
            '`curvature="kfac"`, "ekfac" or "diag".'
        )
    if per == "kind":
        names = [block.kind for block in fitted.parameters.blocks]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
