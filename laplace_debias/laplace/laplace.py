"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.kinds import FisherType
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood, likelihood_from
from laplace_debias.curvature.network.batches import Batches, BatchHook
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace import evidence, file, tune
from laplace_debias.laplace.curvature_config import CurvatureConfig
from laplace_debias.laplace.description import describe
from laplace_debias.laplace.export import export
from laplace_debias.laplace.fit import fit
from laplace_debias.laplace.fit_report import FitReport
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.linearised import OutputChoice, moments
from laplace_debias.laplace.laplace_torch_names import (
    CURVATURES,
    EQUIVALENTS,
    explain_laplace_torch_name,
    explains_laplace_torch_arguments,
)
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.model_spec import ModelSpec
from laplace_debias.laplace.modes import check_mode, scheme_of_mode
from laplace_debias.laplace.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.plan import Plan, plan_of
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.predictive import LinkedFit, PredictionMethod, default_link
from laplace_debias.laplace.predictor import Predictor
from laplace_debias.laplace.prior import (
    PriorMean,
    PriorPrecision,
    prior_mean_from,
    prior_precision_from,
)
from laplace_debias.laplace.schemes import CrossFit, Full, Scheme, Split
from laplace_debias.laplace.state import (
    FittedPosterior,
    Unfitted,
    checked_link,
    checked_temperature,
    initial_state,
)
from laplace_debias.laplace.thinning import Thinning, thinned
from laplace_debias.laplace.tuning import Tuning
from laplace_debias.system.ranks import current, together
from laplace_debias.system.shown import html_table, warn

# Held for the moment in which a state takes the place of another.
_EXCHANGE = threading.RLock()


class Laplace(Predictor):
    r"""A Laplace approximation of a trained network's posterior.

    The posterior is $N(\theta^*, P^{-1})$ with $P = \tfrac NT C + \mathrm{diag}(\delta)$: θ* the
    trained parameters, C the curvature of the mean loss, N the number of training examples, δ the
    prior precision and T the likelihood's temperature (Eq. 4 and 17 of Tatzel et al., 2025,
    "Debiasing mini-batch quadratics for applications in deep learning"). The model is not changed.

    Any number of threads may use one object. In a process group `fit`, `fit_batches`, `tune`,
    `evaluate` and `save` are called on all processes: each reads its part of the data
    (`ShardedBatches`) and ends with the whole posterior; see `alone` for one process on its own.
    With a `generator` a call is a function of it and of the data, and leaves torch's global
    generator alone.

    Args:
        model: A trained network in eval mode, from inputs `[B, ...]` to outputs `[B, C]`; a single
            output may be `[B]`.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"heteroscedastic"` (means and log-variances, `[B, 2C]`), `"binary"` (one logit),
            `"multilabel"` (targets 0 or 1, `[B, C]`), or a `Likelihood`.
        curvature: `"kfac"`, `"ekfac"` (its directions, exact curvature along each), `"diag"`,
            `"lowrank"` (leading eigenvectors of the whole matrix) or `"full"`.
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"supported"`
            (those of known layers), `"last_layer"` (the layer that returns the outputs, determined
            by the first `fit` unless the structure determines it; fast, and where
            docs/choosing.md advises to start), names, or a predicate `(name, parameter) -> bool`.
            Frozen parameters are never Bayesian. A parameter of no known layer has an exact block:
            dense up to 1,024 entries, diagonal above.
        prior_precision: δ, one number or one per block (see `block_names`).
        backend: `"backpack"`, `"hooks"`, or `"auto"`: BackPACK where it can. Both give the same.
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels drawn from the model) or
            `"empirical"` (the true labels).
        factor_dtype: In what curvature is summed and decomposed.
        sigma: Noise of `"regression"`: standard deviation, one number or one per output. If None,
            a fit assumes 1.0 for a single output, estimates the noise of each of several outputs
            by their residuals, and warns of it; `tune` tunes it.
        mc_samples: Labels an example for `fisher="mc"`.
        joint: Whether a layer's weight and bias make one block. Not of `"lowrank"` and `"full"`.
        sharing: How positions share a weight, `"expand"` or `"reduce"`: one for all, or a mapping
            from layers' paths. Of `"kfac"` and `"ekfac"`.
        rank: Directions of `"lowrank"`, 20 if None. Of `"kfac"` and `"ekfac"` those of each factor
            that are kept, a number or a share of the trace such as 0.99; the others share the mean
            of their curvature. With a number no matrix is made of a factor eight times as wide.
            None keeps all. Not of `mode="auto"`: see `thin`.
        memory_bound: Bytes of working memory for output gradients. Results do not depend on it.
            None for 128 MiB (2 GiB on a GPU), and up to 4 GiB where one example needs more.
        class_dim: Which dimension of the outputs has the classes: None or -1 for `[B, ..., C]`, 1
            for `[B, C, ...]`, which are then moved to the end.
        batch: A function from what loaders yield to `(inputs, targets)`. None reads pairs, and
            mappings and dataclasses with the targets under `labels`, `label`, `label_ids`,
            `targets`, `target` or `y`.
        temperature: T of the likelihood $p(D \mid \theta)^{1/T}$. Less than 1 is more certain.
        prior_mean: Mean of the prior: one number, or one per parameter `[D]`. It enters the
            marginal likelihood alone.

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

    # One state takes the place of another as a whole: other threads see either.
    _state: Unfitted | FittedPosterior
    # The parameters that the model's structure shows, which every fit checks on an example.
    _selected: ParameterBlocks | None = None
    # Determined by the outputs of the first example that a fit predicts.
    _default_link: Link | None = None

    @explains_laplace_torch_arguments
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
        rank: float | None = None,
        memory_bound: int | None = None,
        class_dim: int | None = None,
        batch: BatchHook | None = None,
        temperature: float = 1.0,
        prior_mean: PriorMean = 0.0,
    ) -> None:
        if curvature in CURVATURES:
            raise ValueError(
                f"curvature={curvature!r} is a name of laplace-torch. "
                f'Use curvature="{CURVATURES[curvature]}".'
            )
        config = CurvatureConfig(
            structure=curvature_structure(curvature, rank),
            fisher=FisherType(fisher, mc_samples),
            params=params,
            backend=backend,
            factor_dtype=factor_dtype,
            joint=joint,
            sharing=sharing,
            memory_bound=memory_bound,
        )
        if sharing != "expand" and not config.structure.has_factors:
            raise ValueError(
                f"sharing={sharing!r} is for Kronecker factors, and curvature={curvature!r} has "
                "none: leave it out."
            )
        if joint and config.structure.is_dense:
            raise ValueError(
                "joint=True makes one block of a layer's weight and bias, and "
                f"curvature={curvature!r} is one block of all parameters: leave it out."
            )
        spec = ModelSpec.checked(model, likelihood_from(likelihood, sigma), batch, class_dim)
        self._state = initial_state(
            spec,
            config,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
        )
        self._selected = self._state.parameters

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in EQUIVALENTS:
                raise AttributeError(explain_laplace_torch_name(name))
            return object.__getattribute__(self, name)

        def __call__(self, *_: Any, **__: Any) -> Any:
            """Raise a `TypeError` that names `predict`."""
            raise TypeError("la(x) is a call of laplace-torch. Use la.predict(x).")

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        lines = "".join(f"  {key}: {line}\n" for key, line in describe(self._state).items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        return html_table(describe(self._state).items())

    # ------------------------------------------------- fitting

    @explains_laplace_torch_arguments
    @together("fit")
    def fit(
        self,
        train_loader: Batches | Scheme,
        mode: str = "full",
        num_data: SupportsIndex | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        folds: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        """Fit the posterior's curvature; returns the object itself.

        Args:
            train_loader: Batches `(x, y)` of training data. Or a way to fit with its data, such as
                `Split(directions, magnitudes)`.
            mode: `"full"`: all batches. `"mini"`: the first batch alone, which is biased: for
                comparisons with the literature.
                `"debiased"`: directions from the first batch, magnitudes from the second (Eq. 9).
                `"crossfit"`: directions from the first batch, magnitudes out of fold. `"auto"`: as
                many examples, in random order, as standard deviations within 5 % of those of all
                the data take (`fit_report`; `Auto` for another tolerance or a budget).
            num_data: N, which the curvature is scaled to. If None, what a plain loader's sampler
                tells, or for `"full"` the number of examples seen.
            generator: Seeds the labels of `fisher="mc"` and the loader's order and augmentation;
                torch's global one if None.
            progress: Show a progress bar over the batches.
            folds: Of `"crossfit"`, 2 if None.
            resume: A folder of its own, in which the fit saves its sums once a minute. The same
                call on as many processes goes on from there, and ends with the same bits.

        Raises:
            ValueError: For data or a model that do not fit the likelihood, too few batches, a
                posterior that is larger than memory, an N that is not told, or not what the fit
                saw; if processes read the same data; for a `resume` of another fit, or whose
                loader's order cannot be told again.
            TypeError: For targets or inputs of the wrong dtype, `num_data` that is no integer.
            NotImplementedError: If torch cannot differentiate the forward pass, or the gradients of
                its examples cannot be told apart.
            RuntimeError: Under autocast.
            OSError: If the folder of `resume` cannot be written to.
        """
        self._agree(mode=mode, num_data=num_data, folds=folds, resume=resume)
        folder = None if resume is None else Path(resume)
        if isinstance(train_loader, Scheme):
            if mode != "full" or folds is not None:
                raise ValueError(
                    f"{type(train_loader).__name__}(...) says how to fit: leave out mode and folds."
                )
            scheme, mode = train_loader, train_loader.mode
            size = scheme.training_size(num_data)
        else:
            scheme, size = scheme_of_mode(
                self._state, train_loader, mode, num_data, generator, folder, folds
            )
        fitted = fit(
            self._state,
            self._selected,
            scheme,
            size,
            mode,
            generator=generator,
            resume=folder,
            progress=progress,
        )
        self._replace(fitted)
        return self

    @together("fit_batches")
    def fit_batches(
        self,
        directions: Batches,
        magnitudes: Batches | None = None,
        *,
        num_data: SupportsIndex | None = None,
        folds: int | None = None,
        generator: torch.Generator | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        """Fit with explicit data; returns the object itself, raises what `fit` raises.

        Args:
            directions: Batches `(x, y)` that give the eigenbases.
            magnitudes: Batches that the curvature along them is measured on; None for the same.
            num_data: N; the number of examples in `directions` and `magnitudes` if None (of
                `"diag"`, which has no directions, in `magnitudes` alone).
            folds: Cross-fit instead: magnitudes from `directions` itself, measured out of so many
                folds, at least two; no `magnitudes` then.
            generator: Seeds the labels of `fisher="mc"` and what loaders draw.
            resume: A folder to go on from, as `fit` takes it.
        """
        self._agree(num_data=num_data, folds=folds, resume=resume)
        if folds is not None and magnitudes is not None:
            raise ValueError("Cross-fitting takes its magnitudes from folds: pass no magnitudes.")
        scheme: Scheme = Full(directions)
        if magnitudes is not None:
            scheme = Split(directions, magnitudes)
        if folds is not None:
            scheme = CrossFit(directions, folds)
        size = scheme.training_size(num_data)
        folder = None if resume is None else Path(resume)
        fitted = fit(
            self._state,
            self._selected,
            scheme,
            size,
            scheme.mode,
            generator=generator,
            resume=folder,
        )
        self._replace(fitted)
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
            train_loader: The data of `fit`. Its first batch is read, so it must be re-iterable.
            mode: The mode of `fit`, and
            folds: its folds.

        Returns:
            The plan; `print` shows it as a table, `plan.check()` refuses what does not fit.

        Raises:
            ValueError: For an unknown mode, `folds` with another mode than `"crossfit"`, no batch,
                or a first batch that `fit` would refuse.
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
        check_mode(mode, folds)
        return plan_of(self._state, self._selected, train_loader, mode, folds)

    # ------------------------------------------------- choosing the prior

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
    ) -> Tuning:
        """Find the prior precision, link and temperature that are best on held-out data; set them.

        One pass is over a wide grid, four values a power of ten from 1e-4 to 1e8, by all links and
        temperatures. The best of all is taken, but of fewer than 100 examples, or if it is as good,
        the default link at temperature 1; beside another temperature the smallest prior precision
        that is as good. As good is what is worse by at most a quarter of the paired standard error.
        In blocks of 32,768 parameters or more those of nearly the same curvature share a weight,
        which is within 5 % for each (variances are within some 1e-4).

        Args:
            loader: Held-out batches `(x, y)`.
            metric: `"nll"` or `"brier"` of the `"glm"` predictive; of several labels the NLL is
                summed over those of an example, the Brier score is over all.
            grid: The only prior precisions to try; None for the default.
            method: `"marglik"` is an older name of `tune_evidence(sigma=, per=)`.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation; torch's global one if None.
            sigma: Tune the noise of a regression, too, and set it. If None, a sigma that was never
                given is tuned, unless a `grid` is given. For each prior precision the best one has
                a closed form (`metric="nll"`, no `grid`); one per output is multiplied by a
                common factor. Of `fisher="empirical"` no noise is tuned.
            link: A formula to look at alone, at all temperatures, or a `Link`; None for the default
                and the probit.
            per: For `method="marglik"`.

        Returns:
            The best value, the metric there, and `.table` with every value tried by the link that
            was chosen, `.link`; `.sigma` if it was tuned. `.flat`, `.notes` and `.message` tell how
            sharp the optimum is; `.compared` how far the network, temperature scaling and other
            links are from the best of the grid.

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
            return self.tune_evidence(sigma=sigma, per=per)
        if method != "grid":
            raise ValueError(f"Unknown method={method!r}: use 'grid' or 'marglik'.")
        if loader is None:
            raise ValueError("tune needs held-out data: pass a loader, or use tune_evidence().")
        if per is not None:
            raise ValueError(
                f"per={per!r} tunes by the marginal likelihood: use tune_evidence(per={per!r})."
            )
        found, fitted = tune.on_data(
            self._unchanged_fit, loader, metric, grid, sigma, link, generator, progress
        )
        delta = torch.tensor(found.prior_precision, dtype=torch.float64)
        if found.link is None:
            self._set(fitted=fitted, prior_precision=delta)
        else:
            self._set(fitted=fitted, prior_precision=delta, link=found.link)
        return found

    @together("tune_evidence")
    def tune_evidence(self, *, sigma: bool | None = None, per: str | None = None) -> Tuning:
        """Find the prior precision with the largest marginal likelihood, set it and return it.

        No data is read, and the link is kept. Prefer `tune` if data can be held out: in the study
        of docs/choosing.md the NLL was worse with `tune_evidence` on every problem.

        Args:
            sigma: Tune the noise of a regression, too, and set it. If None, a sigma that was never
                given is tuned. With `per` it is the best with one prior precision.
            per: One prior precision for each `"kind"` of layer (linear, convolution, embedding,
                normalisation, bias, other) or for each `"block"`; None for one. A group without
                curvature takes what is best for all together.

        Returns:
            The best value, the evidence there, and `.table` with every value tried.

        Raises:
            ValueError: If there is no optimum; after `thin`; for `sigma` with another likelihood,
                or residuals of zero; for `per` with a curvature that is one block.
            RuntimeError: Before a fit.
        """
        self._agree(sigma=sigma, per=per)
        found, fitted = evidence.by_evidence(self._fitted, sigma, per)
        deltas = torch.tensor(found.prior_precision, dtype=torch.float64)
        self._set(fitted=fitted, prior_precision=deltas)
        return found

    # ------------------------------------------------- attributes

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
        report = self._fitted.report
        if report is None:
            raise RuntimeError(
                'Only a fit with mode="auto" has a report, and files do not hold it.'
            )
        return report

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
        if self._fitted.thinned_at is not None:
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

    # ------------------------------------------------- files

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
        file.save(Path(path), self._unchanged_fit, own_likelihood)

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
        la = cls.__new__(cls)
        la._state = file.load(
            Path(path),
            model,
            likelihood,
            backend,
            FisherType(fisher, mc_samples),
            factor_dtype,
            memory_bound,
            batch,
        )
        la._selected = la._state.parameters
        return la

    # ------------------------------------------------- state

    @property
    def _states(self) -> list[Unfitted | FittedPosterior]:
        return [self._state]

    def _agree(self, **arguments: Any) -> None:
        """Require the processes that make a call together to make it alike."""
        ranks = current()
        if ranks.size > 1:
            ranks.require_same(made=lambda: str(self), settings=self._state.config, **arguments)

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
        """The fitted state, of a model that is what it was at the fit."""
        fitted = self._fitted
        fitted.check_unchanged()
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

    def _linked_fits(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[LinkedFit]:
        fitted = self._unchanged_fit
        link = link or fitted.link
        if method.is_closed and link is None:
            link = self._default_link or default_link(fitted, x)
            self._default_link = link
        return [LinkedFit(fitted, link)]
