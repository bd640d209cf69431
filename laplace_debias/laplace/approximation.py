"""An approximation: a model with its prior, and its posterior once it is fitted."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.validation import check_no_autocast
from laplace_debias.laplace import predictive
from laplace_debias.laplace.export import export
from laplace_debias.laplace.file import NAMES, save
from laplace_debias.laplace.fit_report import FitReport
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.linearised import OutputChoice, moments
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.predictive import LinkedFit, PredictionMethod
from laplace_debias.laplace.predictor import Predictor
from laplace_debias.laplace.prior import (
    Prior,
    PriorMean,
    PriorPrecision,
    prior_mean_from,
    prior_precision_from,
)
from laplace_debias.laplace.state import (
    FittedPosterior,
    Unfitted,
    checked_link,
    checked_temperature,
)
from laplace_debias.laplace.thinning import Thinning, thinned
from laplace_debias.system.ranks import current, together
from laplace_debias.system.shown import html_table, warn

# Held for the moment in which a state takes the place of another.
_EXCHANGE = threading.RLock()
_MOST_SHOWN_BLOCKS = 4


class Approximation(Predictor):
    """A model with a prior, and its posterior once it is fitted.

    A state takes the place of another as a whole: other threads see what was there before or what
    is there after.
    """

    _state: Unfitted | FittedPosterior
    # The parameters that the model's structure shows, which every fit checks on an example.
    _selected: ParameterBlocks | None = None
    # Determined by the outputs of the first example that a fit predicts.
    _default_link: Link | None = None

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        lines = "".join(f"  {key}: {line}\n" for key, line in self._described().items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        return html_table(self._described().items())

    def _described(self) -> dict[str, str]:
        """A few facts by name, none of which holds a weight or grows with the model."""
        state = self._state
        model = state.spec.plain_model
        total = sum(parameter.numel() for parameter in model.parameters())
        lines = {
            "model": type(model).__name__,
            "likelihood": _described_likelihood(state.spec.likelihood),
            "curvature": state.config.kind.name,
        }
        if state.parameters is None:
            lines["parameters"] = f"those of the last layer, found at the fit, of {total:,}"
            lines["blocks"] = "found at the fit"
        else:
            names = state.parameters.block_names
            shown = names
            if len(names) > _MOST_SHOWN_BLOCKS:
                shown = [*names[: _MOST_SHOWN_BLOCKS - 2], "…", names[-1]]
            lines["parameters"] = f"{state.parameters.size:,} of {total:,}"
            lines["blocks"] = f"{len(names)}: {', '.join(shown)}"
        lines |= _described_prior(state.prior)
        if state.temperature != 1:
            lines["temperature"] = f"{state.temperature:g}"
        if state.link is not None:
            lines["link"] = str(state.link)
        lines["fit"] = "none yet"
        if isinstance(state, FittedPosterior):
            mode = f", {state.mode}" if state.mode else ""
            lines["fit"] = f"N = {state.posterior.num_data:,}{mode}"
        return lines

    @property
    def _states(self) -> list[Unfitted | FittedPosterior]:
        return [self._state]

    def _agree(self, **arguments: Any) -> None:
        """Require the processes that make a call together to make it alike."""
        ranks = current()
        if ranks.size > 1:
            ranks.require_same(made=self, settings=self._state.config, **arguments)

    @property
    def _fitted(self) -> FittedPosterior:
        """The fitted state.

        Raises:
            RuntimeError: Before a fit.
        """
        if not isinstance(self._state, FittedPosterior):
            raise RuntimeError("Not fitted yet: call `fit(train_loader)` first.")
        return self._state

    @property
    def _unchanged_fit(self) -> FittedPosterior:
        """The fitted state, of a model that is what it was at the fit.

        The Bayesian parameters are compared entry by entry. Changes of the others, of which a model
        with a posterior of its last layer has far more, are detected as `ChangeDetector` describes.
        """
        fitted = self._fitted
        mean, names = fitted.posterior.mean, fitted.parameters.names
        check_no_autocast(mean.device)
        plain = fitted.spec.plain_model
        now = fitted.parameters.flattened(plain)
        if now.device != mean.device or now.dtype != mean.dtype:
            raise RuntimeError(
                f"The model has moved to {now.device}, {now.dtype} since the fit on "
                f"{mean.device}, {mean.dtype}: move it back or fit again."
            )
        if not torch.equal(now, mean):
            raise RuntimeError(
                "The model's parameters have changed since the fit, so the posterior does "
                "not describe them: fit again."
            )
        if changed_names := fitted.change_detector.changed(plain, names, fitted.frozen_fingerprint):
            raise RuntimeError(
                f"{changed_names[0]} has changed since the fit, so the posterior is not that of "
                "this model: fit again."
            )
        return fitted

    def _replace(self, fitted: FittedPosterior) -> None:
        """Put another fit in the place of the present state, whose prior and link stay.

        They may have been set while the fit was running.
        """
        with _EXCHANGE:
            state = self._state
            self._state = fitted.changed(
                prior=state.prior.to(fitted.device),
                temperature=state.temperature,
                link=state.link,
            )
            self._default_link = None

    def _set(
        self,
        *,
        fitted: FittedPosterior | None = None,
        prior_precision: PriorPrecision | None = None,
        prior_mean: PriorMean | None = None,
        **fields: Any,
    ) -> None:
        """Set the prior, the temperature or the link, of the present state or of another fit."""
        with _EXCHANGE:
            state = self._state if fitted is None else fitted
            prior, device = state.prior, state.device
            if prior_precision is not None:
                prior = replace(prior, precision=prior_precision_from(prior_precision, device))
            if prior_mean is not None:
                prior = replace(prior, mean=prior_mean_from(prior_mean, device))
            if prior is not state.prior:
                fields["prior"] = prior
            self._state = state.changed(**fields)
            if fitted is not None:
                self._default_link = None

    @property
    def _parameters(self) -> ParameterBlocks:
        """The Bayesian parameters.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        if self._state.parameters is None:
            raise RuntimeError(
                f'params="last_layer" of a {type(self.model).__name__} is found by running an '
                "example, which the first fit does: call `fit(train_loader)` first, or name the "
                "parameters, params=[...]."
            )
        return self._state.parameters

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._state.spec.model

    @property
    def param_names(self) -> list[str]:
        """Names of the Bayesian parameters, in the model's order.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        return self._parameters.names

    @property
    def block_names(self) -> list[str]:
        """Names of the curvature blocks, in the order that per-block prior precisions take.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        return self._parameters.block_names

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian over the Bayesian parameters.

        Raises:
            RuntimeError: Before a fit.
        """
        return self._fitted.posterior

    @property
    def mean(self) -> Float[Tensor, " parameters"]:
        """θ*, the Bayesian parameters at the fit, flattened in the model's order, `[D]`."""
        return self.posterior.mean

    @property
    def num_data(self) -> int:
        """N, the number of training examples that the posterior stands for."""
        return self.posterior.num_data

    @property
    def fit_report(self) -> FitReport:
        """How far the fit of `mode="auto"` is from that of all the data.

        Raises:
            RuntimeError: Where the posterior is of no such fit, or was loaded.
        """
        if (report := self._fitted.report) is None:
            raise RuntimeError('There is a report of fit(mode="auto") alone, until it is saved.')
        return report

    # ------------------------------------------------- the prior, which needs no refit

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """δ; setting it needs no refit."""
        return self._state.prior.precision

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        self._set(prior_precision=value)

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """The prior's mean, one number or `[D]`, float64; setting it needs no refit.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        first = self._state.spec.first_parameter(self._parameters.names)
        mean = self._state.prior.mean
        if mean is None:
            return first.new_zeros((), dtype=torch.float64)
        return mean

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        self._set(prior_mean=value)

    @property
    def temperature(self) -> float:
        """T of the likelihood; setting it needs no refit."""
        return self._state.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._set(temperature=checked_temperature(value))

    @property
    def link(self) -> Link | None:
        """The link by which `predict` makes probabilities of logits; None for the default.

        `tune` sets it, and so may you, with a name or a `Link`; that needs no refit.
        """
        return self._state.link

    @link.setter
    def link(self, value: str | Link | None) -> None:
        self._set(link=checked_link(value, self.likelihood))

    @property
    def sigma(self) -> Float[Tensor, "*outputs"]:
        """Standard deviation of a regression's noise, in the targets' units: one, or one an output.

        Raises:
            AttributeError: If the likelihood is not `"regression"`.
        """
        if isinstance(self.likelihood, Gaussian):
            return self.likelihood.sigma
        raise AttributeError(f"sigma belongs to likelihood='regression', not to {self.likelihood}.")

    # ------------------------------------------------- the posterior

    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw Bayesian parameters, `[n, D]`, in the model's order."""
        return self.posterior.sample(n, generator)

    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None
    ) -> Float[Tensor, ""]:
        r"""The Laplace approximation of log p(D), in nats over all N examples, float64.

        $-\tfrac1T\sum_n \ell_n + \log N(\theta^* \mid \mu, \delta^{-1}) + \tfrac D2\log 2\pi
        - \tfrac12\log\det P$, every constant included; T is the temperature and μ the
        prior's mean. Where the fit saw fewer than N examples, the first term is scaled up from
        those.

        Args:
            prior_precision: δ to evaluate at, differentiable; the current one if None.

        Warns:
            UserWarning: After `thin`, for then it is a lower bound of that of the full posterior.
        """
        if self._fitted is not None and self._fitted.thinned_at is not None:
            warn(
                "The posterior is thinned, so this is a lower bound of its log marginal "
                "likelihood, and may be far below it. Compute it before thin, or load the "
                "posterior that was saved before it."
            )
        return self._fitted.log_marginal_likelihood(prior_precision)

    def functional(
        self,
        x: Inputs | Record,
        diagonal: bool = False,
        outputs: OutputChoice | None = None,
        *,
        joint: bool = False,
        positions: Positions | None = None,
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
        """Mean `[B, C]` and covariance `[B, C, C]` of the linearised network's outputs, exact.

        A network with further positions, `[B, T, C]`, has a mean of that shape and a covariance of
        all `T·C` outputs of an example, `[B, T·C, T·C]`.

        Args:
            x: Inputs, `[B, ...]`.
            diagonal: Give the variances alone, of the mean's shape, for much less work.
            outputs: Some outputs only: indices `[B, k]` into the flattened outputs of each example,
                or a number k for the k largest; mean `[B, k]`, covariance `[B, k, k]`.
            joint: Give the covariance between inputs, too, `[B, C, B, C]`: entry `[n, i, m, j]` is
                that of output i at input n with output j at input m.
            positions: Some positions of outputs `[B, T, C]` only, as `predict`: the mean is
                `[B, p, C]` (`[B, C]` for one). `outputs` are those at each position then.

        Raises:
            ValueError: If the inputs or outputs are not finite, or of the wrong rank; if `outputs`
                or `positions` are not there; if the memory bound is too small, or the outputs are
                too many; for `joint` with `diagonal`.
            TypeError: As `predict`.
            RuntimeError: As `predict`.
        """
        if joint and diagonal:
            raise ValueError(
                "diagonal=True gives variances, joint=True covariances between inputs: leave out "
                "one of them."
            )
        state = self._unchanged_fit
        if joint:
            return joint_moments(state, x, outputs, positions)
        mean, covariances = moments(state, x, None, diagonal, outputs, positions)
        return mean, covariances[0]

    def marginals(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        positions: Positions | None = None,
    ) -> Distribution:
        """The predictive distribution of each target of a regression on its own, with quantiles.

        Batch shape `[B, C]` for C targets. It has `.icdf(q)` and `.cdf(y)` besides `.mean`,
        `.variance` and `.log_prob(y)`: `la.marginals(x).icdf(torch.tensor(0.975))` is `[B, C]`, and
        a tensor of Q probabilities `[Q, 1, 1]` gives `[Q, B, C]`. In closed form it is a `Normal`;
        with samples the equal mixture of the S normals p(y | f_s), noise included.

        Args:
            x: Inputs, `[B, ...]`; this and the others are those of `predict`.
            method: How to predict.
            samples: Draws.
            generator: For the draws.
            positions: Which positions.

        Raises:
            TypeError: If the likelihood is none of a regression. Else this raises what `predict`
                raises.
        """
        prediction = PredictionMethod(method, samples, generator, positions)
        return LinkedFit(self._unchanged_fit, None).marginals(x, prediction)

    def thin(
        self, x: Inputs | Record, error: float = 1e-3, *, positions: Positions | None = None
    ) -> Thinning:
        r"""Keep only the directions that matter for predictions at the current prior precision.

        Where $\tfrac NT\Lambda$ is small beside δ all directions have nearly the variance 1/δ, and
        no basis of them is needed: they share the mean of their curvature, so that its trace stays.
        The posterior becomes a small part of what it was, in memory and in its file. Tune first: at
        a smaller prior precision the error is larger. The whole posterior is lost: save it first if
        you want it again. In a process group give every process the same inputs.

        On half of the inputs the fewest directions are found with which no standard deviation of an
        output is off by more than `error`; on the other half the error is measured.

        Args:
            x: Inputs like those to come, `[B, ...]` as `predict` takes them: some dozens.
            error: The largest relative error of a standard deviation, to those of now.
            positions: Which positions of outputs `[B, T, C]`, as `predict` takes them.

        Returns:
            The part that is kept, and the error with its interval; `.message` says it in words.
            `tune` notes a smaller prior precision from then on, `tune_evidence` raises an error,
            and `log_marginal_likelihood` warns.

        Raises:
            ValueError: For a curvature other than `"kfac"` and `"ekfac"`, fewer than two inputs, or
                an error that is not positive. Else this raises what `functional` raises.
        """
        fitted, found = thinned(self._unchanged_fit, x, error, positions)
        self._replace(fitted)
        return found

    @together("save")
    def save(self, path: str | Path, *, own_likelihood: bool = False) -> None:
        """Write the fitted posterior as a safetensors file (no pickle), atomically.

        Of several processes the first one writes, and the others wait for it.
        The model itself is not in it. The file has a checksum, and the same posterior gives the
        same bytes. What stood at the path is replaced once the new file is complete; a symbolic
        link stays, and the file that it leads to is replaced.

        Args:
            path: The file, in a folder that exists.
            own_likelihood: Whether a likelihood of your own class may be saved by its import path
                and its `options`. The file holds no code, and `load` imports none: it must be given
                an instance.

        Raises:
            RuntimeError: Before a fit.
            ValueError: If the likelihood is an instance of a user's class, unless
                `own_likelihood`; if its `options` are not plain data.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder or a device or may not be written; if the disk is full.
                What was there before is still there.
        """
        save(Path(path), self._unchanged_fit, own_likelihood)

    def export(
        self,
        path: str | Path,
        example: Inputs | Record,
        *,
        link: str | Link | None = None,
    ) -> None:
        """Write the predictive as a program that runs without this package, atomically.

        It is the closed form of a posterior over the last layer, an `nn.Linear`, with curvature
        `"kfac"`, `"ekfac"` or `"diag"`.

        The program holds the network. It is called as the model is, with any number of examples,
        and gives tensors by their names, with positions `[B, T, ...]` where the model has them:

        - `"probs"`: of `"classification"` and `"multilabel"` `[B, C]`, of `"binary"` `[B]`; with
          them `"logits"` and their `"variance"`, `[B, C]`;
        - of `"regression"` `"mean"` and `"variance"` `[B, C]` and `"covariance"` `[B, C, C]` of y,
          which include σ².

        `torch.export.load(path).module()(x)["probs"]` reads and calls it.

        Args:
            path: The file, `.pt2`, in a folder that exists.
            example: Inputs as `predict` takes them, one example or more. Their sizes but for the
                number of examples are those that the program takes.
            link: As `predict` takes it.

        Raises:
            NotImplementedError: If torch cannot trace the model for any number of examples, for
                another posterior, for inputs that are no tensors, or for a likelihood of a user's
                class.
            ValueError: For another suffix, or an unknown link.
            RuntimeError: If the program does not give for the example what `predict` gives.
            OSError: If the file cannot be written. Else this raises what `predict` raises.
        """
        export(self._unchanged_fit, Path(path), example, link)

    def _linked_fits(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[LinkedFit]:
        fitted = self._unchanged_fit
        link = link or fitted.link
        if method.is_closed and link is None:
            link = self._default_link or predictive.default_link(fitted, x)
            self._default_link = link
        return [LinkedFit(fitted, link)]


def _described_likelihood(likelihood: Likelihood) -> str:
    name = NAMES.get(type(likelihood), type(likelihood).__name__)
    if not isinstance(likelihood, Gaussian):
        return name
    sigma = likelihood.sigma
    if sigma.ndim:
        return f"{name}, sigma = one for each of {sigma.numel()} outputs"
    return f"{name}, sigma = {sigma.item():g}"


def _described_prior(prior: Prior) -> dict[str, str]:
    lowest, highest = (f"{delta:g}" for delta in torch.aminmax(prior.precision))
    is_per_block = prior.precision.ndim > 0
    lines = {"prior precision": f"{lowest} to {highest}, one per block" if is_per_block else lowest}
    if prior.mean is not None and prior.mean.any():
        is_vector = prior.mean.ndim > 0
        lines["prior mean"] = "one for each parameter" if is_vector else f"{float(prior.mean):g}"
    return lines
