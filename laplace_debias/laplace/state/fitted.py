"""The state of a `Laplace`, before and after a fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.layers.backends import uses_backpack
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.network.selection import LAST_LAYER
from laplace_debias.curvature.network.unwrapping import plain_names
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fit_report import FitReport
from laplace_debias.laplace.state.fitted_model import FittedModel
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.state.prior import Prior, check_prior_precision
from laplace_debias.system.checks import real
from laplace_debias.system.shown import counted


@dataclass(frozen=True, eq=False)
class FitSetup:
    """The state before a fit: a model, the options of the fit, and the prior.

    Attributes:
        spec: The model and its likelihood.
        config: The options of a fit.
        parameters: The Bayesian parameters; None if they can be found only by running the model on
            an example.
        prior: The prior.
        temperature: T of the likelihood.
        link: The link from logits to probabilities; None for the default.
        earlier_names: The names of the parameters in an earlier fit, which every later fit must
            also select; None before the first fit.
    """

    spec: ModelSpec
    config: CurvatureConfig
    parameters: ParameterBlocks | None
    prior: Prior
    temperature: float
    link: Link | None = None
    earlier_names: Sequence[str] | None = None

    def with_likelihood(self, likelihood: Likelihood) -> "FitSetup":
        """Return the setup with another likelihood."""
        return replace(self, spec=replace(self.spec, likelihood=likelihood))

    def with_prior(self, prior: Prior) -> "FitSetup":
        """Return the setup with another prior."""
        if self.parameters is not None:
            prior = prior.for_parameters(self.parameters)
        return replace(self, prior=prior)

    def with_temperature(self, temperature: float) -> "FitSetup":
        """Return the setup with another temperature."""
        return replace(self, temperature=temperature)

    def with_link(self, link: Link | None) -> "FitSetup":
        """Return the setup with another link; None selects the default link."""
        return replace(self, link=link)

    @property
    def names(self) -> Sequence[str] | None:
        """The names of the Bayesian parameters, or None if they are not known yet."""
        return self.earlier_names if self.parameters is None else self.parameters.names

    @property
    def device(self) -> torch.device:
        """The device of the Bayesian parameters."""
        return self.spec.first_parameter(self.names).device


@dataclass(frozen=True)
class Residuals:
    """The residuals of a regression, in units of the noise σ for which its curvature was computed.

    Attributes:
        num_targets: M, the total number of target entries of the N examples.
        squared: Q = Σ ‖(f − y)/σ‖² over the N examples.
    """

    num_targets: float
    squared: float

    def nll_change(self, log_factor: Float[Tensor, ""]) -> Float[Tensor, ""]:
        r"""Compute how much the negative log-likelihood grows if the noise is multiplied by k.

        The increase is $\tfrac12 Q(k^{-2} - 1) + M\log k$. It is differentiable in log k.
        """
        return 0.5 * self.squared * ((-2 * log_factor).exp() - 1) + self.num_targets * log_factor


# Prior precisions count as equal if they differ only by rounding in single precision.
_SINGLE_PRECISION = 1e-6


@dataclass(frozen=True, eq=False)
class FittedPosterior:
    """A fitted posterior, with its model and all results that predictions and files need.

    Attributes:
        fitted_model: The model and its Bayesian parameters, as they were at the fit.
        config: The options of the fit.
        selected: The parameters that were selected from the structure of the model, from which a
            later fit starts; None if they can be found only by running the model on an example.
        posterior: The Gaussian posterior, which contains the prior and the temperature.
        nll: The loss summed over the N examples, in nats.
        mode: The name of the fitting scheme.
        num_targets: The total number of target entries of the N examples, for a `Gaussian`
            likelihood whose curvature is proportional to σ⁻²; otherwise None.
        link: The link from logits to probabilities; None for the default.
        report: The estimated error of a fit with `mode="auto"`, compared with a fit to all data.
        thinned_at: For each block, the smallest prior precision for which the error reported by
            `thin` is valid; None if the posterior was not thinned.
    """

    fitted_model: FittedModel
    config: CurvatureConfig
    selected: ParameterBlocks | None
    posterior: GaussianPosterior
    nll: float
    mode: str | None
    num_targets: float | None = None
    link: Link | None = None
    report: FitReport | None = None
    thinned_at: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.nll):
            raise ValueError(
                f"The loss, summed over {counted(self.posterior.num_data, 'example')}, is "
                f"{self.nll}. The targets are too far from the outputs for the likelihood "
                "(for regression, the distance is measured in units of sigma). Check the "
                "targets and the outputs, or convert the model to a wider dtype."
            )

    @property
    def spec(self) -> ModelSpec:
        """The model and its likelihood."""
        return self.fitted_model.spec

    @property
    def parameters(self) -> ParameterBlocks:
        """The Bayesian parameters and their blocks."""
        return self.fitted_model.parameters

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the model's outputs."""
        return self.spec.likelihood

    @property
    def setup(self) -> FitSetup:
        """The setup from which the next fit starts."""
        return FitSetup(
            self.spec,
            self.config,
            self.selected,
            prior=self.prior,
            temperature=self.temperature,
            link=self.link,
            earlier_names=self.parameters.names,
        )

    @property
    def residuals(self) -> "Residuals | None":
        """The residuals of a regression, or None if the curvature is not proportional to σ⁻²."""
        if self.num_targets is None:
            return None
        assert isinstance(self.likelihood, Gaussian)
        sigma = self.likelihood.curvature_sigma
        # Sigma has one entry per output or a single one for all, so the normaliser is averaged over
        # the entries.
        normaliser = self.likelihood.log_normaliser(sigma.numel()) / sigma.numel()
        return Residuals(self.num_targets, 2 * (self.nll - self.num_targets * normaliser))

    @property
    def prior(self) -> Prior:
        """The prior of the posterior."""
        return self.posterior.prior

    @property
    def temperature(self) -> float:
        """The temperature T of the likelihood."""
        return self.posterior.temperature

    @property
    def device(self) -> torch.device:
        """The device of the Bayesian parameters."""
        return self.spec.first_parameter(self.parameters.names).device

    def note_on_thinning(self, prior_precision: float | Float[Tensor, " blocks"]) -> str | None:
        """Return a warning if the posterior was thinned at a larger prior precision, or else None.

        Args:
            prior_precision: One number, or one per block.
        """
        if self.thinned_at is None:
            return None
        deltas = torch.as_tensor(prior_precision).expand(len(self.thinned_at)).tolist()
        pairs = zip(deltas, self.thinned_at, strict=True)
        # The note names the block whose prior precision is farthest below its limit.
        delta, limit = min(pairs, key=lambda pair: pair[0] / pair[1])
        if delta >= limit * (1 - _SINGLE_PRECISION):
            return None
        return (
            f"The posterior was thinned at the prior precision {limit:.3g}. At {delta:.3g}, the "
            "error of its standard deviations is larger than `thin` reported. Tune before "
            "`thin`, or load the posterior that was saved before `thin`."
        )

    def check_unchanged(self) -> None:
        """Require that the model has not changed since the fit; see `FittedModel`."""
        self.fitted_model.check_unchanged(self.posterior.mean)

    def with_likelihood(self, likelihood: Likelihood) -> "FittedPosterior":
        """Return the state with a different noise of the outputs, but the same posterior."""
        fitted_model = self.fitted_model
        spec = replace(fitted_model.spec, likelihood=likelihood)
        return replace(self, fitted_model=replace(fitted_model, spec=spec))

    def with_prior(self, prior: Prior) -> "FittedPosterior":
        """Return the state with another prior."""
        prior = prior.for_parameters(self.parameters)
        return replace(self, posterior=self.posterior.changed(prior=prior))

    def with_temperature(self, temperature: float) -> "FittedPosterior":
        """Return the state with another temperature.

        Raises:
            ValueError: If the prior contains information of earlier data, whose weight depends on
                the temperature.
        """
        posterior = self.posterior
        if temperature == posterior.temperature:
            return self
        if posterior.prior.information is not None:
            raise ValueError(
                "The temperature of a fit with `prior=` cannot be changed (here from "
                f"{posterior.temperature:g} to {temperature:g}). Fit again with Laplace(..., "
                f"temperature={temperature:g}, prior=...)."
            )
        return replace(self, posterior=posterior.changed(temperature=temperature))

    def with_link(self, link: Link | None) -> "FittedPosterior":
        """Return a copy of the state with a different link; None selects the default link."""
        return replace(self, link=link)

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        """Compute the Laplace approximation of log p(D) in float64, differentiable in δ.

        Args:
            prior_precision: δ, one number or one per block; None for the precision of the prior.
        """
        posterior = self.posterior
        delta = posterior.prior.precision if prior_precision is None else prior_precision
        delta = real(delta, "prior_precision", posterior.mean.device)
        check_prior_precision(delta.detach(), len(self.parameters.block_names))
        return posterior.log_marginal_likelihood(
            self.nll, delta, posterior.log_det_precision(delta)
        )


def checked_setup(
    spec: ModelSpec,
    config: CurvatureConfig,
    *,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: Any = 1.0,
    replay_modules: Mapping[str, Sequence[str]] | None = None,
) -> FitSetup:
    """Check the options of a `Laplace`, and select the Bayesian parameters.

    Args:
        spec: The model and its likelihood.
        config: The options of a fit; its parameter names may include the prefixes of model
            wrappers.
        prior_precision: δ, one number or one per block.
        prior_mean: μ, one number or one per parameter.
        temperature: T of the likelihood.
        replay_modules: `ParameterBlocks.replay_modules` of an earlier fit, for example one from a
            file.
    """
    plain = spec.plain_model
    if isinstance(config.params, (list, tuple)):
        config = replace(config, params=plain_names(spec.model, config.params))
    is_frozen = not any(parameter.requires_grad for parameter in plain.parameters())
    parameters = None
    if config.params != LAST_LAYER or is_frozen:
        parameters = ParameterBlocks.selected(plain, config, None, replay_modules)
    config = replace(config, backend=_checked_backend(config.backend, spec))
    names = None if parameters is None else parameters.names
    device = spec.first_parameter(names).device
    prior = Prior.checked(prior_precision, prior_mean, device)
    if parameters is not None:
        prior = prior.for_parameters(parameters)
    return FitSetup(
        spec, config, parameters, prior=prior, temperature=checked_temperature(temperature)
    )


def _checked_backend(backend: str, spec: ModelSpec) -> str:
    """Return the backend for a model, and raise an error if it does not support the model."""
    if spec.class_dim not in (None, -1):
        if backend == "backpack":
            raise NotImplementedError(
                "BackPACK does not support `class_dim=`, which moves the dimensions of the "
                'outputs. Use `backend="hooks"` or `backend="auto"`, or change the model to '
                "return the classes in the last dimension."
            )
        if backend == "auto":
            backend = "hooks"
    if backend not in ("auto", "hooks"):  # These two support every model.
        uses_backpack(backend, spec.plain_model)
    return backend


def checked_temperature(value: Any) -> float:
    """Check and convert the temperature, which must be a positive finite number."""
    temperature = real(value, "temperature")
    if temperature.ndim:
        raise TypeError(f"`temperature` is {temperature.tolist()}. Pass one number.")
    if not 0 < float(temperature) < math.inf:
        raise ValueError(
            f"`temperature` must be positive and finite, got {float(temperature)}. Use 1 for the "
            "posterior itself, or a smaller number for a narrower posterior."
        )
    return float(temperature)
