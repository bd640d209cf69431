"""Counts: Poisson regression with the logarithm of the rate as output."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    constraints,
)
from torch.distributions import Poisson as PoissonDistribution
from torch.distributions.utils import broadcast_all

from laplace_debias.curvature.losses.likelihoods.base import (
    RESHAPE_TARGETS,
    Likelihood,
    check_quantile_probabilities,
    columns_of,
    variances_of,
)
from laplace_debias.curvature.network.outputs import require, warn_of_positive

_NUM_NODES = 32
# Integrals end where the integrand is at most e⁻³⁶ of its maximum, about the rounding error.
_LARGEST_FALL = 36.0
# Newton's method moves by at least one log-rate unit per step, until convergence is quadratic.
_NUM_NEWTON_STEPS = 60
_ONE_DRAW = torch.Size()


class Poisson(Likelihood):
    r"""Poisson regression of counts `[B, C]`; the outputs are the logarithms of rates.

    Targets are nonnegative integers, of any real dtype, `[B, C]`, or `[B]` for C = 1. With
    $\lambda = e^f$, $\ell = \sum_c \lambda_c - y_c f_c + \log y_c!$ and
    $\nabla^2_f \ell = \mathrm{diag}(\lambda)$ for any targets.

    For Gaussian outputs N(m, v), the rate is log-normal. The predictive is the corresponding
    mixture of Poisson distributions for each output. Its mean $e^{m + v/2}$ and its variance
    $e^{m + v/2} + e^{2m + v}(e^v - 1)$ are in closed form, and its probabilities are computed by
    quadrature (`PoissonLogNormal`).

    Reference:
        Aitchison & Ho (1989), "The multivariate Poisson-log normal distribution".
    """

    name = "poisson"
    targets = "numbers"
    outputs_meaning = "logarithms of rates"
    has_marginals = True
    variances_suffice = True
    checks_last_operation = True

    def warn_of_outputs(self, network: nn.Module, outputs: Tensor) -> None:
        """Warn if the network returns rates."""
        warn_of_positive(outputs, "logarithms of rates", "`rates.log()`")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require that the targets are counts and have the shape of the outputs.

        For a single output, the shape `[B]` is also accepted.
        """
        self.check_predicted(outputs, targets)
        largest = outputs.max()
        limit = math.log(torch.finfo(outputs.dtype).max)
        dtype = outputs.dtype
        require(
            largest < limit,
            lambda: ValueError(
                f"The rate exp({float(largest):.3g}) is out of the range of {dtype}. The model "
                "must return the logarithms of rates. Return `rates.log()` from the model."
            ),
        )

    def check_predicted(self, values: Tensor, targets: Tensor) -> None:
        """Require counts of the same shape as the predicted means, `[B, C]`."""
        if columns_of(targets).shape != values.shape:
            raise ValueError(
                f"Counts must have the shape of the outputs, {tuple(values.shape)}, got "
                f"{tuple(targets.shape)}. {RESHAPE_TARGETS}"
            )
        self.check_targets(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Require integers that are not negative."""
        if targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(f"Counts must be numbers, got {targets.dtype}. Use `targets.long()`.")
        are_counts = (targets >= 0) & (targets == targets.floor()) & targets.isfinite()
        require(
            are_counts.all(),
            lambda: ValueError(
                "Counts must be whole numbers of at least 0. Check the targets for negative "
                "numbers, fractions and NaN."
            ),
        )

    def num_outputs(self, num_targets: int) -> int:
        """Return the number of outputs, which is the number of counts per example."""
        return num_targets

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the negative log-probability of the counts in float64."""
        counts = columns_of(targets).double()
        residuals = outputs.exp() - counts.to(outputs.dtype) * outputs
        return residuals.sum(-1).double() + (counts + 1).lgamma().sum(-1)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        r"""Compute the C columns of $\mathrm{diag}(\sqrt\lambda)$."""
        return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)

    def signed_root(self, outputs: Tensor, draw_signs: Callable[[int], Tensor]) -> Tensor:
        r"""Compute $\epsilon\sqrt\lambda$ for each output."""
        return draw_signs(outputs.shape[-1]).to(outputs.dtype) * (outputs / 2).exp()

    def hessian_trace(self, outputs: Tensor) -> Tensor:
        """Compute the trace Σ λ without forming a matrix."""
        return outputs.double().exp().sum(-1)

    def sample(self, outputs: Tensor, uniforms: Tensor) -> Float[Tensor, "batch outputs"]:
        """Draw counts by applying the Poisson quantile function to uniform numbers."""
        return poisson_quantile(uniforms, outputs.double().exp()).to(outputs.dtype)

    def predictive(self, mean: Tensor, covariance: Tensor | None) -> Independent:
        """Return the distribution of independent counts with log-normal rates.

        The batch shape is `[B]`, and the event shape is `[C]`.
        """
        if covariance is None:
            # torch's Poisson distribution lacks a distribution function and quantiles.
            covariance = torch.zeros_like(mean)
        return Independent(self.marginals(mean, variances_of(mean, covariance)), 1)

    def mixture(self, samples: Tensor) -> Independent:
        """Return, for each output, the mixture of the samples' Poisson distributions."""
        return Independent(self.marginal_mixture(samples), 1)

    def marginals(self, mean: Tensor, variances: Tensor) -> "PoissonLogNormal":
        """Return the predictive distribution of each count, `[B, C]`."""
        return PoissonLogNormal(mean, variances)

    def marginal_mixture(self, samples: Tensor) -> "PoissonMixture":
        """Return the mixture of the samples' Poisson distributions."""
        return PoissonMixture(samples.exp())

    def epistemic_variances(self, mean: Tensor, variances: Tensor) -> Tensor:
        """Compute the variances of the log-normal rates."""
        return (2 * mean + variances).exp() * torch.expm1(variances)

    def exported(self, mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Return the `mean` and `variance` of the counts."""
        rates = (mean + covariance / 2).exp()
        return {"mean": rates, "variance": rates + self.epistemic_variances(mean, covariance)}


class _Counts(Distribution):
    """A distribution of counts whose quantiles are computed from its distribution function."""

    support = constraints.nonnegative_integer

    def cdf(self, value: Tensor) -> Tensor:
        """Compute the probability of at most this count."""
        counts = torch.as_tensor(value, dtype=torch.float64, device=self.mean.device)
        return self._cdf(counts).to(self.mean.dtype)

    def _cdf(self, counts: Tensor) -> Tensor:
        """Compute the distribution function in float64."""
        raise NotImplementedError

    def icdf(self, value: Tensor) -> Tensor:
        """Compute the smallest count whose distribution function is not below a probability.

        The result is the smallest such count that the dtype of the rates can represent: in float32,
        neighbouring counts differ by a factor of up to 1.0000001.
        """
        probabilities = torch.as_tensor(value, dtype=self.mean.dtype, device=self.mean.device)
        check_quantile_probabilities(probabilities)
        shape = torch.broadcast_shapes(probabilities.shape, self.batch_shape)
        counts = smallest_count(self._cdf, probabilities.double().expand(shape))
        rounded = counts.to(self.mean.dtype)
        above = rounded.nextafter(torch.full_like(rounded, torch.inf))
        return torch.where(rounded.double() < counts, above, rounded)


class PoissonLogNormal(_Counts):
    r"""Counts whose log-rate is normal, N(m, v).

    $\log p(y)$ is computed with 64 Gauss-Legendre nodes around the only mode of the integrand.

    Args:
        log_mean: m, the mean of the log-rate.
        log_variance: v ≥ 0, the variance of the log-rate.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "log_mean": constraints.real,
        "log_variance": constraints.nonnegative,
    }

    def __init__(
        self, log_mean: Tensor, log_variance: Tensor, validate_args: bool | None = None
    ) -> None:
        self.log_mean, self.log_variance = broadcast_all(log_mean, log_variance)
        super().__init__(self.log_mean.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "PoissonLogNormal":
        """Expand the batch shape."""
        return PoissonLogNormal(
            self.log_mean.expand(batch_shape),
            self.log_variance.expand(batch_shape),
            validate_args=False,
        )

    @property
    def mean(self) -> Tensor:
        """The mean count, which equals the mean rate."""
        return (self.log_mean + self.log_variance / 2).exp()

    @property
    def variance(self) -> Tensor:
        """The variance of the count: the mean rate plus the variance of the rate."""
        rate_variance = (2 * self.log_mean + self.log_variance).exp()
        return self.mean + rate_variance * torch.expm1(self.log_variance)

    def sample(self, sample_shape: Any = _ONE_DRAW) -> Tensor:
        """Draw counts."""
        with torch.no_grad():
            shape = self._extended_shape(sample_shape)
            log_rates = self.log_mean.expand(shape)
            if self.log_variance.any():
                noise = torch.randn(shape, dtype=log_rates.dtype, device=log_rates.device)
                log_rates = log_rates + self.log_variance.sqrt() * noise
            return torch.poisson(log_rates.exp())

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log-probability of a count."""
        if self._validate_args:
            self._validate_sample(value)
        counts, mean, variance = torch.broadcast_tensors(
            value.double(), self.log_mean.double(), self.log_variance.double()
        )
        is_certain = variance == 0
        log_prob = counts * mean - mean.exp()
        # Without a posterior, the network's predictions have no variance, so no integral is needed.
        if not is_certain.all():
            integral = self._log_integral(counts, mean, torch.where(is_certain, 1.0, variance))
            log_prob = torch.where(is_certain, log_prob, integral)
        return (log_prob - (counts + 1).lgamma()).to(self.log_mean.dtype)

    def _log_integral(self, counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute log E[λʸ exp(-λ)] for a log-normal rate λ, where the variance is positive."""
        # The integrand is log-concave. Its mode f lies below these two points, from which Newton's
        # method converges; the second point solves exp(f) = y + (m - f) / v without the f on the
        # right-hand side.
        mode = torch.minimum(
            torch.maximum(mean, counts.clamp_min(1).log()),
            (counts + mean.clamp_min(0) / variance).clamp_min(1).log(),
        )
        for _ in range(_NUM_NEWTON_STEPS):
            slope = mode.exp() - counts + (mode - mean) / variance
            mode = mode - slope / (mode.exp() + 1 / variance)
        at_mode = counts * mode - mode.exp() - 0.5 * (mode - mean).square() / variance
        quadrature = _around_mode(mode.unsqueeze(-1), 1 / variance.unsqueeze(-1))
        integral = (quadrature.weights * (-quadrature.falls).exp()).sum(-1)
        return at_mode - 0.5 * (2 * math.pi * variance).log() + integral.log()

    def _cdf(self, counts: Tensor) -> Tensor:
        r"""Compute the probability of at most y by quadrature.

        This probability is $P(\lambda < g)$ for the log-normal rate λ and a gamma variable g of
        shape y + 1. The nodes are chosen for the variable whose distribution is narrower on a
        logarithmic scale, because the distribution function of the other variable is then smooth
        between the nodes.
        """
        tensors = torch.broadcast_tensors(
            counts.floor(), self.log_mean.double(), self.log_variance.double()
        )
        if not self.log_variance.any():
            return poisson_cdf(tensors[0], tensors[1].exp())
        counts, mean, variance = (tensor.unsqueeze(-1) for tensor in tensors)
        gamma_shape = counts.clamp_min(0) + 1
        # On a logarithmic scale, the variance of the gamma variable is about 1 / shape.
        is_rate_narrower = (variance * gamma_shape <= 1).squeeze(-1)
        below = torch.where(
            is_rate_narrower,
            _cdf_by_rates(gamma_shape, mean, variance),
            _cdf_by_gamma(gamma_shape, mean, variance),
        )
        return torch.where(counts.squeeze(-1) < 0, 0.0, below).clamp(0, 1)


class PoissonMixture(_Counts, MixtureSameFamily):
    """An equally weighted mixture of Poisson distributions.

    Args:
        rates: The rates of the components, `[S, ...]`.
    """

    def __init__(self, rates: Float[Tensor, "samples *batch"]) -> None:
        rates = rates.movedim(0, -1)
        self._rates = rates
        MixtureSameFamily.__init__(
            self, Categorical(logits=torch.zeros_like(rates)), PoissonDistribution(rates)
        )

    def _cdf(self, counts: Tensor) -> Tensor:
        """Compute the mean of the components' distribution functions."""
        return poisson_cdf(counts.unsqueeze(-1), self._rates.double()).mean(-1)


def _cdf_by_rates(
    gamma_shape: Float[Tensor, "*batch 1"],
    mean: Float[Tensor, "*batch 1"],
    variance: Float[Tensor, "*batch 1"],
) -> Float[Tensor, " *batch"]:
    """Integrate P(λ < g) over the log-normal rate λ, with nodes for its normal logarithm."""
    nodes, weights = (tensor.to(mean) for tensor in _hermite())
    rates = (mean + (2 * variance).sqrt() * nodes).exp()
    above_rate = torch.special.gammaincc(gamma_shape, rates)
    return (weights / math.sqrt(math.pi) * above_rate).sum(-1)


def _cdf_by_gamma(
    gamma_shape: Float[Tensor, "*batch 1"],
    mean: Float[Tensor, "*batch 1"],
    variance: Float[Tensor, "*batch 1"],
) -> Float[Tensor, " *batch"]:
    """Integrate P(λ < g) over the gamma variable g, with nodes for its logarithm."""
    mode = gamma_shape.log()
    quadrature = _around_mode(mode, torch.zeros_like(gamma_shape))
    density = (_log_density_at_mode(gamma_shape) - quadrature.falls).exp()
    # A variance of zero is replaced, because the other quadrature is used for it.
    deviation = torch.where(variance == 0, 1.0, variance).sqrt()
    # P(λ < g) at the nodes: log λ is normal with this mean and deviation.
    below_node = torch.special.ndtr((mode + quadrature.nodes - mean) / deviation)
    return (quadrature.weights * density * below_node).sum(-1)


def _log_density_at_mode(shape: Tensor) -> Tensor:
    r"""Compute the log-density of the logarithm of a gamma variable at its mode.

    The value is $a \log a - a - \log\Gamma(a)$ for the shape a. For large shapes, the terms are
    many orders of magnitude larger than their sum, so a series for the sum is used.
    """
    at_mode = shape * shape.log() - shape - shape.lgamma()
    stirling = 0.5 * (shape / (2 * math.pi)).log() - 1 / (12 * shape) + shape.pow(-3) / 360
    return torch.where(shape > 100, stirling, at_mode)


class _Quadrature(NamedTuple):
    """A quadrature around the mode of an integrand.

    Attributes:
        nodes: The nodes u, as distances from the mode.
        falls: The values r(u) by which the logarithm of the integrand falls from the mode.
        weights: The weights.
    """

    nodes: Float[Tensor, "*batch nodes"]
    falls: Float[Tensor, "*batch nodes"]
    weights: Float[Tensor, "*batch nodes"]


def _around_mode(
    log_rate: Float[Tensor, "*batch 1"], precision: Float[Tensor, "*batch 1"]
) -> _Quadrature:
    r"""Return the nodes of a quadrature for $\exp(-r(u))$, $r(u) = a (e^u - 1 - u) + c u^2 / 2$.

    The density of the log-rate times the probability of a count has this form around its mode. It
    decays like a Gaussian on the left, and much faster on the right. Therefore, each side has its
    own 32 nodes, which extend at least to the point where r is 36.

    Args:
        log_rate: log a.
        precision: c, at least 0.
    """
    rate = log_rate.exp()
    left, right = _reach(log_rate, precision)
    nodes, weights = (tensor.to(rate) for tensor in _legendre())
    # Map the nodes from [-1, 1] to [0, 1].
    nodes = (1 + nodes) / 2
    weights = weights / 2
    u = torch.cat([-left * nodes, right * nodes], -1)
    # For small u, use the Taylor series of eᵘ − 1 − u, because the terms are many orders of
    # magnitude larger than their sum.
    series = u.square() / 2 * (1 + u / 3 + u.square() / 12 + u.pow(3) / 60)
    near = rate * torch.where(u.abs() < 1e-3, series, u.clamp_max(1).expm1() - u)
    # A tiny rate times the exponential of a large u is the exponential of a sum.
    far = (log_rate + u).exp() - rate * (1 + u)
    falls = torch.where(u < 1, near, far) + precision * u.square() / 2
    return _Quadrature(u, falls, torch.cat([left * weights, right * weights], -1))


@torch.no_grad()
def _reach(
    log_rate: Float[Tensor, "*batch 1"], precision: Float[Tensor, "*batch 1"]
) -> tuple[Float[Tensor, "*batch 1"], Float[Tensor, "*batch 1"]]:
    """Return distances on the left and on the right of 0 at which r is at least 36.

    See `_around_mode` for the function r and the arguments. The distances are bounds, computed from
    simpler functions that r exceeds.
    """
    rate = log_rate.exp()
    square = 2 * _LARGEST_FALL
    # r is at least a u² / 3 for u between -1 and 0, and at least a (|u| - 1) for u below -1.
    near_mode = (1.5 * square / rate).sqrt()
    left_by_rate = torch.where(near_mode < 1, near_mode, 1 + _LARGEST_FALL / rate)
    left = torch.minimum(left_by_rate, (square / precision).sqrt())
    # r is at least (a + c) u² / 2 for u above 0, and at least a eᵘ / 2 for u above 2.
    right_by_rate = (math.log(square) - log_rate).clamp_min(2)
    right = torch.minimum(right_by_rate, (square / (rate + precision)).sqrt())
    return left, right


@lru_cache(maxsize=1)
@torch.inference_mode(False)
def _legendre() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss-Legendre quadrature, float64."""
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


@lru_cache(maxsize=1)
@torch.inference_mode(False)
def _hermite() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss-Hermite quadrature, float64."""
    nodes, weights = np.polynomial.hermite.hermgauss(_NUM_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def poisson_cdf(counts: Tensor, rates: Tensor) -> Tensor:
    """Return the Poisson distribution function, computed as an incomplete gamma function."""
    below = torch.special.gammaincc(counts.floor().clamp_min(0) + 1, rates)
    return torch.where(counts < 0, 0.0, below)


def poisson_quantile(probabilities: Tensor, rates: Tensor) -> Tensor:
    """Return the smallest count whose Poisson distribution function is not below a probability."""
    return smallest_count(lambda counts: poisson_cdf(counts, rates), probabilities)


def smallest_count(
    cdf: Callable[[Tensor], Tensor], probabilities: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Bisect for the smallest count whose distribution function reaches a probability.

    Counts and probabilities are in float64. Above 2⁵³, the result is the smallest count that
    float64 can represent.
    """
    low = torch.full_like(probabilities, -1.0)
    high = torch.ones_like(probabilities)
    # `high` is doubled at most up to the largest power of two in float64.
    for _ in range(1023):
        is_below = cdf(high) < probabilities
        if not is_below.any():
            break
        low = torch.where(is_below, high, low)
        high = torch.where(is_below, 2 * high, high)
    while True:
        middle = ((low + high) / 2).floor()
        # The middle of two neighbouring counts is the lower count; above 2⁵³, it can be either.
        is_open = (low < middle) & (middle < high)
        if not is_open.any():
            return high
        is_below = cdf(middle) < probabilities
        low = torch.where(is_open & is_below, middle, low)
        high = torch.where(is_open & ~is_below, middle, high)
