"""Predictions with a fitted state, by each method."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.outputs import explaining_unbatched
from laplace_debias.laplace import grids, links, predictive
from laplace_debias.laplace.asked import Asked, OutputChoice
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.uncertainty import has_variance_in_closed_form, of_draws, of_moments
from laplace_debias.metrics import Uncertainty
from laplace_debias.system.randomness import alike
from laplace_debias.system.ranks import current

METHODS = ("glm", "glm-mc", "nn", "map")
DEFAULT_SAMPLES = 100


@dataclass(frozen=True, eq=False)
class Prediction:
    """How to predict; as `Laplace.predict` takes it.

    Attributes:
        method: The method.
        samples: Draws; None for the closed form, or the default number.
        generator: For the draws; torch's global one if None.
        positions: Which positions; None for all.

    Raises:
        ValueError: For an unknown method, or samples that it cannot take.
    """

    method: str = "glm"
    samples: int | None = None
    generator: torch.Generator | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        method, samples = self.method, self.samples
        if method not in METHODS:
            raise ValueError(f"Unknown method={method!r}: use one of {', '.join(METHODS)}.")
        if samples is not None and (method == "map" or samples < 1):
            raise ValueError(
                f'samples={samples} with method="{method}": give a positive number of samples to '
                '"glm", "glm-mc" or "nn", none to "map".'
            )

    @property
    def is_closed(self) -> bool:
        """Whether the predictive has a closed form."""
        return self.method == "glm" and self.samples is None

    def check_link(self, link: str, likelihood: Likelihood) -> None:
        """Require a link that there is for the likelihood and the method.

        Raises:
            ValueError: Otherwise.
        """
        links.check_link(link, likelihood)
        if link != "probit" and not self.is_closed:
            raise ValueError(
                f'link={link!r} belongs to the closed form of method="glm" without samples: leave '
                "link out, or method and samples."
            )

    def check_uncertain(self) -> None:
        """Require a method that knows of more than one setting of the parameters.

        Raises:
            ValueError: Otherwise.
        """
        if self.method == "map":
            raise ValueError(
                'method="map" has one setting of the parameters and no uncertainty about them: use '
                "'glm', 'glm-mc' or 'nn'."
            )

    def moments(
        self, fitted: Fitted, x: Inputs | Record, diagonal: bool
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
        """Mean and covariance (or variances) of the linearised network's outputs.

        Args:
            fitted: The fit.
            x: Inputs, `[B, ...]`.
            diagonal: Whether variances will do.
        """
        return moments(fitted, x, diagonal, positions=self.positions)

    def outputs(self, fitted: Fitted, x: Inputs | Record) -> Float[Tensor, "batch *outputs"]:
        """What the network itself gives, `[B, ..., C]`."""
        x, network = fitted.moved(x), fitted.network
        with explaining_unbatched(network, x):
            asked = Asked.of(network, x, self.positions, lambda _: True)
            return asked.shaped(predictive.map_outputs(asked.network, asked.x), None)

    def draws(self, fitted: Fitted, x: Inputs | Record) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of the outputs, `[S, B, ..., C]`."""
        generator = self.generator
        num_samples = DEFAULT_SAMPLES if self.samples is None else self.samples
        if self.method == "glm":
            mean, covariance = self.moments(fitted, x, diagonal=False)
            if fitted.posterior.is_sharded:
                generator = alike(current(), generator, mean.device)
            outputs = predictive.sample_outputs(mean.flatten(1), covariance, num_samples, generator)
            return outputs.unflatten(2, mean.shape[1:])
        x, network = fitted.moved(x), fitted.network
        with explaining_unbatched(network, x):
            parameters = fitted.posterior.sample(num_samples, generator)
            is_linear = self.method == "glm-mc"
            push = predictive.linearised_outputs if is_linear else predictive.sampled_outputs
            asked = Asked.of(network, x, self.positions, lambda _: True)
            found = push(asked.network, fitted.parameters.names, asked.x, parameters)
            return asked.shaped(found, None)


def moments(
    fitted: Fitted,
    x: Inputs | Record,
    diagonal: bool = False,
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
    """`grids.moments` of one fit at its own prior precision; arguments as there."""
    deltas = [fitted.posterior.prior_precision.unsqueeze(0)]
    mean, covariances = grids.moments([fitted], x, deltas, diagonal, outputs, positions)
    return mean, covariances[0, 0]


def predict(fitted: Fitted, x: Inputs | Record, how: Prediction, link: str) -> Distribution:
    """The predictive distribution; as `Laplace.predict`.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        how: The method.
        link: From Gaussian logits to class probabilities, of the closed form.
    """
    if how.is_closed:
        deltas = [fitted.posterior.prior_precision.unsqueeze(0)]
        return grids.predictives([fitted], x, deltas, link, how.positions)[0][0]
    with torch.inference_mode(False):
        if how.method == "map":
            return fitted.likelihood.predictive(how.outputs(fitted, x), None)
        return fitted.likelihood.mixture(how.draws(fitted, x))


def marginals(fitted: Fitted, x: Inputs | Record, how: Prediction) -> Distribution:
    """The predictive of each target of a regression; as `Laplace.marginals`, arguments as above."""
    if how.is_closed:
        return fitted.likelihood.marginals(*how.moments(fitted, x, diagonal=True))
    with torch.inference_mode(False):
        if how.method == "map":
            mean = how.outputs(fitted, x)
            return fitted.likelihood.marginals(mean, torch.zeros_like(mean))
        return fitted.likelihood.marginal_mixture(how.draws(fitted, x))


def uncertainty(fitted: Fitted, x: Inputs | Record, how: Prediction) -> Uncertainty:
    """Total, aleatoric and epistemic; as `Laplace.uncertainty`, arguments as above."""
    if how.is_closed and has_variance_in_closed_form(fitted.likelihood):
        return of_moments(fitted.likelihood, *how.moments(fitted, x, diagonal=True))
    with torch.inference_mode(False):
        return of_draws(fitted.likelihood, how.draws(fitted, x))
