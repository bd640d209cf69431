"""Links, which turn Gaussian logits into probabilities.

A link consists of a formula and a temperature T. The formula is applied to the logits divided by T,
which are distributed as N(μ/T, Σ/T²). T = 1 is the plain Laplace approximation, and δ → ∞ is
temperature scaling. Because only the closed form uses the formula, its T also compensates for
errors of the formula. Averages over draws and the network itself can therefore have different
temperatures.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution
from torch.quasirandom import SobolEngine

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.likelihoods.base import probit, variances_of
from laplace_debias.laplace.pairwise import Covariance, Logits, pairwise
from laplace_debias.operators.eigh import eigh

MOST_CLASSES = 100
"""With more classes than this, the default is the probit link: covariances would cost too much."""
NUM_DRAWS = 128
"""The number of Sobol points of the `"exact"` link."""


def tempered_probit(
    mean: Logits, covariance: Float[Tensor, "..."], temperatures: Sequence[float]
) -> Float[Tensor, "temperatures *batch classes"]:
    r"""Compute the probit approximation for the logits divided by each temperature T.

    The result is $\mu_k / \sqrt{T^2 + \tfrac\pi8 \Sigma_{kk}}$.

    Args:
        mean: The means μ.
        covariance: Covariances, or only variances.
        temperatures: The temperatures.
    """
    variances = variances_of(mean, covariance)
    squares = _stack_numbers(temperatures, mean).square()
    return mean / (squares + math.pi / 8 * variances).sqrt_()


def exact(mean: Logits, covariance: Covariance) -> Logits:
    """Compute the logarithm of the expected softmax from 128 fixed Sobol points.

    The divergence from the result of 10⁵ draws is about 1e-4 for 10 classes and 1e-3 for 100
    classes, but ten times larger if the logits have standard deviations of 3.
    """
    # A part that is common to all logits cancels in the softmax. It is removed first, because a
    # large common part would otherwise use up the best points.
    mu = mean.double()
    sigma = covariance.double()
    sigma = sigma - sigma.mean(-1, keepdim=True)
    sigma = sigma - sigma.mean(-2, keepdim=True)
    values, vectors = eigh((sigma + sigma.mT) / 2, "the functional covariance")
    # The leading directions get the best points. The signs of the directions are fixed in a way
    # that does not depend on the order of the classes.
    signs = torch.where((vectors * mu.unsqueeze(-1)).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    root = (vectors * signs * values.clamp_min(0).sqrt().unsqueeze(-2)).flip(-1)
    z = normal_points(mean.shape[-1]).to(mu)
    log_p = (mu + torch.einsum("...ij,sj->s...i", root, z)).log_softmax(-1)
    return (torch.logsumexp(log_p, 0) - math.log(len(z))).to(mean.dtype)


def exact_sigmoid(mean: Logits, covariance: Float[Tensor, "..."]) -> Logits:
    """Compute `exact` for each label by treating it as a choice between its logit and zero."""
    variances = variances_of(mean, covariance)
    both_means = torch.stack([torch.zeros_like(mean), mean], -1)
    both_variances = torch.stack([torch.zeros_like(mean), variances], -1)
    log_probs = exact(both_means, torch.diag_embed(both_variances))
    return log_probs[..., 1] - log_probs[..., 0]


def bridge(mean: Logits, covariance: Covariance) -> Logits:
    r"""Compute the logarithms of the Dirichlet parameters of the Laplace bridge.

    $$\alpha_k = \frac1{\Sigma_{kk}} \Big(1 - \frac2C + \frac{e^{\mu_k}}{C^2} \sum_l
    e^{-\mu_l}\Big)$$ for logits conditioned on a sum of zero. The probabilities are the means
    $\alpha_k / \sum_l \alpha_l$. Use it only for comparisons with other libraries, because for
    small variances its probabilities do not approach the probabilities of the network.

    Reference: Hobbhahn, Kristiadi & Hennig (2022), "Fast predictive uncertainty for classification
    with Bayesian deep networks".
    """
    mu, variances = _with_zero_sum(mean.double(), covariance.double())
    return _log_bridge(mu, variances).to(mean.dtype)


def bridge_norm(mean: Logits, covariance: Covariance) -> Logits:
    r"""Compute the Laplace bridge of logits scaled to a mean variance of $\sqrt{C / 2}$.

    See `bridge`. Without the scaling, the bridge is inaccurate for large variances.
    """
    mu, variances = _with_zero_sum(mean.double(), covariance.double())
    scale = variances.mean(-1, keepdim=True) / math.sqrt(mean.shape[-1] / 2)
    return _log_bridge(mu / scale.sqrt(), variances / scale).to(mean.dtype)


def _with_zero_sum(mean: Logits, covariance: Covariance) -> tuple[Logits, Logits]:
    """Compute mean and variances of Gaussian logits, conditioned on a sum of zero."""
    row_sums = covariance.sum(-1)
    total = row_sums.sum(-1, keepdim=True)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    # A covariance that is zero or has no common part is left unchanged.
    rounding = torch.finfo(covariance.dtype).eps * variances.mean(-1, keepdim=True)
    gain = torch.where(total > rounding, row_sums / total, 0)
    conditioned = (variances - gain * row_sums).clamp_min(0) + rounding
    is_zero = rounding <= torch.finfo(covariance.dtype).tiny
    return mean - gain * mean.sum(-1, keepdim=True), torch.where(is_zero, 1, conditioned)


def _log_bridge(mean: Logits, variances: Logits) -> Logits:
    num_classes = mean.shape[-1]
    constant = torch.full_like(mean, 1 - 2 / num_classes).log()
    exponent = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num_classes)
    return torch.logaddexp(constant, exponent) - variances.log()


SecondMoments = Literal["variances", "differences", "covariance"]
"""A part of the outputs' covariance that is sufficient for a predictive. `"differences"` is a
matrix in which only the covariances of differences between outputs are correct."""


LogitsAtTemperatures = Callable[
    [Logits, Float[Tensor, "..."], Sequence[float]], Float[Tensor, "temperatures *batch classes"]
]
"""A function from the mean and the required moments of Gaussian logits, divided by each
temperature, to the logits of probabilities."""


def at_temperatures(
    formula: Callable[[Logits, Float[Tensor, "..."]], Logits],
) -> LogitsAtTemperatures:
    """Return a function that applies a formula to the moments divided by each temperature."""

    def logits(
        mean: Logits, covariance: Float[Tensor, "..."], temperatures: Sequence[float]
    ) -> Float[Tensor, "temperatures *batch classes"]:
        means = mean / _stack_numbers(temperatures, mean)
        squares = _stack_numbers([T * T for T in temperatures], covariance)
        return formula(means, covariance / squares)

    return logits


def _stack_numbers(numbers: Sequence[float], like: Tensor) -> Float[Tensor, "numbers ..."]:
    """Return numbers along a new first dimension that broadcasts against a tensor."""
    # The tensors are filled on the device, because copies from the host would wait for the device
    # and would become constants in an exported program.
    return torch.stack([like.new_full([1] * like.ndim, number) for number in numbers])


@dataclass(frozen=True)
class Formula:
    """A formula for the expected probabilities of Gaussian logits.

    Attributes:
        softmax: The formula for mutually exclusive classes.
        sigmoid: The formula for independent labels.
        required_moments: The part of the covariance that `softmax` uses.
    """

    softmax: LogitsAtTemperatures
    sigmoid: LogitsAtTemperatures
    required_moments: SecondMoments

    def logits(
        self,
        likelihood: Likelihood,
        mean: Logits,
        covariance: Float[Tensor, "..."],
        temperatures: Sequence[float],
    ) -> Float[Tensor, "temperatures *batch classes"]:
        """Compute the logits of the probabilities at each temperature."""
        formula = self.softmax if likelihood.activation == "softmax" else self.sigmoid
        return formula(mean, covariance, temperatures)


FORMULAS = {
    "pairwise": Formula(pairwise, at_temperatures(probit), "differences"),
    "probit": Formula(tempered_probit, tempered_probit, "variances"),
    "exact": Formula(at_temperatures(exact), at_temperatures(exact_sigmoid), "differences"),
    "bridge": Formula(at_temperatures(bridge), at_temperatures(probit), "covariance"),
    "bridge_norm": Formula(at_temperatures(bridge_norm), at_temperatures(probit), "covariance"),
}
"""The formulas by name. `"probit"` (MacKay, 1992) shrinks each logit by its own variance."""
BRIDGES = ("bridge", "bridge_norm")
"""The formulas that use a Dirichlet distribution. They apply only to mutually exclusive classes."""


@dataclass(frozen=True)
class Link:
    """A way to turn Gaussian logits into probabilities.

    Attributes:
        name: One of `FORMULAS`.
        temperature: T, by which the logits are divided in the closed form.
        draw_temperature: The temperature of sampled logits, whose probabilities are averaged.
            Default: `temperature`.
        network_temperature: The temperature of the network without a posterior, for temperature
            scaling (`method="temperature"`). Default: `temperature`.

    Raises:
        ValueError: If the name is unknown, or a temperature is not positive and finite.
    """

    name: str
    temperature: float = 1.0
    draw_temperature: float = None  # type: ignore[assignment]
    network_temperature: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("draw_temperature", "network_temperature"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.temperature)
        if self.name not in FORMULAS:
            raise ValueError(f"Unknown link={self.name!r}. Use one of {', '.join(FORMULAS)}.")
        for temperature in (self.temperature, self.draw_temperature, self.network_temperature):
            if not 0 < temperature < math.inf:
                raise ValueError(
                    f"The link has the temperature {temperature}. Pass a positive number."
                )

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments, except temperatures with their default value."""
        options = {"name": self.name, "temperature": self.temperature}
        if self.draw_temperature != self.temperature:
            options["draw_temperature"] = self.draw_temperature
        if self.network_temperature != self.temperature:
            options["network_temperature"] = self.network_temperature
        return options

    def __str__(self) -> str:
        """The name, and the temperature unless it is 1."""
        if self.temperature == 1:
            return self.name
        return f"{self.name} at temperature {self.temperature:.3g}"

    def logits(
        self, likelihood: Likelihood, mean: Logits, covariance: Float[Tensor, "..."]
    ) -> Logits:
        """Compute the logarithms of the probabilities."""
        mean, covariance = tempered_moments(mean, covariance, self.temperature)
        return FORMULAS[self.name].logits(likelihood, mean, covariance, [1.0])[0]


def tempered_moments(
    mean: Float[Tensor, "..."], covariance: Float[Tensor, "..."], temperature: float
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Compute the mean and the covariance of Gaussian logits divided by a temperature."""
    if temperature == 1:
        return mean, covariance
    return mean / temperature, covariance / temperature**2


def link_from(link: "str | Link | None", likelihood: Likelihood) -> Link | None:
    """Return the link with a given name; a `Link` or None is returned unchanged."""
    if link is None:
        return None
    checked = link if isinstance(link, Link) else Link(link)
    if likelihood.activation is None:
        raise ValueError(
            f"`link={link!r}` computes probabilities of classes or labels, but "
            f"{type(likelihood).__name__} has no classes. Remove `link=`."
        )
    if checked.name in BRIDGES and likelihood.activation != "softmax":
        raise ValueError(
            f"`link={checked.name!r}` applies only to mutually exclusive classes, but "
            f'the likelihood is {type(likelihood).__name__}. Use "probit" or "exact".'
        )
    return checked


def default_link(likelihood: Likelihood, shape: torch.Size) -> Link | None:
    """Return the default link of an untuned posterior, or None if the likelihood has no links.

    Outputs with positions, `[B, ..., C]`, use the probit link, because the size of their full
    covariance grows with the square of the number of outputs.
    """
    if likelihood.activation is None:
        return None
    if likelihood.activation == "softmax" and len(shape) == 2 and shape[1] <= MOST_CLASSES:
        return Link("pairwise")
    return Link("probit")


def required_moments(likelihood: Likelihood, links: Collection[Link]) -> SecondMoments:
    """Determine which part of the outputs' covariance these links need for predictions."""
    if links and likelihood.activation == "softmax":
        required = {FORMULAS[link.name].required_moments for link in links}
        if len(required) > 1:
            return "covariance"
        return required.pop()
    return "variances" if likelihood.variances_suffice else "covariance"


def predictive(
    likelihood: Likelihood, link: Link | None, mean: Logits, covariance: Float[Tensor, "..."]
) -> Distribution:
    """Return p(y) for Gaussian outputs."""
    if link is None:
        return likelihood.predictive(mean, covariance)
    return likelihood.predictive(link.logits(likelihood, mean, covariance), None)


def tempered_predictive(
    likelihood: Likelihood,
    name: str,
    mean: Logits,
    covariance: Float[Tensor, "..."] | None,
    temperatures: Sequence[float],
) -> Distribution:
    """Return p(y) at several temperatures, with batch shape `[temperatures, B]`.

    Without a covariance, every formula reduces to the softmax or the sigmoid.
    """
    if covariance is None:
        logits = tempered_probit(mean, torch.zeros_like(mean), temperatures)
    else:
        logits = FORMULAS[name].logits(likelihood, mean, covariance, temperatures)
    return likelihood.predictive(logits, None)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def normal_points(dimension: int) -> Float[Tensor, "draws dimension"]:
    """Return standard normal Sobol points, which are the same in every call."""
    # This seed is the best of a few seeds for two classes; for more classes, the seeds are equally
    # good.
    uniforms = SobolEngine(dimension, scramble=True, seed=2).draw(NUM_DRAWS, dtype=torch.float64)
    return torch.special.ndtri(uniforms.clamp(1e-10, 1 - 1e-10))
