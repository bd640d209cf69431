"""An approximation: a model with its prior, and its posterior once it is fitted."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.shadow import check_no_autocast, unwrapped
from laplace_debias.laplace import file, predictive
from laplace_debias.laplace.export import export
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.linearised import OutputChoice, moments
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.posterior import FitReport, Fitted, GaussianPosterior
from laplace_debias.laplace.predictive import Prediction
from laplace_debias.laplace.predictor import Predictor
from laplace_debias.laplace.subject import PriorMean, PriorPrecision, Subject
from laplace_debias.laplace.thinning import Thinning, thinned
from laplace_debias.metrics import Uncertainty
from laplace_debias.system.ranks import current, together
from laplace_debias.system.shown import html_table

# Held for the moment in which a fit or a prior takes the place of another.
_EXCHANGE = threading.RLock()
_FEW = 4


class Approximation(Predictor):
    """A model with a prior, and its posterior once it is fitted.

    A prior is set, and a fit put in the place of another, as a whole: other threads see what was
    there before or what is there after.
    """

    _subject: Subject
    _fitted: Fitted | None = None
    # Told by the outputs of the first example that a fit predicts.
    _default_link: Link | None = None

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        lines = "".join(f"  {key}: {line}\n" for key, line in self._described().items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        return html_table(self._described().items())

    def _described(self) -> dict[str, str]:
        """A few facts by name, none of which holds a weight or grows with the model."""
        subject, fitted = self._subject, self._fitted
        model, known = unwrapped(subject.model), subject.parameters
        total = sum(parameter.numel() for parameter in model.parameters())
        kind, deltas = type(subject.likelihood), subject.prior_precision
        likelihood = file.NAMES.get(kind, kind.__name__)
        if isinstance(subject.likelihood, Gaussian):
            sigma = subject.likelihood.sigma
            of_each = f"one for each of {sigma.numel()} outputs"
            likelihood += f", sigma = {of_each if sigma.ndim else format(sigma.item(), 'g')}"
        low, high = (f"{delta:g}" for delta in torch.aminmax(deltas))
        mean = subject.given_mean if known is None else subject.prior_mean
        is_vector = isinstance(mean, Tensor) and mean.ndim
        lines = {
            "model": type(model).__name__,
            "likelihood": likelihood,
            "curvature": subject.settings.kind.name,
            "parameters": f"those of the last layer, found at the fit, of {total:,}",
            "blocks": "found at the fit",
            "prior precision": low if deltas.ndim == 0 else f"{low} to {high}, one per block",
            "prior mean": "one for each parameter" if is_vector else f"{float(mean or 0):g}",
            "temperature": f"{subject.temperature:g}",
            "link": str(subject.link or ""),
            "fit": "none yet",
        }
        if known is not None:
            lines["parameters"] = f"{known.size:,} of {total:,}"
            names = known.block_names
            shown = names if len(names) <= _FEW else [*names[: _FEW - 2], "…", names[-1]]
            lines["blocks"] = f"{len(names)}: {', '.join(shown)}"
        if fitted is not None:
            mode = f", {fitted.mode}" if fitted.mode else ""
            lines["fit"] = f"N = {fitted.posterior.num_data:,}{mode}"
        defaults = {"prior mean": "0", "temperature": "1", "link": ""}
        return {key: line for key, line in lines.items() if line != defaults.get(key)}

    @property
    def _subjects(self) -> list[Subject]:
        return [self._subject]

    def _agree(self, **arguments: Any) -> None:
        """Require the processes that make a call together to make it alike."""
        ranks = current()
        if ranks.size > 1:
            ranks.require_same(made=self, settings=self._subject.settings, **arguments)

    @property
    def _state(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("Not fitted yet: call `fit(train_loader)` first.")
        return self._fitted

    @property
    def _unchanged_state(self) -> Fitted:
        """The fit, of a model that is what it was then.

        The Bayesian parameters are compared entry by entry. The others, of which a posterior of the
        last layer has far more, are looked after as `Watch` says.
        """
        fitted = self._state
        mean, known = fitted.posterior.mean, fitted.subject.known
        check_no_autocast(mean.device)
        plain = unwrapped(fitted.subject.model)
        now = known.flat(plain)
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
        if wrong := fitted.watch.changed(plain, known.names, fitted.others):
            raise RuntimeError(
                f"{wrong[0]} has changed since the fit, so the posterior is not that of this "
                "model: fit again."
            )
        return fitted

    def _change(self, fitted: Fitted | None = None, **prior: Any) -> None:
        """Put another fit or prior in the place of those that hold by now."""
        with _EXCHANGE:
            if fitted is not None:
                prior["likelihood"] = fitted.subject.likelihood
                prior["parameters"] = fitted.subject.parameters
            subject = self._subject.changed(**prior)
            now = fitted or self._fitted
            if now is not None:
                posterior = now.posterior.changed(
                    prior_precision=subject.prior_precision,
                    prior_mean=subject.prior_mean,
                    temperature=subject.temperature,
                )
                self._fitted = replace(now, subject=subject, posterior=posterior)
            self._subject = subject
            self._default_link = self._default_link if fitted is None else None

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._subject.model

    @property
    def param_names(self) -> list[str]:
        """Names of the Bayesian parameters, in the model's order.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        return self._subject.known.names

    @property
    def block_names(self) -> list[str]:
        """Names of the curvature blocks, in the order that per-block prior precisions take.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        return self._subject.known.block_names

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian over the Bayesian parameters.

        Raises:
            RuntimeError: Before a fit.
        """
        return self._state.posterior

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
        if (report := self._state.report) is None:
            raise RuntimeError('There is a report of fit(mode="auto") alone, until it is saved.')
        return report

    # ------------------------------------------------- the prior, which needs no refit

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """δ; setting it needs no refit."""
        return self._subject.prior_precision

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        self._change(prior_precision=value)

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """The prior's mean, one number or `[D]`, float64; setting it needs no refit.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        first = unwrapped(self.model).get_parameter(self.param_names[0])
        mean = self._subject.prior_mean
        return first.new_zeros((), dtype=torch.float64) if mean is None else mean

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        self._change(given_mean=value)

    @property
    def temperature(self) -> float:
        """T of the likelihood; setting it needs no refit."""
        return self._subject.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._change(temperature=value)

    @property
    def link(self) -> Link | None:
        """The link by which `predict` makes probabilities of logits; None for the default.

        `tune` sets it, and so may you, with a name or a `Link`; that needs no refit.
        """
        return self._subject.link

    @link.setter
    def link(self, value: str | Link | None) -> None:
        self._change(link=value)

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
        """
        return self._state.log_marginal_likelihood(prior_precision)

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
        state = self._unchanged_state
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
        how = Prediction(method, samples, generator, positions)
        return predictive.marginals(self._unchanged_state, x, how)

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

        Raises:
            ValueError: For a curvature other than `"kfac"` and `"ekfac"`, fewer than two inputs, or
                an error that is not positive. Else this raises what `functional` raises.
        """
        fitted, found = thinned(self._unchanged_state, x, error, positions)
        self._change(fitted)
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
        file.save(Path(path), self._unchanged_state, own_likelihood)

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
        export(self._unchanged_state, Path(path), example, link)

    def _predict(self, x: Inputs | Record, how: Prediction, link: Link | None) -> Distribution:
        fitted = self._unchanged_state
        link = link or fitted.subject.link
        if how.is_closed and link is None:
            link = self._default_link = self._default_link or predictive.default_link(fitted, x)
        return predictive.predict(fitted, x, how, link)

    def _uncertainty(self, x: Inputs | Record, how: Prediction) -> Uncertainty:
        return predictive.uncertainty(self._unchanged_state, x, how)
