"""Regression in which the network gives the noise, too."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.losses.likelihoods.gaussian import (
    NormalMixture,
    check_finite_floats,
    noisy_normal,
)
from laplace_debias.curvature.network.faults import require


class HeteroscedasticGaussian(Likelihood):
    r"""Regression with Gaussian noise whose variance the network gives, input by input.

    Outputs are `[B, 2C]`: C means $\mu$, then C log-variances $s = \log\sigma^2$. Targets are
    floating point, `[B, C]`; `[B]` will do for C = 1. With outputs `[B, C, 2]`, a mean and a
    log-variance for each target, every target is a position, and targets are `[B, C]` as well
    (`class_dim=-1` says it where C is 2). A network that gives σ, or the variance as
    `nn.GaussianNLLLoss` takes it, fits once it returns `torch.cat([mean, variance.log()], -1)`.

    $\ell = \sum_c \tfrac12 (y_c-\mu_c)^2 e^{-s_c} + \tfrac12 s_c + \tfrac12\log 2\pi$

    Its Hessian in the outputs can be indefinite: along $s$ it is $\tfrac12(y-\mu)^2 e^{-s}$, with
    $(y-\mu)e^{-s}$ beside it. The curvature here is its expectation over $y \sim p(y\mid f)$, the
    Fisher information $\mathrm{diag}(e^{-s}, \tfrac12)$, which is positive definite and sees no
    target. `GGN` and `Fisher` are that; `Hessian` is the Hessian.

    The outputs are Gaussian in the linearised network, the predictive is not: `predictive` is the
    normal with its exact mean, and its exact covariance
    $\Sigma_\mu + \mathrm{diag}(e^{\bar s + \mathrm{var}(s)/2})$.

    Reference:
        Nix & Weigend (1994), "Estimating the mean and variance of the target probability
        distribution"; Immer et al. (2023), "Effective Bayesian heteroscedastic regression with deep
        neural networks", for natural parameters instead, in which Hessian and Fisher agree.
    """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require outputs `[B, 2C]` and floating-point targets `[B, C]`."""
        size = outputs.shape[1]
        if size % 2:
            raise ValueError(
                "Heteroscedastic regression needs a mean and a log-variance for each target, "
                f"outputs [B, 2C] or [B, C, 2]; the model has {size} in the last dimension."
            )
        self._check_targets(outputs[:, : size // 2], targets)
        log_variances = outputs[:, size // 2 :]
        # Their exponentials of both signs are needed.
        limit = -math.log(torch.finfo(outputs.dtype).tiny)
        low, high = torch.aminmax(log_variances)
        dtype = outputs.dtype
        require(
            (low > -limit) & (high < limit),
            lambda: ValueError(
                f"Log-variances of {float(low):.3g} … {float(high):.3g} are out of the range of "
                f"{dtype}: the last {size // 2} of {size} outputs must be the logarithms of "
                "variances."
            ),
        )

    def check_predicted(self, values: Tensor, targets: Tensor) -> None:
        """Require targets that fit a predictive's means, `[B, C]`."""
        self._check_targets(values, targets)

    def _check_targets(self, means: Tensor, targets: Tensor) -> None:
        is_single = means.shape[1] == 1 and targets.shape == means.shape[:1]
        if targets.shape != means.shape and not is_single:
            raise ValueError(
                "Targets of heteroscedastic regression must have the shape of the means, "
                f"{tuple(means.shape)}, half as many as the outputs; got {tuple(targets.shape)}."
            )
        check_finite_floats(targets, "Regression")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-density of the targets."""
        mean, log_variance = outputs.chunk(2, -1)
        residuals = (targets.reshape(mean.shape) - mean) * (-log_variance / 2).exp()
        terms = residuals.square() + log_variance + math.log(2 * math.pi)
        return 0.5 * terms.sum(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""The 2C columns of $\mathrm{diag}(e^{-s/2}, \sqrt{1/2})$: of the Fisher information."""
        half = (-outputs.chunk(2, -1)[1] / 2).exp()
        diagonal = torch.cat([half, torch.full_like(half, 0.5**0.5)], -1)
        return torch.diag_embed(diagonal).movedim(-1, 0)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch targets"]:
        """`μ + e^{s/2} ε`, the normal quantiles of the first C uniforms."""
        mean, log_variance = outputs.chunk(2, -1)
        noise = torch.special.ndtri(uniforms[:, : mean.shape[1]])
        return mean + (log_variance / 2).exp() * noise.to(outputs)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> MultivariateNormal:
        """The normal with the predictive's mean and covariance."""
        size = mean.shape[-1] // 2
        if covariance is None:
            return _normal(mean[..., :size], None, mean[..., size:].exp())
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        noise = _mean_noise(mean[..., size:], variances[..., size:])
        return _normal(mean[..., :size], covariance[..., :size, :size], noise)

    def mixture(self, samples: Tensor) -> MultivariateNormal:
        """The normal with the mixture's mean and covariance."""
        means, log_variances = samples.chunk(2, -1)
        mean = means.mean(0)
        residuals = means - mean
        covariance = torch.einsum("s...i,s...j->...ij", residuals, residuals) / len(samples)
        return _normal(mean, covariance, log_variances.exp().mean(0))

    def marginals(self, mean: Tensor, variances: Tensor) -> Normal:
        """The normals with the predictive's means and variances; batch shape `[B, C]`."""
        (mu, s), (of_mu, of_s) = mean.chunk(2, -1), variances.chunk(2, -1)
        return Normal(mu, (of_mu + _mean_noise(s, of_s)).sqrt())

    def marginal_mixture(self, samples: Tensor) -> NormalMixture:
        """The mixture of the normals that the samples of the outputs say."""
        means, log_variances = samples.chunk(2, -1)
        return NormalMixture(means, (log_variances / 2).exp())


def _mean_noise(mean: Tensor, variance: Tensor) -> Tensor:
    """E[exp s] of log-variances s that are normal."""
    noise = (mean + variance / 2).exp()
    if not noise.isfinite().all():
        raise ValueError(
            f"The mean noise variance overflows {mean.dtype}: the log-variances have posterior "
            f"variances of up to {float(variance.max()):.3g}. Use a larger prior precision (see "
            "`tune`), or samples, which do not average them."
        )
    return noise


def _normal(mean: Tensor, covariance: Tensor | None, noise: Tensor) -> MultivariateNormal:
    return noisy_normal(mean, covariance, noise, f"variances from {float(noise.min()):.3g}")
