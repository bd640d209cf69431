"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood, likelihood_from
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.reader import BatchHook
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace import file, predictive, tune, tuning
from laplace_debias.laplace import fit as fits
from laplace_debias.laplace.data_size import check_held_out
from laplace_debias.laplace.description import described
from laplace_debias.laplace.evaluation import evaluate_predictions
from laplace_debias.laplace.export import export
from laplace_debias.laplace.file import likelihood_from_json
from laplace_debias.laplace.fitted import FitReport, Fitted
from laplace_debias.laplace.functional import linearised
from laplace_debias.laplace.functional.linearised import OutputChoice
from laplace_debias.laplace.links import Link, link_from
from laplace_debias.laplace.parameters import (
    BayesianParameters,
    FitSettings,
)
from laplace_debias.laplace.plan import Plan, plan_of
from laplace_debias.laplace.posterior import GaussianPosterior, check_temperature
from laplace_debias.laplace.predictive import Prediction
from laplace_debias.laplace.prior import (
    Prior,
    PriorMean,
    PriorPrecision,
    prior_mean_from,
    prior_precision_from,
)
from laplace_debias.laplace.schemes import Scheme, scheme_of
from laplace_debias.laplace.subject import Subject, usable
from laplace_debias.laplace.thinning import Thinning, thinned
from laplace_debias.metrics import Report, Uncertainty
from laplace_debias.system.checks import check_is
from laplace_debias.system.ranks import current, together
from laplace_debias.system.shown import html_table
from laplace_debias.system.threads import Lock

# Held for the moment in which a fit or a prior takes the place of another.
_EXCHANGE = Lock()
_P = ParamSpec("_P")
OURS = {
    "H": "la.posterior.precision, less the prior's",
    "sigma_noise": "la.sigma",
    "predictive_samples": "la.sample(n), or la.predict(x, method='nn')",
    "subset_of_weights": 'params="all" or "last_layer"',
    "hessian_structure": 'curvature="kfac", "diag", "full" or "lowrank"',
    "optimize_prior_precision": "la.tune(validation_loader) or la.tune_evidence()",
}
"""Names of laplace-torch, and what takes their place."""


def knowing_laplace_torch(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that answers arguments of laplace-torch with ours."""

    @functools.wraps(init)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> None:
        for theirs in OURS.keys() & named.keys():
            raise TypeError(f"{theirs} is laplace-torch's name: use {OURS[theirs]}.")
        init(*arguments, **named)

    return checked


class Laplace:
    r"""A Laplace approximation of a trained network's posterior.

    The posterior is $N(\theta^*, P^{-1})$ with $P = \tfrac NT C + \mathrm{diag}(\delta)$: θ* the
    trained parameters, C the curvature of the mean loss, N the number of training examples, δ the
    prior precision and T the likelihood's temperature (Eq. 4 and 17 of Tatzel et al., 2025,
    "Debiasing mini-batch quadratics for applications in deep learning"). The model is not changed.

    Any number of threads may use one object. One that is tuned meanwhile is seen as it was before
    or as it is after. In a process group `fit`, `fit_batches`, `tune`, `evaluate` and `save` are
    called on all processes. Each reads its part of the data (`ShardedBatches`) and ends with the
    whole posterior; see `alone` for one process on its own. With a `generator` a call is a function
    of it and of the data, and leaves torch's global generator alone.

    Args:
        model: A trained network in eval mode, from inputs `[B, ...]` to outputs `[B, C]`.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"heteroscedastic"` (means and log-variances, `[B, 2C]`), `"binary"` (one logit),
            `"multilabel"` (targets 0 or 1, `[B, C]`), or a `Likelihood`.
        curvature: `"kfac"`, `"ekfac"` (its directions, exact curvature along each), `"diag"`,
            `"lowrank"` (leading eigenvectors of the whole matrix) or `"full"`.
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"supported"`
            (those of known layers), `"last_layer"` (what the outputs come from, found by the first
            `fit` unless the structure tells it), names, or a predicate `(name, parameter) -> bool`.
            Frozen ones never are. A parameter of no known layer has an exact block: dense up to
            1,024 entries, diagonal above.
        prior_precision: δ, one number or one per block (see `block_names`).
        backend: `"backpack"`, `"hooks"`, or `"auto"`: BackPACK where it can. Both give the same.
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels drawn from the model) or
            `"empirical"` (the true labels).
        factor_dtype: In what curvature is summed and decomposed.
        sigma: Noise of `"regression"`: standard deviation, one number or one per output. If None
            a fit assumes 1.0 and warns of it; `tune` finds it.
        mc_samples: Labels an example for `fisher="mc"`.
        joint: Whether a layer's weight and bias make one block. Not of `"lowrank"` and `"full"`.
        sharing: How positions share a weight, `"expand"` or `"reduce"`: one for all, or a mapping
            from layers' paths. Of `"kfac"` and `"ekfac"`.
        rank: Directions of `"lowrank"`, 20 if None.
        memory_bound: Bytes of working memory for output gradients. Results do not depend on it.
            None for 128 MiB, and more where one example needs it.
        class_dim: Which dimension of the outputs has the classes: None or -1 for `[B, ..., C]`, 1
            for `[B, C, ...]`, which are then moved to the end.
        batch: A function from what loaders yield to `(inputs, targets)`. None reads pairs, and
            mappings and dataclasses with the targets under `labels`, `label`, `label_ids`,
            `targets`, `target` or `y`.
        temperature: T of the likelihood $p(D \mid \theta)^{1/T}$. Less than 1 is more certain.
        prior_mean: Mean of the prior: one number, one per parameter `[D]`, or a mapping by name.
            It enters the marginal likelihood alone.

    Raises:
        ValueError: For an unknown name, `sharing` or `joint` with a curvature that has no use for
            it, a prior precision that is not positive, a model that holds NaN, or one with dropout
            or batch normalisation in training mode.
        NotImplementedError: For BackPACK with a model that it would get wrong.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from laplace_debias import Laplace
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
        >>> data = TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
        >>> la = Laplace(model).fit(DataLoader(data, batch_size=16), mode="debiased")
        >>> la.predict(torch.randn(5, 2)).probs.shape
        torch.Size([5, 3])
        >>> la
        Laplace(
          model: Sequential
          likelihood: classification
          curvature: kfac
          parameters: 51 of 51
          blocks: 4: 0.weight, 0.bias, 2.weight, 2.bias
          prior precision: 1
          fit: N = 64, debiased
        )
    """

    @knowing_laplace_torch
    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        curvature: str = "kfac",
        params: ParameterSelection = "all",
        prior_precision: PriorPrecision = 1.0,
        backend: str = "auto",
        fisher: str = "exact",
        factor_dtype: torch.dtype = torch.float64,
        *,
        sigma: float | Sequence[float] | Tensor | None = None,
        mc_samples: int = 1,
        joint: bool = False,
        sharing: Sharing = "expand",
        rank: int | None = None,
        memory_bound: int | None = None,
        class_dim: int | None = None,
        batch: BatchHook | None = None,
        temperature: float = 1.0,
        prior_mean: PriorMean = 0.0,
    ) -> None:
        settings = FitSettings(
            CurvatureKind(curvature, rank),
            FisherType(fisher, mc_samples),
            factor_dtype,
            joint,
            sharing,
            memory_bound,
            class_dim,
        )
        settings.check_used()
        usable(model)
        meaning = likelihood_from(likelihood, sigma)
        self._subject = Subject.of(model, meaning, settings, params, backend, batch)
        precision = self._prior_precision_from(prior_precision)
        self._prior = Prior(precision, check_temperature(temperature), prior_mean)
        if (known := self._subject.parameters) is not None:
            self._prior = self._prior.of(unwrapped(model), known)
        self._fitted: Fitted | None = None

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        lines = described(self._subject, self._prior, self._fitted)
        return "\n".join(["Laplace(", *(f"  {key}: {line}" for key, line in lines.items()), ")"])

    def _repr_html_(self) -> str:
        return html_table(described(self._subject, self._prior, self._fitted).items())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in OURS:
                raise AttributeError(f"{name} is laplace-torch's name: use {OURS[name]}.")
            return object.__getattribute__(self, name)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._subject.model

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; of a regression with the noise that `tune` has found."""
        return self._subject.likelihood

    @property
    def _settings(self) -> FitSettings:
        return self._subject.settings

    # ------------------------------------------------------------- parameters

    @property
    def param_names(self) -> list[str]:
        """Names of the Bayesian parameters, in the model's order.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        return self._known.names

    @property
    def block_names(self) -> list[str]:
        """Names of the curvature blocks, in the order that per-block prior precisions take.

        Raises:
            RuntimeError: As `param_names`.
        """
        return self._known.block_names

    @property
    def _known(self) -> BayesianParameters:
        return self._subject.known

    # ---------------------------------------------------------------- fitting

    @together("fit")
    def fit(
        self,
        train_loader: Batches | Scheme,
        mode: str = "full",
        num_data: SupportsIndex | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        scale: bool = False,
        folds: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        """Fit the posterior's curvature.

        Args:
            train_loader: Batches `(x, y)` of training data. Or a way to fit with its data, such as
                `Split(directions, magnitudes)`.
            mode: `"full"`: all batches. `"mini"`: the first batch alone (biased: directions and
                magnitudes are both the extremes of that batch). `"debiased"`: directions from the
                first batch, magnitudes from the second (Eq. 9). `"crossfit"`: directions from the
                whole first batch, magnitudes out of fold. `"auto"`: as many examples, in random
                order, as standard deviations within 5 % of those of all the data take; see
                `fit_report`, and `Auto` for another tolerance or a budget.
            num_data: N, which the curvature is scaled to whatever the fit sees. If None, what a
                plain loader's sampler tells, or for `"full"` the number of examples seen.
            generator: Seeds the labels of `fisher="mc"` and the loader's order and augmentation;
                torch's global one if None.
            progress: Show a progress bar over the batches.
            scale: Scale what one or two batches tell by the whole loader's curvature of the loss in
                the outputs, which takes a forward pass over it (see `fit_batches`).
            folds: For `"crossfit"`: how many folds the first batch is cut into, 2 if None.
            resume: A folder of its own, in which the fit saves its sums once a minute. The same
                call goes on from there, and ends bit for bit as a fit that was never broken off.
                Model, options, data, the generator's state and the number of processes must be the
                same.

        Returns:
            The object itself.

        Raises:
            ValueError: For an unknown mode, too few batches, data or a model that do not fit the
                likelihood, a posterior that is larger than memory, an N that is not told, or not
                what the fit saw; in a process group if processes read the same data or have
                different models; with `resume` if its folder holds another fit's state, or the
                loader's order cannot be told again.
            TypeError: For targets or inputs of the wrong dtype, `num_data` that is no integer.
            NotImplementedError: If torch cannot differentiate the forward pass, or the gradients of
                its examples cannot be told apart.
            RuntimeError: Under autocast.
            OSError: If the folder of `resume` cannot be written to.
        """
        self._agree(mode=mode, scale=scale, folds=folds, resume=resume)
        if not isinstance(train_loader, Scheme):
            request = fits.of_loader(
                *(self._subject, train_loader, mode, num_data, generator, resume),
                scale=scale,
                folds=folds,
                progress=progress,
            )
        elif mode != "full" or progress or scale or folds is not None:
            raise ValueError(
                f"{type(train_loader).__name__}(...) says how to fit: leave out mode, folds, "
                "progress and scale (fit_batches(..., scale=data) scales)."
            )
        else:
            request = fits.of_scheme(self._subject, train_loader, num_data, generator, resume)
        self._adopt(fits.fit(self._subject, self._prior, request))
        return self

    def plan(
        self,
        train_loader: Batches,
        mode: str = "full",
        *,
        folds: int | None = None,
    ) -> Plan:
        """Plans what `fit` takes of memory and time, within a factor of 1.5.

        Bytes of what a fit sums and keeps are counted from shapes; what a batch takes beside them,
        and its seconds, are those of the first batch, which is run. Nothing is fitted. In a process
        group each process plans by itself.

        Args:
            train_loader: As `fit` takes it. Its first batch is read, so it must be re-iterable.
            mode: As `fit` takes it.
            folds: As `fit` takes it.

        Returns:
            The plan; `print` shows it as a table, `plan.check()` refuses what does not fit.

        Raises:
            ValueError: For an unknown mode, `folds` with another mode than `"crossfit"`, no batch;
                as `fit` for the first batch.
            TypeError: For an iterator, which would lose its first batch.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from laplace_debias import Laplace
            >>> model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3)).eval()
            >>> batches = [(torch.randn(64, 20), torch.randint(3, (64,)))]
            >>> plan = Laplace(model).plan(batches)
            >>> [block.factors for block in plan.blocks]
            [23200, 20000, 20072, 72]
            >>> plan.check()
        """
        return plan_of(self._subject, self._prior, train_loader, mode, folds)

    @together("fit_batches")
    def fit_batches(
        self,
        directions: Batches,
        magnitudes: Batches | None = None,
        *,
        num_data: SupportsIndex | None = None,
        folds: int | None = None,
        generator: torch.Generator | None = None,
        scale: Batches | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        """Fit with explicit data: directions from some batches, magnitudes from others.

        Args:
            directions: Batches `(x, y)` that give the eigenbases.
            magnitudes: Batches that the curvature along them is measured on; None for the same.
            num_data: N, as `fit` takes it; the number of examples in `directions` and `magnitudes`
                if None.
            folds: Cross-fit instead: magnitudes from `directions` itself, measured out of so many
                folds; no `magnitudes` then.
            generator: Seeds the labels of `fisher="mc"` and what loaders draw, as in `fit`.
            scale: Batches that take a forward pass each: magnitudes are multiplied by the ratio of
                the loss's mean curvature in the outputs (tr ∇²_f ℓ; of `fisher="empirical"`
                ‖∇_f ℓ‖²) over these to that over the examples measured. A few examples rarely hold
                their share of the hard ones that curve the loss of a confident network.
            resume: As `fit` takes it.

        Returns:
            The object itself.

        Raises:
            ValueError: As `fit`; also for `folds` with `magnitudes`, fewer than two or more than
                there are examples.
            TypeError: As `fit`; also for data that can be read only once where it is needed twice.
            OSError: As `fit`.
        """
        self._agree(folds=folds, resume=resume)
        scheme = scheme_of(directions, magnitudes, folds)
        request = fits.of_scheme(self._subject, scheme, num_data, generator, resume, scale)
        self._adopt(fits.fit(self._subject, self._prior, request))
        return self

    def _adopt(self, fitted: Fitted, **of_prior: Any) -> None:
        """Make a fit the one that is predicted with, under the prior that holds by now.

        Args:
            fitted: The fit.
            of_prior: Fields of the prior that it brings with it.
        """
        with _EXCHANGE:
            prior = replace(self._prior, **of_prior)
            prior = prior.of(unwrapped(self.model), fitted.parameters)
            self._fitted = fitted.under(prior)
            self._prior = prior
            self._subject = replace(
                self._subject, likelihood=fitted.likelihood, parameters=fitted.parameters
            )

    @property
    def fit_report(self) -> FitReport:
        """How far the fit of `mode="auto"` is from that of all the data.

        Raises:
            RuntimeError: Where the posterior is of no such fit, or was loaded.
        """
        report = self._state.report
        if report is None:
            raise RuntimeError('There is a report of fit(mode="auto") alone, until it is saved.')
        return report

    # -------------------------------------------------------------- posterior

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian over the Bayesian parameters.

        Raises:
            RuntimeError: Before a fit.
        """
        return self._state.posterior

    @property
    def _state(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("Not fitted yet: call `fit(train_loader)` first.")
        return self._fitted

    @property
    def _unchanged_state(self) -> Fitted:
        state = self._state
        state.check_model()
        return state

    def _agree(self, **arguments: Any) -> None:
        """Require the processes that make a call together to make it alike."""
        current().require_same(made=self, settings=self._settings, **arguments)

    @property
    def mean(self) -> Float[Tensor, " parameters"]:
        """θ*, the Bayesian parameters at the fit, flattened in the model's order, `[D]`."""
        return self.posterior.mean

    @property
    def num_data(self) -> int:
        """N, the number of training examples that the posterior stands for."""
        return self.posterior.num_data

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """δ; setting it needs no refit."""
        return self._prior.precision

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        self._set_prior(precision=self._prior_precision_from(value))

    @property
    def sigma(self) -> Float[Tensor, "*outputs"]:
        """Standard deviation of a regression's noise, in the targets' units: one, or one an output.

        Raises:
            AttributeError: If the likelihood is not `"regression"`.
        """
        if isinstance(self.likelihood, Gaussian):
            return self.likelihood.sigma
        raise AttributeError(f"sigma belongs to likelihood='regression', not to {self.likelihood}.")

    @property
    def temperature(self) -> float:
        """T of the likelihood; setting it needs no refit."""
        return self._prior.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._set_prior(temperature=check_temperature(value))

    @property
    def link(self) -> Link | None:
        """The link by which `predict` makes probabilities of logits; None for the default.

        `tune` sets it, and so may you, with a name or a `Link`; that needs no refit.
        """
        return self._prior.link

    @link.setter
    def link(self, value: str | Link | None) -> None:
        self._set_prior(link=link_from(value, self.likelihood))

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """The prior's mean, one number or `[D]`, float64; setting it needs no refit.

        Raises:
            RuntimeError: As `param_names`.
        """
        device = unwrapped(self.model).get_parameter(self._known.names[0]).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return zero if self._prior.mean is None else self._prior.mean

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        mean = prior_mean_from(value, unwrapped(self.model), self._known.names)
        self._set_prior(given_mean=value, mean=mean)

    def _prior_precision_from(self, value: PriorPrecision) -> Tensor:
        known = self._subject.parameters
        # As long as there are no blocks, the fit that finds them checks their number.
        num_blocks = None if known is None else len(known.block_names)
        return prior_precision_from(value, self._subject.first_parameter, num_blocks)

    def _set_prior(self, **fields: Any) -> None:
        with _EXCHANGE:
            prior = replace(self._prior, **fields)
            if self._fitted is not None:
                self._fitted = self._fitted.under(prior)
            self._prior = prior

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

    # ------------------------------------------------------------- predicting

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
            return linearised.joint(state, x, outputs, positions)
        mean, covariances = linearised.moments(state, x, None, diagonal, outputs, positions)
        return mean, covariances[0]

    def predict(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str | Link | None = None,
        positions: Positions | None = None,
    ) -> Distribution:
        """The predictive distribution p(y | x), batch shape `[B]`.

        Args:
            x: Inputs, `[B, ...]`: a tensor, several in a tuple, or a mapping or dataclass by name,
                whose entry `labels` (or another of the names of targets that the forward pass does
                not take) is left out.
            method: `"glm"`: linearised network with exact functional covariance, averaged in closed
                form (`link`) or over `samples` draws of the outputs. `"glm-mc"`: linearised, weight
                samples by Jacobian-vector products (Eq. 18, as in the paper). `"nn"`: weight
                samples through the network itself. `"map"`: the trained network, no uncertainty.
            samples: Draws; None is the closed form for `"glm"` and 100 for `"glm-mc"` and `"nn"`.
            generator: For the draws; torch's global one if None. The closed form and `"map"` draw
                nothing.
            link: How the closed form of `"glm"` comes from Gaussian logits to probabilities. None:
                what `tune` found (`la.link`), else `"pairwise"` for up to 100 classes and
                `"probit"` for more, for further positions and for single labels. `"pairwise"`: the
                mean-field softmax of the whole covariance (Lu et al., 2020). `"probit"`: the
                softmax of the logits, each shrunk by its variance (MacKay, 1992). `"exact"`: the
                expected softmax, by 128 Sobol points. A `Link` has a temperature besides.
            positions: Which positions of outputs `[B, T, C]`, all if None: one, for batch shape
                `[B]`, or several, `[p]` or `[B, p]`, for batch shape `[B, p]`. Negative ones count
                from the last position that an `attention_mask` does not call padding.

        Returns:
            `Categorical`, `Bernoulli`, `Independent(Bernoulli)` for several labels (`.mean` are
            their probabilities) or `MultivariateNormal`, which includes the noise σ².

        Raises:
            ValueError: For an unknown method or link, samples below 1, samples of a method that
                has none, or a link where there is no closed form; outputs that are not finite, or
                too many to differentiate; positions that the outputs do not have, or of padding.
            TypeError: If positions are not integers.
            RuntimeError: Before a fit, if anything that the model's checkpoint holds has changed
                since, or under autocast.
        """
        how = Prediction(method, samples, generator, positions)
        chosen = how.link(link, self.likelihood)
        return predictive.predict(self._unchanged_state, x, how, chosen)

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
        a tensor of Q probabilities `[Q, 1, 1]` gives `[Q, B, C]`.

        In closed form it is a `Normal`; with samples the equal mixture of the S normals p(y | f_s),
        noise included.

        Args:
            x: Inputs, `[B, ...]`.
            method: As `predict`.
            samples: As `predict`.
            generator: As `predict`.
            positions: As `predict`.

        Raises:
            TypeError: If the likelihood is none of a regression; as `predict`.
            ValueError: As `predict`.
            RuntimeError: As `predict`.
        """
        how = Prediction(method, samples, generator, positions)
        return predictive.marginals(self._unchanged_state, x, how)

    # ------------------------------------------------- tuning and evaluation

    @together("tune")
    def tune(
        self,
        loader: Batches | None = None,
        metric: str = "nll",
        grid: Float[Tensor, " grid"] | Sequence[float] | None = None,
        method: str = "grid",
        progress: bool = False,
        generator: torch.Generator | None = None,
        *,
        sigma: bool | None = None,
        link: str | Link | None = None,
        per: str | None = None,
    ) -> tuning.Tuning:
        """Find the prior precision, link and temperature that are best on held-out data; set them.

        The first pass is over a wide grid, 1e-4 to 1e8, by all links and temperatures. Another link
        than the default, or a temperature other than 1, is taken only from 100 examples on, and if
        it is better by more than a standard error of the difference, paired over the examples.
        Where the best one's neighbours are worse by more than a standard error, a second pass
        divides the intervals to them by 8. `.flat`, `.notes` and `.message` tell how sharp the
        optimum is; `.compared` how far the network, temperature scaling and other links are from
        the best of the grid.

        Args:
            loader: Held-out batches `(x, y)`. One pass serves a whole grid.
            metric: `"nll"`, `"ece"`, `"brier"` or `"accuracy"` of the `"glm"` predictive; of
                several labels the NLL is summed over those of an example, the others are over all.
            grid: The only prior precisions to try; None for the default, which is refined.
            method: `"marglik"` is an older name of `tune_evidence(sigma=, per=)`.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation; torch's global one if None.
            sigma: Tune the noise of a regression, too, and set it. If None, a sigma that was never
                given is tuned, unless a `grid` is given. For each prior precision the best one has
                a closed form (`metric="nll"`, no `grid`, not with `fisher="empirical"`); one per
                output is multiplied by a common factor.
            link: A formula to look at alone, at all temperatures, or a `Link`; None for the default
                and the probit.
            per: As `tune_evidence`, for that method.

        Returns:
            The best value, the metric there, and `.table` with every value tried by the link that
            was chosen, `.link`; `.sigma` if it was tuned.

        Raises:
            ValueError: For an unknown method, metric or link, a grid that is empty or not positive,
                an empty loader or one whose targets are all ignored; for `sigma` with another
                likelihood, or residuals of zero; for an argument that the method does not use.
            RuntimeError: Before a fit.
        """
        self._agree(metric=metric, grid=grid, method=method, sigma=sigma, link=link, per=per)
        if method == "marglik":
            of_data = (loader, grid, generator, link)
            if progress or metric != "nll" or any(given is not None for given in of_data):
                raise ValueError(
                    'method="marglik" uses neither a loader, a generator, a grid, a link, progress '
                    "nor a metric."
                )
            return self._tune_evidence(sigma, per)
        if method != "grid":
            raise ValueError(f"Unknown method={method!r}: use 'grid' or 'marglik'.")
        if loader is None:
            raise ValueError("tune needs held-out data: pass a loader, or use tune_evidence().")
        if per is not None:
            raise ValueError(
                f"per={per!r} tunes by the marginal likelihood: use tune_evidence(per={per!r})."
            )
        found, fitted = tune.on_data(
            self._subject, self._state, loader, metric, grid, sigma, link, generator, progress
        )
        self._set_tuned(found, fitted)
        if found.link is not None:
            self.link = found.link
        return found

    @together("tune_evidence")
    def tune_evidence(self, *, sigma: bool | None = None, per: str | None = None) -> tuning.Tuning:
        """Find the prior precision with the largest marginal likelihood, set it and return it.

        No data is read. The link stays.

        Args:
            sigma: Tune the noise of a regression, too, and set it, as `tune` does. If None, a sigma
                that was never given is tuned. With `per` it is the best with one prior precision.
            per: One prior precision for each `"kind"` of layer (linear, convolution, embedding,
                normalisation, bias, other) or for each `"block"`; None for one. A group without
                curvature takes what is best for all together.

        Returns:
            The best value, the evidence there, and `.table` with every value tried.

        Raises:
            ValueError: If there is no optimum; for `sigma` with another likelihood, or residuals of
                zero; for `per` with a curvature that is one block.
            RuntimeError: Before a fit.
        """
        self._agree(sigma=sigma, per=per)
        return self._tune_evidence(sigma, per)

    def _tune_evidence(self, sigma: bool | None, per: str | None) -> tuning.Tuning:
        found, fitted = tune.by_evidence(self._state, sigma, per)
        self._set_tuned(found, fitted)
        return found

    def _set_tuned(self, found: tuning.Tuning, fitted: Fitted | None) -> None:
        if fitted is None:
            self.prior_precision = torch.tensor(found.prior_precision, dtype=torch.float64)
        else:
            self._adopt(fitted, precision=fitted.posterior.prior_precision)

    @together("evaluate")
    def evaluate(
        self,
        loader: Batches,
        ood: Mapping[str, Batches] | None = None,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        link: str | Link | None = None,
        intervals: bool = True,
        level: float = 0.95,
        score: str | None = None,
    ) -> Report:
        """Accuracy, NLL and calibration on labelled data; OOD detection by the uncertainty.

        Each metric has a confidence interval over the targets that count, taken as independent.

        Args:
            loader: Labelled batches `(x, y)`.
            ood: Out-of-distribution batches by name; their labels are ignored. Each gives
                `auroc_<name>` and the like (in-distribution = 0, OOD = 1).
            method: As `predict`.
            samples: As `predict`.
            generator: As `predict`; also seeds the order and augmentation of the loaders.
            progress: Show progress bars over the loaders.
            link: As `predict`.
            intervals: Whether to make confidence intervals.
            level: Coverage that they aim at; for regression also the probability of the
                predictive's own intervals, whose coverage and width are measured.
            score: Name of the score of `uncertainty(x).scores` by which OOD data are separated; by
                default the entropy of the predictive, of a regression its variance.

        Returns:
            The metrics by name, each a float with `.low` and `.high`, as `metrics.evaluate` has
            them; for several labels as `metrics.evaluate_multilabel`; for regression as
            `metrics.evaluate_regression`, with OOD detection by the variance. `metrics.compare`
            takes two of them.

        Raises:
            ValueError: As `predict`; for an empty loader or one whose targets are all ignored; for
                `ood` with a regression whose predictive is not normal; for a level that is not
                between 0 and 1; for a score that likelihood or method do not have, or without
                `ood`.
        """
        check_is(ood, "ood", Mapping, type(None))
        options = {"samples": samples, "link": link, "level": level, "score": score}
        self._agree(ood=list(ood or ()), method=method, **options)
        if score is not None and not ood:
            raise ValueError(f"score={score!r} is for out-of-distribution data: give `ood`, too.")
        self._state.check_model()
        check_held_out(loader, *(ood or {}).values())

        def predict(x: Inputs) -> Distribution:
            return self.predict(x, method, samples, generator, link=link)

        def scored(x: Inputs) -> Tensor:
            scores = self.uncertainty(x, method, samples, generator).scores
            if score is None or score not in scores:
                there = ", ".join(scores) or "none"
                raise ValueError(f"There is no score={score!r} of these predictions; use {there}.")
            return scores[score]

        def batches(data: Batches) -> Batches:
            return self._subject.stream(data, generator, "evaluate" if progress else None)

        return evaluate_predictions(
            predict,
            self.likelihood,
            batches(loader),
            {name: batches(data) for name, data in (ood or {}).items()},
            self._settings.class_dim,
            intervals=intervals,
            level=level,
            score_of=None if score is None else scored,
        )

    def uncertainty(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        positions: Positions | None = None,
    ) -> Uncertainty:
        """Total, aleatoric and epistemic uncertainty of each input.

        Of class probabilities they are the entropy of the predictive, the mean entropy over samples
        of the parameters, and their mutual information (BALD), in nats, from draws; of several
        labels summed over them. Of a regression they are variances of each target in its squared
        units: with `method="glm"` and no `samples` in closed form, else from draws.

        Args:
            x: Inputs, `[B, ...]`.
            method: `"glm"`, `"glm-mc"` or `"nn"`, as `predict`.
            samples: Draws; 100 if None.
            generator: For the draws; torch's global one if None.
            positions: As `predict`.

        Returns:
            The three, of the predictive's batch shape `[B]`; of a regression `[B, C]`. Of class
            probabilities `.scores` has further ones by name: `entropy`, `max_probability` (not of
            several labels) and `mutual_information`; with `method="glm"` also `variance` (of the
            logits, without their common part) and `instability` (the log-probability of another
            decision), of classes `energy` and `max_logit`.

        Raises:
            ValueError: For `method="map"`, which has no uncertainty about the parameters; as
                `predict`.
            TypeError: As `predict`.
            RuntimeError: As `predict`.

        Reference:
            Houlsby, Huszár, Ghahramani, Lengyel. Bayesian active learning for classification and
            preference learning. 2011.
        """
        how = Prediction(method, samples, generator, positions)
        how.check_uncertain()
        return predictive.uncertainty(self._unchanged_state, x, how)

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
            positions: As `predict`, for outputs `[B, T, C]`.

        Returns:
            The part that is kept, and the error with its interval; `.message` says it in words.

        Raises:
            ValueError: For a curvature other than `"kfac"` and `"ekfac"`, fewer than two inputs, or
                an error that is not positive; as `functional`.
            RuntimeError: As `predict`.
        """
        fitted, found = thinned(self._unchanged_state, x, error, positions)
        self._adopt(fitted)
        return found

    # -------------------------------------------------------------- on disk

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
                `own_likelihood`; if its `options` are not plain data, or the negative
                log-likelihood is not finite.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder or a device or may not be written; if the disk is full.
                What was there before is still there.
        """
        file.save(Path(path), self._unchanged_state, own_likelihood)

    def export(
        self,
        path: str | Path,
        example: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str | Link | None = None,
    ) -> None:
        """Write the predictive as a program that runs without this package, atomically.

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
            method: `"glm"`: the closed form, of a posterior over the last layer, an `nn.Linear`,
                with curvature `"kfac"`, `"ekfac"` or `"diag"`.
                `"nn"`: samples of the parameters through the network, of any posterior; the file
                holds them all, and the program gives the same numbers every time. Logits and mean
                are averages over the samples then.
            samples: Draws for `"nn"`, 100 if None.
            generator: For the draws; torch's global one if None.
            link: For `"glm"`, as `predict` takes it.

        Raises:
            NotImplementedError: If torch cannot trace the model for any number of examples, for
                `"glm"` with another posterior, for inputs that are no tensors, or for a likelihood
                of a user's class.
            ValueError: For another suffix, an unknown method or link, or an argument that the
                method does not use; as `predict`.
            RuntimeError: If the program does not give for the example what `predict` gives; as
                `predict`.
            OSError: As `save`.
        """
        state = self._unchanged_state
        export(state, Path(path), example, method, samples, generator, link)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        backend: str = "auto",
        fisher: str = "exact",
        factor_dtype: torch.dtype = torch.float64,
        mc_samples: int = 1,
        memory_bound: int | None = None,
        batch: BatchHook | None = None,
    ) -> "Laplace":
        """Read a posterior that `save` wrote, for the same trained model.

        A file that was changed in any byte is refused, by its checksum. Of several processes each
        reads all of it.

        Args:
            path: The file.
            model: The model, with the parameters that it had at the fit.
            likelihood: An instance of the class of your own that the file names, with the `options`
                that the file has; None if the likelihood is one of this package.
            backend: For another fit, as the constructor takes it; likewise the next three.
            fisher: For another fit.
            factor_dtype: For another fit.
            mc_samples: For another fit.
            memory_bound: As the constructor takes it; likewise the next one.
            batch: How batches are read.

        Raises:
            ValueError: If the file is damaged, of another format, or does not fit the model; if
                `likelihood` is missing, superfluous or not that of the fit.
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If it is a folder.
            OSError: If it cannot be read.
        """
        saved = file.load(Path(path))
        saved.check_parameters(usable(model))
        la = cls(
            model,
            likelihood=likelihood_from_json(saved.header.likelihood, likelihood),
            **saved.choices(),
            backend=backend,
            fisher=fisher,
            factor_dtype=factor_dtype,
            mc_samples=mc_samples,
            memory_bound=memory_bound,
            batch=batch,
        )
        fitted = saved.fitted(la._subject)
        posterior = fitted.posterior
        la._adopt(
            fitted,
            precision=posterior.prior_precision,
            temperature=posterior.temperature,
            given_mean=0.0 if posterior.prior_mean is None else posterior.prior_mean,
            link=fitted.link,
        )
        return la
