"""Regression with Gaussian noise."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.network.faults import require
from laplace_debias.system.checks import real

# Halvings of a bracket of quantiles: what is left of it is below the rounding of float64.
_HALVINGS = 64


class NormalMixture(MixtureSameFamily):
    r"""The mixture of S normals of equal weight, with `icdf`.

    Args:
        means: One for each normal, `[S, *batch]`.
        deviations: Their standard deviations, of the same shape.
    """

    def __init__(
        self, means: Float[Tensor, "samples *batch"], deviations: Float[Tensor, "samples *batch"]
    ) -> None:
        means, deviations = means.movedim(0, -1), deviations.movedim(0, -1)
        self._normals = Normal(means, deviations)
        super().__init__(Categorical(logits=torch.zeros_like(means)), self._normals)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile: where the mean of the S distribution functions is `value`.

        By bisection in float64, between the least and the largest of the components' quantiles.

        Args:
            value: Probabilities between 0 and 1, broadcasting to the batch shape.

        Raises:
            ValueError: For a probability that is not above 0 and below 1.
        """
        value = torch.as_tensor(value)
        if not ((value > 0) & (value < 1)).all():
            raise ValueError(
                "Probabilities of quantiles must lie above 0 and below 1, got "
                f"{float(value.min()):g} … {float(value.max()):g}."
            )
        dtype = self._normals.loc.dtype
        means, deviations = self._normals.loc.double(), self._normals.scale.double()
        value = value.to(means)
        quantiles = means + deviations * torch.special.ndtri(value).unsqueeze(-1)
        low, high = quantiles.amin(-1), quantiles.amax(-1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle.unsqueeze(-1) - means) / deviations).mean(-1)
            is_low = below < value
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        return ((low + high) / 2).to(dtype)


class Gaussian(Likelihood):
    r"""Regression with Gaussian noise; targets are floating point, `[B, C]`.

    $\ell = \tfrac12\|(f-y)/\sigma\|^2 + \sum_c \log\sigma_c + \tfrac C2\log 2\pi$

    Args:
        sigma: Standard deviation of the noise in the targets' units, one number or one per output.
            If None 1.0 is assumed, which a fit warns of; `Laplace.tune(sigma=True)` finds it.

    Attributes:
        is_assumed: Whether no `sigma` was given.

    Raises:
        ValueError: If a standard deviation is not positive and finite.
        TypeError: As `real`.
    """

    def __init__(self, sigma: float | Sequence[float] | Tensor | None = None) -> None:
        self.is_assumed = sigma is None
        self.sigma = real(1.0 if sigma is None else sigma, "sigma").detach().cpu().clone()
        if self.sigma.ndim > 1 or not (self.sigma.isfinite() & (self.sigma > 0)).all():
            raise ValueError(f"sigma must be one positive number, or one per output, got {sigma}.")

    def _sigma(self, outputs: Tensor) -> Tensor:
        if self.sigma.ndim == 1 and len(self.sigma) != outputs.shape[-1]:
            raise ValueError(
                f"sigma has {len(self.sigma)} entries, the model has {outputs.shape[-1]} outputs."
            )
        variance, limits = self.sigma.square(), torch.finfo(outputs.dtype)
        if float(variance.max()) > limits.max or float(variance.min()) < limits.tiny:
            raise ValueError(
                f"sigma is {self.sigma.tolist()}, whose square is out of the range of "
                f"{outputs.dtype}: rescale the targets and sigma, or convert the model to a wider "
                "dtype."
            )
        return self.sigma.to(outputs, non_blocking=True).expand(outputs.shape[-1])

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require floating-point targets of the outputs' shape."""
        self._sigma(outputs)
        if targets.shape != outputs.shape:
            raise ValueError(
                f"Regression targets must have the outputs' shape {tuple(outputs.shape)}, got "
                f"{tuple(targets.shape)}: use `targets.reshape(...)`."
            )
        check_finite_floats(targets, "Regression")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-density of the targets, float64."""
        squares = ((outputs - targets) / self._sigma(outputs)).square().sum(-1)
        # In float32 the constant would swallow the squares of residuals far below sigma.
        return 0.5 * squares.double() + self.log_normaliser(outputs.shape[-1])

    def log_normaliser(self, num_outputs: int) -> float:
        """Σ log σ + C/2 log 2π, what ℓ is besides the residuals."""
        log_sigma = float(self.sigma.expand(num_outputs).log().sum())
        return log_sigma + 0.5 * num_outputs * math.log(2 * math.pi)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """The C columns of `diag(1/σ)`, the same for every example."""
        root = torch.diag(1 / self._sigma(outputs))
        return root.unsqueeze(1).expand(-1, outputs.shape[0], -1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch outputs"]:
        """`f + σ ε` with standard normal ε, the normal quantiles of the uniforms."""
        return outputs + self._sigma(outputs) * torch.special.ndtri(uniforms).to(outputs)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> MultivariateNormal:
        """Normal with the outputs' covariance plus σ² on the diagonal."""
        noise = self._sigma(mean).square().expand(mean.shape)
        return noisy_normal(mean, covariance, noise, f"sigma = {self.sigma.tolist()}")

    def mixture(self, samples: Tensor) -> MultivariateNormal:
        """The normal with the mixture's mean and covariance."""
        mean = samples.mean(0)
        residuals = samples - mean
        covariance = torch.einsum("s...i,s...j->...ij", residuals, residuals) / len(samples)
        return self.predictive(mean, covariance)

    def marginals(self, mean: Tensor, variances: Tensor) -> Normal:
        """Normal with the outputs' variances plus σ²; batch shape `[B, C]`."""
        return Normal(mean, (variances + self._sigma(mean).square()).sqrt())

    def marginal_mixture(self, samples: Tensor) -> NormalMixture:
        """The mixture of normals about the samples, of standard deviation σ each."""
        return NormalMixture(samples, self._sigma(samples).expand(samples.shape))


def noisy_normal(
    mean: Float[Tensor, "*batch outputs"],
    covariance: Float[Tensor, "*batch outputs outputs"] | None,
    noise: Float[Tensor, "*batch outputs"],
    told: str,
) -> MultivariateNormal:
    """The normal whose covariance is that of the outputs with the noise on its diagonal.

    Args:
        mean: `[B, C]`.
        covariance: `[B, C, C]`; None for none.
        noise: Variances, `[B, C]`.
        told: What an error says of the noise.

    Raises:
        ValueError: If the sum is singular in its dtype.
    """
    diagonal = torch.diag_embed(noise)
    total = diagonal if covariance is None else covariance + diagonal
    # Rounding may have made it unsymmetric by more than torch's check accepts.
    total = (total + total.mT) / 2
    if not _is_resolved(total):
        largest = float(total.diagonal(dim1=-2, dim2=-1).max())
        raise ValueError(
            f"The predictive covariance is singular in {total.dtype}: beside variances of up "
            f"to {largest:.3g} a noise of {told} is lost to rounding. "
            "Convert the model to a wider dtype, use a larger prior precision, or rescale the "
            "targets and sigma."
        )
    return MultivariateNormal(mean, covariance_matrix=total)


def check_finite_floats(targets: Tensor, kind: str) -> None:
    """Raise a `TypeError` for other targets than floats, a `ValueError` for NaN and Inf."""
    if not targets.is_floating_point():
        raise TypeError(
            f"{kind} targets must be floating point, got {targets.dtype}: use `targets.float()`."
        )
    require(
        torch.isfinite(targets).all(),
        lambda: ValueError(f"{kind} targets hold NaN or Inf: remove these examples."),
    )


def _is_resolved(covariance: Float[Tensor, "*batch outputs outputs"]) -> bool:
    """Whether every output keeps a variance of its own, given the others, beside the rounding.

    What Cholesky's pivots say in the covariance's own dtype depends on the machine: they are those
    of double precision, held against the rounding of the entries.
    """
    root, info = torch.linalg.cholesky_ex(covariance.double())
    own = root.diagonal(dim1=-2, dim2=-1).square()
    rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    of_all = covariance.diagonal(dim1=-2, dim2=-1)
    return bool((info == 0).all() & (own > rounding * of_all).all())
