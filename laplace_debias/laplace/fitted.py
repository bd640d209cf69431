"""The frozen state of a fit: what predictions, grids and files read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.class_dim import classes_last
from laplace_debias.curvature.network.fingerprint import Watch
from laplace_debias.curvature.network.inputs import Inputs, move
from laplace_debias.curvature.network.precision import widened
from laplace_debias.curvature.network.reader import BatchReader
from laplace_debias.curvature.network.shadow import check_no_autocast
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.parameters import BayesianParameters, FitSettings
from laplace_debias.laplace.posterior import GaussianPosterior, check_prior_precision
from laplace_debias.laplace.prior import Prior
from laplace_debias.system.checks import real


@dataclass(frozen=True)
class Noise:
    """How a regression's fit depends on σ.

    Attributes:
        num_targets: M, how many numbers the targets of the N examples hold.
        power: p, if the curvature is proportional to σ⁻ᵖ: 2, of the empirical Fisher 4.
    """

    num_targets: float
    power: int


@dataclass(frozen=True)
class FitReport:
    """How far a fit of `mode="auto"` is from the one of all the data.

    An error is that of standard deviations of outputs, relative, as the root mean square over
    inputs that had no part in the fit: what they differ by from fold to fold, and by magnitudes in
    fold and out of fold (see the page on the method, also for how often the true one is smaller).

    Attributes:
        num_examples: How many examples were drawn, and went backward.
        num_read: How many were read, and went forward.
        seconds: How long it took.
        ended_by: `"tolerance"`, `"seconds"`, `"examples"`, `"interrupt"`; `"the end of the data"`,
            within a budget or of an iterator; or `"data"`: all of it was fitted.
        rounds: Examples and error after each round.
        curve: The errors if the fit's prior precision is multiplied by 1, 10, … 10⁴.
        of_blocks: The part of the error that each block brings, at the fit's prior precision.
    """

    num_examples: int
    num_read: int
    seconds: float
    ended_by: str
    rounds: tuple[tuple[int, float], ...]
    curve: dict[float, float]
    of_blocks: dict[str, float]

    @property
    def error(self) -> float:
        """The largest error of the curve: that of whatever prior precision is tuned."""
        return max(self.curve.values())

    @property
    def worst_block(self) -> str:
        """The block that brings the largest error."""
        return max(self.of_blocks, key=self.of_blocks.__getitem__)

    @property
    def error_of_twice(self) -> float:
        """The error to expect of twice as many examples: it falls with the root of their number."""
        return self.error / math.sqrt(2)

    def __str__(self) -> str:
        if self.ended_by == "data":
            return f"All {self.num_examples:,} examples were fitted."
        factors = ", ".join(f"{error:.1%} at {factor:g}" for factor, error in self.curve.items())
        return (
            f"{self.num_examples:,} examples, drawn from {self.num_read:,}, in "
            f"{self.seconds:.3g} s, ended by {self.ended_by}. "
            f"Standard deviations of the outputs are within {self.error:.1%} of those of a fit of "
            f"all the data; of twice the examples, within some {self.error_of_twice:.1%}. By "
            f"multiples of the prior precision: {factors}. The largest part is that of "
            f"{self.worst_block}."
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A posterior, and all that goes with it.

    Attributes:
        model: The user's model.
        likelihood: Its likelihood.
        settings: What was fitted.
        parameters: The Bayesian parameters.
        posterior: The Gaussian over them.
        nll: Summed negative log-likelihood of the N examples, in nats.
        others: The `fingerprint` of what the model holds besides the Bayesian parameters.
        mode: How it was fitted, for `repr`; None if that is not known.
        noise: For a `Gaussian` likelihood how the fit depends on its σ, if that is known.
        watch: What finds changes of the others.
        link: What logits become probabilities by, where one was chosen.
        report: How far a fit of `mode="auto"` is from that of all the data.

    Raises:
        ValueError: If the negative log-likelihood is not finite.
    """

    model: nn.Module
    likelihood: Likelihood
    settings: FitSettings
    parameters: BayesianParameters
    posterior: GaussianPosterior
    nll: float
    others: dict[str, int]
    mode: str | None
    noise: Noise | None = None
    watch: Watch = field(default_factory=Watch, repr=False)
    link: Link | None = None
    report: FitReport | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.nll):
            raise ValueError(
                f"The loss, summed over {self.posterior.num_data} examples, is {self.nll}: targets "
                "are too far from the outputs for the likelihood (regression: in units of sigma). "
                "Check both, or convert the model to a wider dtype."
            )

    @property
    def network(self) -> nn.Module:
        """The module that is differentiated, see `network_of`."""
        return network_of(self.model, self.parameters.names, self.settings)

    def with_posterior(self, posterior: GaussianPosterior) -> "Fitted":
        """The same fit with another form of its posterior."""
        return replace(self, posterior=posterior)

    def under(self, prior: Prior) -> "Fitted":
        """The same fit under a prior, at a temperature and with a link; what is new is checked.

        Raises:
            ValueError: As `GaussianPosterior.check_prior_precision`.
        """
        posterior = self.posterior
        fields = {
            "prior_precision": prior.precision,
            "prior_mean": prior.mean,
            "temperature": prior.temperature,
        }
        others = {k: value for k, value in fields.items() if value is not getattr(posterior, k)}
        posterior = posterior.changed(**others) if others else posterior
        return replace(self, posterior=posterior, link=prior.link)

    def moved(self, x: Any) -> Inputs:
        """Inputs, or a batch with names, on the model's device; raises as `move`, `BatchReader`."""
        x = BatchReader(self.model).inputs(x)
        return move(x, self.posterior.mean.device, {p.dtype for p in self.model.parameters()})

    def check_model(self) -> None:
        """Require the model to be what it was at the fit.

        The Bayesian parameters are compared entry by entry. The others, of which a posterior of the
        last layer has far more, are looked after as `Watch` says.

        Raises:
            RuntimeError: If anything that its checkpoint holds has changed, or under autocast.
        """
        mean = self.posterior.mean
        check_no_autocast(mean.device)
        plain = unwrapped(self.model)
        current = self.parameters.flat(plain)
        if current.device != mean.device or current.dtype != mean.dtype:
            raise RuntimeError(
                f"The model has moved to {current.device}, {current.dtype} since the fit on "
                f"{mean.device}, {mean.dtype}: move it back or fit again."
            )
        if not torch.equal(current, mean):
            raise RuntimeError(
                "The model's parameters have changed since the fit, so the posterior does "
                "not describe them: fit again."
            )
        if wrong := self.watch.changed(plain, self.parameters.names, self.others):
            raise RuntimeError(
                f"{wrong[0]} has changed since the fit, so the posterior is not that of this "
                "model: fit again."
            )

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        """As `Laplace.log_marginal_likelihood`."""
        posterior = self.posterior
        delta = posterior.prior_precision if prior_precision is None else prior_precision
        delta = real(delta, "prior_precision", posterior.mean.device)
        check_prior_precision(delta.detach(), len(self.parameters.block_names))
        normaliser = 0.5 * len(posterior.mean) * math.log(2 * math.pi)
        return (
            -self.nll / posterior.temperature
            + posterior.log_prior(delta)
            + normaliser
            - 0.5 * posterior.log_det_precision(delta)
        )


def network_of(model: nn.Module, names: Sequence[str], settings: FitSettings) -> nn.Module:
    """The differentiated module: the model without wrappers, with its outputs `[B, ..., C]`.

    Where Bayesian parameters are in half precision, it computes in single precision.

    Args:
        model: The user's model.
        names: Its Bayesian parameters.
        settings: Which dimension of its outputs has the classes.
    """
    return classes_last(widened(unwrapped(model), names), settings.class_dim)
