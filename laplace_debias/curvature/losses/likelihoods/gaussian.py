"""Regression with Gaussian noise."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from laplace_debias.curvature.losses.likelihoods.base import (
    RESHAPE_TARGETS,
    Likelihood,
    check_quantile_probabilities,
    columns_of,
)
from laplace_debias.curvature.network.outputs import require, warn_of_positive
from laplace_debias.system.checks import real
from laplace_debias.system.shown import counted

# After this number of halvings, a bracket of quantiles is smaller than float64's rounding error.
_HALVINGS = 64


class NormalMixture(MixtureSameFamily):
    r"""An equally weighted mixture of S normal distributions that also has quantiles (`icdf`)."""

    def __init__(
        self, means: Float[Tensor, "samples *batch"], deviations: Float[Tensor, "samples *batch"]
    ) -> None:
        means = means.movedim(0, -1)
        deviations = deviations.movedim(0, -1)
        self._normals = Normal(means, deviations)
        super().__init__(Categorical(logits=torch.zeros_like(means)), self._normals)

    def icdf(self, value: Tensor) -> Tensor:
        """Compute the quantile, at which the mean of the S distribution functions is `value`.

        The quantile is found by bisection in float64, between the smallest and the largest quantile
        of the components.
        """
        value = torch.as_tensor(value)
        check_quantile_probabilities(value)
        dtype = self._normals.loc.dtype
        means = self._normals.loc.double()
        deviations = self._normals.scale.double()
        value = value.to(means)
        quantiles = means + deviations * torch.special.ndtri(value).unsqueeze(-1)
        low = quantiles.amin(-1)
        high = quantiles.amax(-1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle.unsqueeze(-1) - means) / deviations).mean(-1)
            is_low = below < value
            low = torch.where(is_low, middle, low)
            high = torch.where(is_low, high, middle)
        return ((low + high) / 2).to(dtype)


SigmaOrigin = Literal["given", "assumed", "estimated", "tuned"]
"""How the noise σ of a regression was determined: by the user, as 1.0 by default, from residuals,
or, if the user gave no value, by tuning."""


class Gaussian(Likelihood):
    r"""Regression with Gaussian noise, with targets `[B, C]`, or `[B]` if C = 1.

    $\ell = \tfrac12\|(f-y)/\sigma\|^2 + \sum_c \log\sigma_c + \tfrac C2\log 2\pi$

    Args:
        sigma: Standard deviation of the noise in the targets' units, one number or one per output.
            Default: 1.0 is assumed. A fit then warns, and estimates the noise of several outputs
            from their residuals; `Laplace.tune` tunes it.

    Attributes:
        sigma: The noise of the predictive.

    Raises:
        ValueError: If a standard deviation is not positive and finite.
        TypeError: If a standard deviation is not a real number.
    """

    name = "regression"
    targets = "numbers"
    outputs_meaning = "targets"
    has_sigma = True
    has_marginals = True
    checks_shapes_only = True

    def __init__(self, sigma: float | Sequence[float] | Tensor | None = None) -> None:
        self._origin: SigmaOrigin = "assumed" if sigma is None else "given"
        # The noise of the loss, if it differs from the noise of the predictive.
        self._curvature_sigma: Tensor | None = None
        self.sigma = real(1.0 if sigma is None else sigma, "sigma").detach().cpu().clone()
        if self.sigma.ndim > 1 or not (self.sigma.isfinite() & (self.sigma > 0)).all():
            raise ValueError(
                "`sigma` must be a positive number, or one positive number per output, got "
                f"{sigma}. Pass the standard deviation of the noise."
            )

    @classmethod
    def estimated(cls, sigma: Float[Tensor, " outputs"]) -> "Gaussian":
        """Make a likelihood whose noise was estimated rather than given."""
        likelihood = cls(sigma)
        likelihood._origin = "estimated"
        return likelihood

    @property
    def is_assumed(self) -> bool:
        """Whether `sigma` was neither given nor tuned."""
        return self._origin in ("assumed", "estimated")

    @property
    def has_free_sigma(self) -> bool:
        """Whether no `sigma` was given, so that tuning chooses it."""
        return self._origin != "given"

    @property
    def curvature_sigma(self) -> Float[Tensor, "*outputs"]:
        """The noise σ at which the curvature of the loss was computed.

        It differs from `sigma` only after `Laplace.tune(sigma="per_output")`.
        """
        return self.sigma if self._curvature_sigma is None else self._curvature_sigma

    def with_predictive_sigma(self, sigma: Float[Tensor, " outputs"]) -> "Gaussian":
        """Return a likelihood with the same loss and a different σ for predictions."""
        likelihood = Gaussian(sigma)
        likelihood._curvature_sigma = self.curvature_sigma
        return likelihood

    def for_new_fit(self) -> "Gaussian":
        """Return the likelihood for a new fit, whose curvature is measured at `sigma`."""
        return self if self._curvature_sigma is None else Gaussian(self.sigma)

    def scaled(self, factor: float) -> "Gaussian":
        """Return the likelihood whose noise is `curvature_sigma` times a factor that was tuned."""
        likelihood = Gaussian(self.curvature_sigma * factor)
        if self.has_free_sigma:
            likelihood._origin = "tuned"
        return likelihood

    def for_same_curvature(self) -> "Gaussian":
        """Return a likelihood whose predictions have the noise `curvature_sigma`."""
        return self if self._curvature_sigma is None else Gaussian(self._curvature_sigma)

    def options(self) -> dict[str, Any]:
        """Return the noise σ, or None if it is the default of 1, and how σ was determined."""
        if self._origin == "assumed":
            return {"sigma": None}
        options: dict[str, Any] = {"sigma": self.sigma.tolist()}
        # A file has to state whether σ was given, because `tune` depends on it.
        if self._origin != "given":
            options[f"is_{self._origin}"] = True
        if self._curvature_sigma is not None:
            options["curvature_sigma"] = self._curvature_sigma.tolist()
        return options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Gaussian":
        """Make an instance from the result of `options`."""
        likelihood = cls(options["sigma"])
        if options.get("is_estimated"):
            likelihood._origin = "estimated"
        if options.get("is_tuned"):
            likelihood._origin = "tuned"
        if "curvature_sigma" in options:
            likelihood._curvature_sigma = cls(options["curvature_sigma"]).sigma
        return likelihood

    def num_outputs(self, num_targets: int) -> int:
        """Return the number of targets."""
        return num_targets

    def training_loss(self) -> tuple[str, nn.Module]:
        """Return the name of the training loss, and the module that computes its mean."""
        return "mean squared error", nn.MSELoss()

    def with_sigma(self, sigma: float | Sequence[float] | Tensor) -> "Gaussian":
        """Return a likelihood with a different standard deviation of the noise."""
        return Gaussian(sigma)

    def describe(self) -> str:
        """Return the name and σ."""
        name = super().describe()
        if self.sigma.numel() > 1:
            return f"{name}, a separate sigma for each of {self.sigma.numel()} outputs"
        return f"{name}, sigma = {self.sigma.item():g}"

    def _sigma(self, outputs: Tensor) -> Tensor:
        return _for_outputs(self.sigma, outputs)

    def _loss_sigma(self, outputs: Tensor) -> Tensor:
        return _for_outputs(self.curvature_sigma, outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require floating-point targets of the outputs' shape, or `[B]` for one output."""
        self._loss_sigma(outputs)
        if columns_of(targets).shape != outputs.shape:
            raise ValueError(
                f"Regression targets must have the shape of the outputs, {tuple(outputs.shape)}, "
                f"got {tuple(targets.shape)}. {RESHAPE_TARGETS}"
            )
        check_finite_floats(targets, "Regression")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the negative log-density of the targets in float64."""
        residuals = outputs - columns_of(targets)
        squares = (residuals / self._loss_sigma(outputs)).square().sum(-1)
        # Use float64, because in float32 the squares of residuals far below sigma would be lost
        # when the constant is added.
        return 0.5 * squares.double() + self.log_normaliser(outputs.shape[-1])

    def log_normaliser(self, num_outputs: int) -> float:
        """Compute Σ log σ + C/2 log 2π, the terms of ℓ that contain no residuals."""
        log_sigma = float(self.curvature_sigma.expand(num_outputs).log().sum())
        return log_sigma + 0.5 * num_outputs * math.log(2 * math.pi)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Compute the C columns of `diag(1/σ)`, which are the same for every example."""
        root = torch.diag(1 / self._loss_sigma(outputs))
        return root.unsqueeze(1).expand(-1, outputs.shape[0], -1)

    def signed_root(self, outputs: Tensor, draw_signs: Callable[[int], Tensor]) -> Tensor:
        """Compute ε / σ for each output, with random signs ε."""
        return draw_signs(outputs.shape[-1]).to(outputs.dtype) / self._loss_sigma(outputs)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch outputs"]:
        """Draw targets f + σ ε, where ε is the normal quantile of a uniform number."""
        noise = self._loss_sigma(outputs) * torch.special.ndtri(uniforms).to(outputs)
        return outputs + noise

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> MultivariateNormal:
        """Add the noise to the covariance of the outputs, and return the normal distribution."""
        noise = self._sigma(mean).square().expand(mean.shape)
        return noisy_normal(mean, covariance, noise, f"sigma = {self.sigma.tolist()}")

    def mixture(self, samples: Tensor) -> MultivariateNormal:
        """Return the normal distribution with the mean and covariance of the mixture."""
        mean = samples.mean(0)
        residuals = samples - mean
        covariance = torch.einsum("s...i,s...j->...ij", residuals, residuals) / len(samples)
        return self.predictive(mean, covariance)

    def marginals(self, mean: Tensor, variances: Tensor) -> Normal:
        """Add the noise to the outputs' variances, and return normal distributions, `[B, C]`."""
        return Normal(mean, (variances + self._sigma(mean).square()).sqrt())

    def epistemic_variances(self, mean: Tensor, variances: Tensor) -> Tensor:
        """Return the variances unchanged, because each output is the mean of a target."""
        return variances

    def exported(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Return the `mean`, `variance` and `covariance` of the targets."""
        noise = self.sigma.to(mean).square().expand(mean.shape[-1])
        return exported_normal(mean, (covariance + covariance.mT) / 2 + torch.diag(noise))

    def marginal_mixture(self, samples: Tensor) -> NormalMixture:
        """Return a mixture of normal distributions with noise σ, centred on the samples."""
        return NormalMixture(samples, self._sigma(samples).expand(samples.shape))


def _for_outputs(sigma: Float[Tensor, "*outputs"], outputs: Tensor) -> Float[Tensor, " outputs"]:
    """Return the noise of each output in the dtype and on the device of the outputs."""
    if sigma.ndim == 1 and len(sigma) != outputs.shape[-1]:
        raise ValueError(
            f"`sigma` has {counted(len(sigma), 'entry', 'entries')}, but the model has "
            f"{counted(outputs.shape[-1], 'output')}. Pass one number, or one number per output."
        )
    variance = sigma.square()
    limits = torch.finfo(outputs.dtype)
    if float(variance.max()) > limits.max or float(variance.min()) < limits.tiny:
        raise ValueError(
            f"`sigma` is {sigma.tolist()}, but its square is out of the range of {outputs.dtype}. "
            "Rescale the targets and `sigma`, or convert the model to a wider dtype."
        )
    return sigma.to(outputs, non_blocking=True).expand(outputs.shape[-1])


def noisy_normal(
    mean: Float[Tensor, "*batch outputs"],
    covariance: Float[Tensor, "*batch outputs outputs"] | None,
    noise: Float[Tensor, "*batch outputs"],
    noise_name: str,
) -> MultivariateNormal:
    """Add noise to the diagonal of the outputs' covariance, and return the normal distribution.

    Args:
        mean: Mean of the outputs.
        covariance: Covariance of the outputs; None means zero.
        noise: Variances of the noise.
        noise_name: The name of the noise in the error message.

    Raises:
        ValueError: If the sum is numerically singular in its dtype.
    """
    diagonal = torch.diag_embed(noise)
    total = diagonal if covariance is None else covariance + diagonal
    # The sum is made symmetric, because rounding may break the symmetry that torch checks.
    total = (total + total.mT) / 2
    if not _is_resolved(total):
        largest = float(total.diagonal(dim1=-2, dim2=-1).max())
        raise ValueError(
            f"The predictive covariance is singular in {total.dtype}. Its variances are up to "
            f"{largest:.3g}, so a noise of {noise_name} is lost to rounding. Convert the model "
            "to a wider dtype, use a larger prior precision, or rescale the targets and `sigma`."
        )
    return MultivariateNormal(mean, covariance_matrix=total)


def exported_normal(
    mean: Float[Tensor, "*batch outputs"], covariance: Float[Tensor, "*batch outputs outputs"]
) -> dict[str, Tensor]:
    """Return the tensors with which an exported program describes a normal predictive."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return {"mean": mean, "variance": variance, "covariance": covariance}


def check_finite_floats(targets: Tensor, kind: str) -> None:
    """Require floating-point targets without NaN or Inf."""
    if not targets.is_floating_point():
        raise TypeError(
            f"{kind} targets must be floating point, got {targets.dtype}. Use `targets.float()`."
        )
    require(
        torch.isfinite(targets).all(),
        lambda: ValueError(f"{kind} targets contain NaN or Inf. Remove these examples."),
    )


def _is_resolved(covariance: Float[Tensor, "*batch outputs outputs"]) -> bool:
    """Whether each output's conditional variance, given the others, exceeds the rounding error.

    The Cholesky pivots are compared with the rounding error of the entries. They are computed in
    double precision, because in the covariance's own dtype they would depend on the machine.
    """
    root, info = torch.linalg.cholesky_ex(covariance.double())
    conditional_variances = root.diagonal(dim1=-2, dim2=-1).square()
    rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    return bool((info == 0).all() & (conditional_variances > rounding * variances).all())


class HeteroscedasticGaussian(Likelihood):
    r"""Regression with Gaussian noise whose variance is an output of the network.

    Outputs are `[B, 2C]`: C means $\mu$, then C log-variances $s = \log\sigma^2$. Targets are
    floating point, `[B, C]`, or `[B]` for C = 1. With outputs `[B, C, 2]`, a mean and a
    log-variance for each target, every target is a position, and targets are also `[B, C]` (pass
    `class_dim=-1` if C is 2). If a network returns σ, or the variance as for `nn.GaussianNLLLoss`,
    let it return `torch.cat([mean, variance.log()], -1)` instead.

    $\ell = \sum_c \tfrac12 (y_c-\mu_c)^2 e^{-s_c} + \tfrac12 s_c + \tfrac12\log 2\pi$

    Its Hessian in the outputs can be indefinite: along $s$ it is $\tfrac12(y-\mu)^2 e^{-s}$, with
    the off-diagonal entry $(y-\mu)e^{-s}$. The curvature here is the expectation of the Hessian
    over $y \sim p(y\mid f)$, the Fisher information $\mathrm{diag}(e^{-s}, \tfrac12)$, which is
    positive definite and does not depend on targets. `GGN` and `Fisher` use this matrix; `Hessian`
    uses the Hessian.

    The outputs of the linearised network are Gaussian, but the predictive distribution is not.
    `predictive` is the normal distribution with its exact mean and its exact covariance
    $\Sigma_\mu + \mathrm{diag}(e^{\bar s + \mathrm{var}(s)/2})$.

    Reference:
        Nix & Weigend (1994), "Estimating the mean and variance of the target probability
        distribution"; Immer et al. (2023), "Effective Bayesian heteroscedastic regression with deep
        neural networks", for natural parameters, in which Hessian and Fisher agree.
    """

    name = "heteroscedastic"
    targets = "numbers"
    outputs_meaning = "means and log-variances"
    has_marginals = True
    checks_last_operation = True

    def warn_of_outputs(self, network: nn.Module, outputs: Tensor) -> None:
        """Warn if the network returns standard deviations or variances."""
        log_variances = outputs[..., outputs.shape[-1] // 2 :]
        warn_of_positive(log_variances, "log-variances", "`torch.cat([mean, variance.log()], -1)`")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require outputs `[B, 2C]` with log-variances in range, and real targets `[B, C]`."""
        size = outputs.shape[1]
        if size % 2:
            raise ValueError(
                f"The model has {counted(size, 'output')} in the last dimension, but "
                "heteroscedastic regression needs a mean and a log-variance per target. Use a "
                "model with outputs [B, 2C] or [B, C, 2]."
            )
        self._check_targets(outputs[:, : size // 2], targets)
        log_variances = outputs[:, size // 2 :]
        # Both s and −s are bounded, because the exponentials of both numbers are needed.
        limit = -math.log(torch.finfo(outputs.dtype).tiny)
        low, high = torch.aminmax(log_variances)
        dtype = outputs.dtype
        require(
            (low > -limit) & (high < limit),
            lambda: ValueError(
                f"Log-variances from {float(low):.3g} to {float(high):.3g} are out of the range "
                f"of {dtype}. The last {size // 2} of the {size} outputs must be logarithms of "
                "variances. Check the order of the outputs."
            ),
        )

    def num_outputs(self, num_targets: int) -> int:
        """Return twice the number of targets: a mean and a log-variance for each."""
        return 2 * num_targets

    def check_predicted(self, values: Tensor, targets: Tensor) -> None:
        """Require targets of the same shape as the predicted means, `[B, C]`."""
        self._check_targets(values, targets)

    def _check_targets(self, means: Tensor, targets: Tensor) -> None:
        """Require finite targets in the shape of the means."""
        if columns_of(targets).shape != means.shape:
            raise ValueError(
                "Targets of heteroscedastic regression must have the shape of the means, "
                f"{tuple(means.shape)}, which is half of the outputs, got "
                f"{tuple(targets.shape)}. {RESHAPE_TARGETS}"
            )
        check_finite_floats(targets, "Regression")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the negative log-density of the targets."""
        mean, log_variance = outputs.chunk(2, -1)
        residuals = (targets.reshape(mean.shape) - mean) * (-log_variance / 2).exp()
        return 0.5 * (residuals.square() + log_variance + math.log(2 * math.pi)).sum(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""Return a square root of the Fisher, $\mathrm{diag}(e^{-s/2}, \sqrt{1/2})$."""
        return torch.diag_embed(_root_of_fisher(outputs)).movedim(-1, 0)

    def signed_root(self, outputs: Tensor, draw_signs: Callable[[int], Tensor]) -> Tensor:
        r"""Multiply the diagonal of the Fisher's square root by random signs ε."""
        return draw_signs(outputs.shape[-1]).to(outputs.dtype) * _root_of_fisher(outputs)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch targets"]:
        """Draw targets μ + e^{s/2} ε, where ε is the normal quantile of a uniform number."""
        mean, log_variance = outputs.chunk(2, -1)
        noise = torch.special.ndtri(uniforms[:, : mean.shape[1]])
        return mean + (log_variance / 2).exp() * noise.to(outputs)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> MultivariateNormal:
        """Return a normal distribution with the moments of the exact distribution."""
        size = mean.shape[-1] // 2
        if covariance is None:
            return _normal(mean[..., :size], None, mean[..., size:].exp())
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        noise = _mean_noise(mean[..., size:], variances[..., size:])
        return _normal(mean[..., :size], covariance[..., :size, :size], noise)

    def mixture(self, samples: Tensor) -> MultivariateNormal:
        """Return the normal distribution with the mean and covariance of the mixture."""
        means, log_variances = samples.chunk(2, -1)
        mean = means.mean(0)
        residuals = means - mean
        covariance = torch.einsum("s...i,s...j->...ij", residuals, residuals) / len(samples)
        return _normal(mean, covariance, log_variances.exp().mean(0))

    def marginals(self, mean: Tensor, variances: Tensor) -> Normal:
        """Return normal distributions with the predicted means and variances, `[B, C]`."""
        mu, s = mean.chunk(2, -1)
        mu_variance, s_variance = variances.chunk(2, -1)
        return Normal(mu, (mu_variance + _mean_noise(s, s_variance)).sqrt())

    def epistemic_variances(self, mean: Tensor, variances: Tensor) -> Tensor:
        """Return the variances of the first C outputs, which are the means of the targets."""
        return variances.chunk(2, -1)[0]

    def exported(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Return the `mean`, `variance` and `covariance` of the targets."""
        size = mean.shape[-1] // 2
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        noise = (mean[..., size:] + variances[..., size:] / 2).exp()
        block = covariance[..., :size, :size]
        return exported_normal(mean[..., :size], (block + block.mT) / 2 + torch.diag_embed(noise))

    def marginal_mixture(self, samples: Tensor) -> NormalMixture:
        """Return the mixture of the normal distributions that the samples describe."""
        means, log_variances = samples.chunk(2, -1)
        return NormalMixture(means, (log_variances / 2).exp())


def _mean_noise(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute E[exp s] for normally distributed log-variances s."""
    noise = (mean + variance / 2).exp()
    if not noise.isfinite().all():
        raise ValueError(
            f"The mean of the noise variance overflows {mean.dtype}, because the "
            "logarithm of the noise variance has a posterior variance of up to "
            f"{float(variance.max()):.3g}. Use a larger prior precision (see `tune`), or "
            "predict with `samples=`."
        )
    return noise


def _normal(mean: Tensor, covariance: Tensor | None, noise: Tensor) -> MultivariateNormal:
    return noisy_normal(mean, covariance, noise, f"variances from {float(noise.min()):.3g}")


def _root_of_fisher(outputs: Tensor) -> Tensor:
    r"""Compute $(e^{-s/2}, \sqrt{1/2})$, the diagonal of the root, for outputs (μ, s)."""
    inverse_sigma = (-outputs.chunk(2, -1)[1] / 2).exp()
    return torch.cat([inverse_sigma, torch.full_like(inverse_sigma, 0.5**0.5)], -1)
