"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.likelihoods import Likelihood, likelihood_from
from laplace_debias.curvature.network.batch_reader import BatchHook
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace.description import describe
from laplace_debias.laplace.fitting.fit import fit
from laplace_debias.laplace.fitting.modes import check_mode, scheme_of_mode
from laplace_debias.laplace.fitting.plan import Plan, plan_fit
from laplace_debias.laplace.fitting.schemes import CrossFit, Full, Scheme, Split
from laplace_debias.laplace.fitting.update import update
from laplace_debias.laplace.functional.context import OutputChoice
from laplace_debias.laplace.functional.differentiable import differentiable_moments
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.gaussian_prior import GaussianPrior
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.prediction.predictive import LinkedFit, PredictionMethod, default_link
from laplace_debias.laplace.prediction.predictor import Predictor
from laplace_debias.laplace.saving import file, pretrained
from laplace_debias.laplace.saving.export import export
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fit_report import FitReport
from laplace_debias.laplace.state.fitted import (
    FittedPosterior,
    Unfitted,
    checked_link,
    checked_temperature,
    initial_state,
)
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.state.prior import (
    PriorMean,
    PriorPrecision,
    prior_mean_from,
    prior_precision_from,
)
from laplace_debias.laplace.thinning import Thinning, thin_posterior
from laplace_debias.laplace.tuning import evidence, tune
from laplace_debias.laplace.tuning.result import Tuning
from laplace_debias.laplace.wrong_names import (
    CURVATURES,
    EQUIVALENTS,
    explain_laplace_torch_name,
    explains_laplace_torch_arguments,
)
from laplace_debias.metrics import Report
from laplace_debias.system.checks import check_extra, check_is, whole
from laplace_debias.system.ranks import collective, process_group, refuse_ranks
from laplace_debias.system.shown import html_table, warn

# Held for the moment in which a state takes the place of another.
_EXCHANGE = threading.RLock()


class Laplace(Predictor):
    r"""A Laplace approximation of a trained network's posterior.

    The posterior is $N(\theta^*, P^{-1})$ with $P = \tfrac NT C + \mathrm{diag}(\delta)$: θ* the
    trained parameters, C the curvature of the mean loss, N the number of training examples, δ the
    prior precision and T the likelihood's temperature (Eq. 4 and 17 of Tatzel et al., 2025,
    "Debiasing mini-batch quadratics for applications in deep learning"). The model is not changed.

    Any number of threads may use one object. In a process group, call `fit`, `fit_batches`, `tune`,
    `evaluate` and `save` on all processes: each reads its share of the data (`ShardedBatches`) and
    ends with the whole posterior; see `alone` for a call on one process. With a `generator`, a call
    depends only on it and on the data, and leaves torch's global generator as it was.

    Args:
        model: A trained network in eval mode, from inputs `[B, ...]` to outputs `[B, C]`; a single
            output may be `[B]`.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"heteroscedastic"` (means and log-variances, `[B, 2C]`), `"binary"` (one logit),
            `"multilabel"` (targets 0 or 1, `[B, C]`), `"poisson"` (counts, outputs are logarithms
            of rates), or a `Likelihood`.
        curvature: `"kfac"`, `"ekfac"` (K-FAC's directions with the exact curvature along each),
            `"diag"`, `"lowrank"` (leading eigenvectors of the whole matrix), `"full"`, or `"gp"`
            (the same posterior in function space, from kernels between inputs; see `inducing`).
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"supported"`
            (those of supported layers), `"last_layer"` (the layer that the outputs come from, which
            the first `fit` determines; faster, see docs/choosing.md), names, or a predicate
            `(name, parameter) -> bool`. Frozen parameters are never Bayesian. A parameter of a
            layer that is not supported has an exact block, which is dense up to 1,024 entries and
            diagonal above.
        prior_precision: δ, one number or one per block (see `block_names`).
        backend: `"backpack"`, `"hooks"`, or `"auto"`, which uses BackPACK where it can, except for
            convolutions on a processor. The factors are the same.
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels sampled from the model),
            `"signs"` (columns of the loss Hessian's root, added up with random signs) or
            `"empirical"` (the true labels). `"mc"` and `"signs"` are unbiased estimates of
            `"exact"` that need one backward pass; `"signs"` has less noise if the network is
            confident, and none for a single output.
        factor_dtype: The dtype in which curvature is summed and decomposed.
        sigma: Noise of `"regression"`: standard deviation, one number or one per output. If None,
            a fit warns, and assumes 1.0 for a single output or estimates the noise of each of
            several outputs from their residuals; `tune` then scales it.
        mc_samples: Labels, or sums with random signs, per example for `fisher="mc"` and `"signs"`.
        joint: Whether a layer's weight and bias make one block. Not for `"lowrank"`, `"full"` and
            `"gp"`.
        sharing: How positions share a weight, `"expand"` or `"reduce"`: one for all, or a mapping
            from layers' paths. Only for `"kfac"` and `"ekfac"`.
        rank: For `"lowrank"` the number of directions, 20 if None. For `"kfac"` and `"ekfac"` how
            many directions of each factor are kept, as a number or as a fraction of the trace such
            as 0.99; the others share the mean of their curvature. With a number, a factor that is
            eight times as wide is never formed as a matrix. None keeps all directions. Cannot be
            combined with `mode="auto"`; see `thin`.
        inducing: For `"gp"` how many examples of the data span the directions, or the inputs
            themselves, a tensor `[M, ...]`; None for all examples.
        independent_outputs: For `"gp"`, whether each output has a Gaussian process of its own, with
            the kernel and the loss Hessian's diagonal entry of this output. Different outputs then
            have no covariance, and parameters cannot be sampled. The kernels are smaller, but the
            data are read once per output.
        memory_bound: Bytes of working memory for output gradients. Results do not depend on it.
            None for 128 MiB (2 GiB on a GPU), and up to 4 GiB where one example needs more.
        class_dim: The dimension of the outputs that holds the classes: None or -1 for
            `[B, ..., C]`, 1 for `[B, C, ...]`, which is then moved to the end.
        batch: A function from what loaders yield to `(inputs, targets)`. None reads pairs, and
            mappings and dataclasses with the targets under `labels`, `label`, `label_ids`,
            `targets`, `target` or `y`.
        temperature: T of the likelihood $p(D \mid \theta)^{1/T}$. Less than 1 is more certain.
        prior_mean: Mean of the prior: one number, or one per parameter `[D]`. It only affects the
            marginal likelihood.
        prior: Instead of both, a `GaussianPrior`: one precision per parameter, or an earlier
            posterior by `posterior_as_prior`. `fit` then adds all of the data to it, and
            `prior_precision` is the part that all parameters share.

    Raises:
        ValueError: For an unknown name, `sharing` or `joint` with a curvature that does not use it,
            a prior precision that is not positive, a model that holds NaN, or one with dropout or
            batch normalisation in training mode.
        NotImplementedError: For BackPACK with a model that it does not support.

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
        inducing: int | Tensor | None = None,
        independent_outputs: bool = False,
        memory_bound: int | None = None,
        class_dim: int | None = None,
        batch: BatchHook | None = None,
        temperature: float = 1.0,
        prior_mean: PriorMean = 0.0,
        prior: GaussianPrior | None = None,
    ) -> None:
        if curvature in CURVATURES:
            raise ValueError(
                f"`curvature={curvature!r}` is the name in laplace-torch, but this library "
                f'uses another one. Use `curvature="{CURVATURES[curvature]}"`.'
            )
        config = CurvatureConfig(
            structure=curvature_structure(curvature, rank, inducing, independent_outputs),
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
                f"`sharing={sharing!r}` applies only to Kronecker factors, which "
                f"`curvature={curvature!r}` does not have. Remove `sharing=`."
            )
        if joint and config.structure.is_dense:
            raise ValueError(
                "`joint=True` combines a layer's weight and bias in one block, but "
                f"`curvature={curvature!r}` already puts all parameters in one block. "
                "Remove `joint=`."
            )
        spec = ModelSpec.checked(model, likelihood_from(likelihood, sigma), batch, class_dim)
        self._state = initial_state(
            spec,
            config,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
        )
        if prior is not None:
            check_is(prior, "prior", GaussianPrior)
            if torch.as_tensor(prior_precision).ne(1).any() or prior_mean != 0.0:
                raise ValueError(
                    "`prior=` already contains a precision and a mean. Remove `prior_precision=` "
                    "and `prior_mean=`."
                )
            self._state = _with_prior(self._state, prior)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in EQUIVALENTS:
                raise AttributeError(explain_laplace_torch_name(name))
            return object.__getattribute__(self, name)

        def __call__(self, *_: Any, **__: Any) -> Any:
            """Raise a `TypeError` that names `predict`."""
            raise TypeError("`la(x)` is the syntax of laplace-torch. Use la.predict(x).")

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        lines = "".join(f"  {key}: {line}\n" for key, line in describe(self._state).items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        return html_table(describe(self._state).items())

    # ------------------------------------------------- fitting

    @explains_laplace_torch_arguments
    @collective("fit")
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
        """Fit the posterior to training data, and return `self`.

        The model's parameters stay as they are: they are the mean. The fit computes the curvature
        of the loss at them, which with the prior is the precision. `tune` then chooses the prior.

        Args:
            train_loader: Batches `(x, y)`, or a fitting scheme such as
                `Split(directions, magnitudes)`.
            mode: How much data to use.
                `"full"`: every batch.
                `"auto"`: randomly ordered examples until the standard deviations of the outputs are
                estimated to be within 5 % of a full fit; see `fit_report`, and `Auto` for other
                limits.
                `"crossfit"`: the first batch, split into folds.
                `"debiased"`: eigenvectors from the first batch, curvature from the second (Eq. 9).
                `"mini"`: only the first batch. Biased; provided for comparison.
            num_data: Number of training examples N. By default it is inferred from the loader's
                sampler or, with `mode="full"`, counted.
            generator: Makes the fit reproducible: seeds sampled labels (`fisher="mc"`), shuffling
                and torch-based augmentation. None for torch's global generator.
            progress: Show a progress bar over the batches.
            folds: Number of folds for `"crossfit"`; 2 by default.
            resume: Folder for checkpoints, written once a minute. Repeating the same call on as
                many processes continues from the last checkpoint, and gives a bit-identical result.

        Raises:
            ValueError: If data and likelihood do not match, there are too few batches, N cannot be
                inferred or differs from what was read, the posterior does not fit into memory,
                processes read the same data, or `resume` belongs to a different fit or needs
                batches that cannot be read again in the same order.
            TypeError: If inputs or targets have the wrong dtype, or `num_data` is not an integer.
            NotImplementedError: If torch cannot differentiate the forward pass, or the gradients of
                examples cannot be separated.
            RuntimeError: If called under autocast.
            OSError: If the folder of `resume` cannot be written to.
        """
        self._agree(mode=mode, num_data=num_data, folds=folds, resume=resume)
        folder = None if resume is None else Path(resume)
        if isinstance(train_loader, Scheme):
            if mode != "full" or folds is not None:
                raise ValueError(
                    f"{type(train_loader).__name__}(...) already defines the mode. Remove "
                    "`mode=` and `folds=`."
                )
            scheme = train_loader
            size = scheme.training_size(num_data)
        else:
            scheme, size = scheme_of_mode(
                self._state,
                train_loader,
                mode,
                num_data=num_data,
                generator=generator,
                resume=folder,
                folds=folds,
            )
        fitted = fit(
            self._state,
            scheme,
            size,
            generator=generator,
            resume=folder,
            progress=progress,
        )
        self._replace(fitted)
        return self

    @collective("fit_batches")
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
        """Fit to a list of batches, and return `self`.

        Args:
            directions: Batches `(x, y)` that give the eigenvectors.
            magnitudes: Batches that the curvature along them is measured on; None for the same.
            num_data: N; if None, the number of examples in `directions` and `magnitudes` (for
                `"diag"`, which has no directions, only in `magnitudes`).
            folds: Cross-fit `directions` instead, in this many folds, at least two; without
                `magnitudes`.
            generator: Seeds the labels of `fisher="mc"` and what loaders draw.
            resume: A folder for checkpoints, as `fit` takes it.
        """
        self._agree(num_data=num_data, folds=folds, resume=resume)
        if folds is not None and magnitudes is not None:
            raise ValueError(
                "Cross-fitting computes the values of `magnitudes` from the folds. "
                "Remove `magnitudes=`."
            )
        scheme: Scheme = Full(directions)
        if magnitudes is not None:
            scheme = Split(directions, magnitudes)
        if folds is not None:
            scheme = CrossFit(directions, folds)
        size = scheme.training_size(num_data)
        folder = None if resume is None else Path(resume)
        fitted = fit(self._state, scheme, size, generator=generator, resume=folder)
        self._replace(fitted)
        return self

    @collective("update")
    def update(
        self,
        loader: Batches,
        num_data: SupportsIndex | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        r"""Add new training data to the posterior, and return `self`.

        The mean stays at θ*, and the precision grows by that of the new data,
        $P \leftarrow P + \tfrac{N_2}{T} C_2$. The size N, the loss in the marginal likelihood and
        files follow. The prior, the link and a regression's noise stay; `tune` again afterwards.

        How close this is to a fit to all data depends on the curvature:

        - `"diag"`, `"full"`: the same.
        - `"kfac"`: the same after `mode="full"`. The sum of two Kronecker products is approximated
          as a fit approximates the sum over examples: the factors G and A are averaged over all
          data, each by itself. With other modes the earlier factors are those that the fit
          estimated.
        - `"ekfac"`: the directions stay, and the curvature along each is that of all data.
        - `"lowrank"`: the leading directions of the earlier ones and the new data together.
        - `"gp"`: the same with these inducing inputs, which stay.

        Args:
            loader: Batches `(x, y)` of new examples, all of which are read.
            num_data: The number of examples that they stand for; counted if None.
            generator: Seeds sampled labels (`fisher="mc"`) and what the loader draws; see `fit`.
            progress: Show a progress bar over the batches.
            resume: Folder for checkpoints, written once a minute. Repeating the same call on the
                same earlier posterior continues from the last checkpoint; see `fit`.

        Raises:
            RuntimeError: Before a fit, or if the model has changed since.
            ValueError: After `thin`; for a `"kfac"` posterior from a file of an earlier version,
                which has no factors; if the new data do not use the same parameters. Otherwise this
                raises what `fit` raises. The posterior is then unchanged.
            NotImplementedError: For a curvature of your own class that defines no `update`.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from laplace_debias import Laplace
            >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
            >>> first, second = [(torch.randn(32, 2), torch.randint(3, (32,))) for _ in range(2)]
            >>> la = Laplace(model).fit([first]).update([second])
            >>> la.num_data
            64
        """
        self._agree(num_data=num_data, resume=resume)
        updated = update(
            self._unchanged_fit,
            loader,
            num_data,
            generator=generator,
            resume=None if resume is None else Path(resume),
            progress=progress,
        )
        self._replace(updated)
        return self

    def plan(
        self,
        train_loader: Batches,
        mode: str = "full",
        *,
        folds: int | None = None,
    ) -> Plan:
        """Estimate the memory and time of `fit`, within a factor of 1.5.

        The bytes of sums and of the posterior are counted from shapes; the memory of a batch and
        its time are measured on the first one. Nothing is fitted. In a process group, each process
        plans for itself.

        Args:
            train_loader: The data of `fit`. Its first batch is read, so it must be re-iterable.
            mode: The mode of `fit`.
            folds: The folds of `fit`.

        Returns:
            The plan. `print` shows it as a table; `plan.check()` raises an error if memory is
            insufficient.

        Raises:
            ValueError: For an unknown mode, `folds` with another mode than `"crossfit"`, no batch,
                or a first batch that `fit` would reject.
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
        return plan_fit(self._state, train_loader, mode=mode, folds=folds)

    # ------------------------------------------------- choosing the prior

    @collective("tune")
    def tune(
        self,
        loader: Batches | None = None,
        metric: str = "nll",
        grid: Float[Tensor, " grid"] | Sequence[float] | None = None,
        method: str = "grid",
        progress: bool = False,
        generator: torch.Generator | None = None,
        *,
        sigma: bool | str | None = None,
        link: str | Link | None = None,
        per: str | None = None,
    ) -> Tuning:
        """Choose prior precision, link and temperature on held-out data, and set them.

        One pass over `loader` scores every combination of 49 prior precisions (four per decade from
        1e-4 to 1e8), the candidate links, and 25 temperatures from 1/2 to 4. If only the last layer
        is Bayesian, it skips temperatures that are far from the best. The combination with the best
        score is used, with two exceptions in favour of simpler settings:

        - The default link at temperature 1 is kept if it scores within a quarter of a paired
          standard error of the best, and always if there are fewer than 100 examples.
        - If a temperature other than 1 is chosen, the smallest prior precision that scores equally
          well is used, so that the posterior still has an effect.

        In blocks of 32,768 parameters or more, parameters with nearly equal curvature (within 5 %)
        are treated together. This changes variances by about 1e-4.

        Args:
            loader: Held-out batches `(x, y)`, not used for training.
            metric: Score to minimise: `"nll"` or `"brier"` of the `"glm"` predictive. With several
                labels the NLL is summed over those of an example; the Brier score averages all.
            grid: Prior precisions to try instead of the default grid.
            method: `"marglik"` is an older name of `tune_evidence(sigma=, per=)`.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation; None for torch's global one.
            sigma: Whether to tune a regression's noise as well. By default it is tuned if you never
                set it, unless a `grid` is passed. For each prior precision the best noise has a
                closed form (`metric="nll"`, no `grid`); noises per output are multiplied by a
                common factor. `"per_output"` then also chooses the noise of each output, which
                minimises the NLL with the posterior as it is; a later `fit` measures the curvature
                at these noises. Not available for `fisher="empirical"`.
            link: Restrict the search to one link, by name (all temperatures) or as a `Link`.
            per: For `method="marglik"`.

        Returns:
            The chosen values and how they compare with the alternatives. `print(tuned)` explains
            the result in words; `tuned.compared` lists the network, temperature scaling and the
            other links, `tuned.table` every prior precision that was tried.

        Raises:
            ValueError: For an unknown method, metric or link, a grid that is empty or not positive,
                an empty loader or one whose targets are all ignored; for `sigma` with another
                likelihood, or residuals of zero; for an argument that the method does not use.
            RuntimeError: Before a fit.
        """
        self._agree(metric=metric, grid=grid, method=method, sigma=sigma, link=link, per=per)
        if method == "marglik":
            has_default = (
                not progress and metric == "nll" and loader is grid is generator is link is None
            )
            if not has_default:
                raise ValueError(
                    '`method="marglik"` does not use `loader`, `generator`, `grid`, `link`, '
                    "`progress` or `metric`. Remove them."
                )
            if isinstance(sigma, str):
                raise ValueError(
                    f"sigma={sigma!r} requires held-out data. Pass a loader, or sigma=True."
                )
            return self.tune_evidence(sigma=sigma, per=per)
        if method != "grid":
            raise ValueError(f"Unknown method={method!r}. Use 'grid' or 'marglik'.")
        if loader is None:
            raise ValueError("`tune` needs held-out data. Pass a loader, or use tune_evidence().")
        if per is not None:
            raise ValueError(
                f"`per={per!r}` requires the marginal likelihood. Use tune_evidence(per={per!r})."
            )
        tuning, fitted = tune.tune_on_data(
            self._unchanged_fit,
            loader,
            metric,
            grid,
            sigma=sigma,
            link=link,
            generator=generator,
            progress=progress,
        )
        delta = torch.tensor(tuning.prior_precision, dtype=torch.float64)
        if tuning.link is None:
            self._set(fitted=fitted, prior_precision=delta)
        else:
            self._set(fitted=fitted, prior_precision=delta, link=tuning.link)
        return tuning

    @collective("tune_evidence")
    def tune_evidence(self, *, sigma: bool | None = None, per: str | None = None) -> Tuning:
        """Choose the prior precision with the largest marginal likelihood, and set it.

        No data is read, and the link is kept. Prefer `tune` if data can be held out: in the study
        of docs/does-it-help.md the NLL of posteriors over all parameters was worse with
        `tune_evidence` on every problem.

        Args:
            sigma: Whether to tune a regression's noise as well. By default it is tuned if you never
                set it. With `per` it is the best noise for a single prior precision.
            per: Use one prior precision for each `"kind"` of layer (linear, convolution, embedding,
                normalisation, bias, other) or for each `"block"`; None for a single one. A group
                without curvature takes the value that is best for all together.

        Returns:
            The chosen value, the evidence there, and `.table` with every value that was tried.

        Raises:
            ValueError: If there is no optimum; after `thin`; for `sigma` with another likelihood,
                or residuals of zero; for `per` with a curvature that is one block.
            RuntimeError: Before a fit.
        """
        self._agree(sigma=sigma, per=per)
        check_is(sigma, "sigma", bool, type(None))
        tuning, fitted = evidence.maximise_evidence(self._fitted, sigma, per)
        deltas = torch.tensor(tuning.prior_precision, dtype=torch.float64)
        self._set(fitted=fitted, prior_precision=deltas)
        return tuning

    # ------------------------------------------------- attributes

    @property
    def model(self) -> nn.Module:
        """The trained model."""
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
        """Names of the curvature blocks, in the order of the per-block prior precisions.

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
        """A copy of the posterior mean θ*, the trained values of the Bayesian parameters, `[D]`."""
        return self.posterior.mean.clone()

    @property
    def num_data(self) -> int:
        """N, the number of training examples."""
        return self.posterior.num_data

    @property
    def fit_report(self) -> FitReport:
        """The estimated error of a fit with `mode="auto"`.

        Raises:
            RuntimeError: If the posterior is from another mode, or was loaded.
        """
        report = self._fitted.report
        if report is None:
            raise RuntimeError(
                'There is no report. Only a fit with `mode="auto"` creates a report, and '
                'the report is not saved to files. Fit with `mode="auto"`.'
            )
        return report

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """A copy of the prior precision δ. It can be set without a new fit.

        Warns:
            UserWarning: If it is set below that at which the posterior was thinned.
        """
        # So that `la.prior_precision *= 2` changes the prior by the setter only.
        return self._state.prior.precision.clone()

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        self._set(prior_precision=value)
        if isinstance(self._state, FittedPosterior):
            note = self._state.note_on_thinning(self._state.posterior.deltas())
            if note is not None:
                warn(note)

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """A copy of the prior mean, one number or `[D]`. It can be set without a new fit.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        first = self._state.spec.first_parameter(self._parameters.names)
        mean = self._state.prior.mean
        if mean is None:
            return first.new_zeros((), dtype=torch.float64)
        return mean.clone()

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        self._set(prior_mean=value)

    @property
    def temperature(self) -> float:
        """The temperature T of the likelihood. It can be set without a new fit."""
        return self._state.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._set(temperature=checked_temperature(value))

    @property
    def link(self) -> Link | None:
        """The link, which turns logits into probabilities; None selects the default link.

        `tune` sets it. It can also be set to a name or a `Link`, without a new fit.
        """
        return self._state.link

    @link.setter
    def link(self, value: str | Link | None) -> None:
        self._set(link=checked_link(value, self.likelihood))

    @property
    def sigma(self) -> Float[Tensor, "*outputs"]:
        """The standard deviation of a regression's noise: one number, or one per output.

        It can be set without a new fit if all outputs are multiplied by the same factor. After
        `tune(sigma="per_output")` it is that of the predictive; the curvature was measured at
        `likelihood.curvature_sigma`.

        Raises:
            AttributeError: If the likelihood is not `"regression"`.
            ValueError: If a value is set at which the curvature is not known.
        """
        sigma: Tensor | None = getattr(self.likelihood, "sigma", None)
        if sigma is None:
            raise AttributeError(
                '`sigma` exists only for `likelihood="regression"`, but the likelihood is '
                f'{self.likelihood}. Fit with `likelihood="regression"`.'
            )
        return sigma.clone()

    @sigma.setter
    def sigma(self, value: float | Sequence[float] | Tensor) -> None:
        likelihood = self.likelihood.with_sigma(value)
        with _EXCHANGE:
            if isinstance(self._state, FittedPosterior):
                self._state = evidence.with_noise(self._state, likelihood)
            else:
                spec = replace(self._state.spec, likelihood=likelihood)
                self._state = replace(self._state, spec=spec)

    # ------------------------------------------------- the posterior

    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw Bayesian parameters, `[n, D]`, in the model's order."""
        return self.posterior.sample(n, generator)

    @explains_laplace_torch_arguments
    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None
    ) -> Float[Tensor, ""]:
        r"""Compute the Laplace approximation of log p(D), in nats over all N examples.

        $-\tfrac1T\sum_n \ell_n + \log N(\theta^* \mid \mu, \delta^{-1}) + \tfrac D2\log 2\pi
        - \tfrac12\log\det P$, with every constant; T is the temperature and μ the prior's mean. If
        the fit read fewer than N examples, the first term is scaled up.

        Args:
            prior_precision: δ to evaluate at, differentiable; None for the current one.

        Warns:
            UserWarning: After `thin`, since the value is then a lower bound of that of the full
                posterior.
        """
        if self._fitted.thinned_at is not None:
            warn(
                "The posterior is thinned, so this value is a lower bound of its log marginal "
                "likelihood, and may be much too low. Compute it before `thin`, or load the "
                "posterior that was saved before `thin`."
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
        differentiable: bool = False,
    ) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "batch *covariance"]]:
        """Compute the mean and the covariance of the linearised network's outputs.

        They are exact for the posterior. A network with further positions, `[B, T, C]`, has a mean
        of that shape and a covariance of all `T·C` outputs of an example, `[B, T·C, T·C]`.

        Args:
            x: Inputs, `[B, ...]`.
            diagonal: Only compute variances, of the mean's shape, for much less work.
            outputs: Only some outputs: indices `[B, k]` into the flattened outputs of each example,
                or a number k for the k largest; mean `[B, k]`, covariance `[B, k, k]`.
            joint: Also compute the covariance between inputs, `[B, C, B, C]`: entry `[n, i, m, j]`
                is the covariance of output i at input n and output j at input m.
            positions: Only some positions of outputs `[B, T, C]`, as in `predict`: the mean is
                `[B, p, C]` (`[B, C]` for one). `outputs` are then those at each position.
            differentiable: Whether gradients flow back to the inputs. It can only be combined
                with `joint`; the Jacobians of all inputs are kept, `[B, C, D]`.

        Raises:
            ValueError: If the inputs or outputs are not finite, or of the wrong rank; if `outputs`
                or `positions` do not exist; if the memory bound is too small, or there are too many
                outputs; for `joint` with `diagonal`, or `differentiable` with another option.
            TypeError: If inputs have the wrong type or dtype.
            RuntimeError: Before a fit, if the model has changed since, or under autocast.
        """
        if joint and diagonal:
            raise ValueError(
                "`diagonal=True` computes variances, but `joint=True` computes covariances "
                "between inputs. Remove one of them."
            )
        state = self._fitted
        if differentiable:
            if diagonal or outputs is not None or positions is not None:
                raise ValueError(
                    "`differentiable=True` always computes the mean and the covariance of "
                    "all outputs, so it cannot be restricted to some of them. Remove "
                    "`diagonal=`, `outputs=` and `positions=`."
                )
            return differentiable_moments(state, x, joint)
        if joint:
            return joint_moments(state, x, outputs, positions)
        mean, covariances = moments(
            state, x, diagonal=diagonal, outputs=outputs, positions=positions
        )
        return mean, covariances[0]

    def sample_outputs(
        self,
        x: Inputs | Record,
        n: int,
        method: str = "glm",
        generator: torch.Generator | None = None,
        *,
        joint: bool = False,
        positions: Positions | None = None,
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw samples of the outputs, `[n, B, ..., C]`: logits, or means of regression targets.

        They have the mean and covariance of `functional`: neither the link's temperature nor the
        noise of a regression is in them. Samples of targets come from `predict(x).sample((n,))`.

        Args:
            x: Inputs, `[B, ...]`, as `predict` takes them.
            n: Number of samples.
            method: `"glm"`: from the Gaussian of the linearised network's outputs. `"glm-mc"`: the
                linearised network at `n` samples of the parameters. `"nn"`: the network itself at
                `n` samples of the parameters. The last two are joint samples over all inputs.
            generator: Seeds the draws; None for torch's global generator.
            joint: For `"glm"`, whether a sample is one function at all inputs, as for Thompson
                sampling; otherwise the samples at different inputs are independent. The covariance
                of all outputs at all inputs is then decomposed, `[B·C, B·C]`.
            positions: Which positions; see `predict`.

        Raises:
            ValueError: For `"map"`, which has no samples; also what `functional` raises.
            RuntimeError: Before a fit, if the model has changed since, or under autocast.
        """
        whole(n, "n")
        if method == "map":
            raise ValueError(
                '`method="map"` is the trained network, which has no samples. Use "glm", "glm-mc" '
                'or "nn".'
            )
        sampled = PredictionMethod(method, n, generator, positions)
        fit = LinkedFit(self._fitted, None)
        with torch.inference_mode(False):
            if not (joint and sampled.name == "glm"):
                return fit.draws(x, sampled)
            mean, covariance = joint_moments(fit.fitted, x, None, positions)
            size = mean.numel()
            covariance = covariance.reshape(1, size, size)
            return fit.draws_of_moments(mean.unsqueeze(0), covariance, sampled).squeeze(1)

    def marginals(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        positions: Positions | None = None,
    ) -> Distribution:
        """Return the predictive distribution of each regression target, with quantiles.

        Batch shape `[B, C]` for C targets. It has `.icdf(q)` and `.cdf(y)` in addition to `.mean`,
        `.variance` and `.log_prob(y)`: `la.marginals(x).icdf(torch.tensor(0.975))` is `[B, C]`, and
        a tensor of Q probabilities `[Q, 1, 1]` gives `[Q, B, C]`. In closed form it is a `Normal`;
        with samples it is the equal mixture of the S normals p(y | f_s), noise included.

        Args:
            x: Inputs, `[B, ...]`, as `predict` takes them.
            method: `"glm"`, `"glm-mc"`, `"nn"` or `"map"`; see `predict`.
            samples: Number of samples; None for the closed form.
            generator: Seeds the samples.
            positions: Which positions; see `predict`.

        Raises:
            TypeError: If the likelihood is not that of a regression. Otherwise this raises what
                `predict` raises.
        """
        prediction = PredictionMethod(method, samples, generator, positions)
        return LinkedFit(self._fitted, None).marginals(x, prediction)

    @torch.inference_mode(False)
    def thin(
        self, x: Inputs | Record, error: float = 1e-3, *, positions: Positions | None = None
    ) -> Thinning:
        r"""Compress the posterior: keep only the directions that affect predictions.

        Directions in which the data add little to the prior ($\tfrac NT\Lambda \ll \delta$) all
        have variance close to 1/δ. They need no stored eigenvectors; they are replaced by one
        shared curvature, their mean, so that the trace is unchanged. The memory and the saved file
        shrink accordingly.

        Half of `x` is used to find the smallest set of directions for which no output standard
        deviation changes by more than `error`; the other half is used to measure the actual change.

        Call it after tuning: for a smaller prior precision the error grows. The full posterior is
        discarded, so save it first if you may need it again. In a process group, pass the same `x`
        on every process.

        Args:
            x: A few dozen inputs, typical of those you will predict for, as `predict` takes them.
            error: Largest allowed relative change of an output's standard deviation.
            positions: Which positions of outputs `[B, T, C]`; see `predict`.

        Returns:
            The fraction that is kept, and the error with its interval; `.message` states it in
            words. From then on `tune` notes a smaller prior precision, `tune_evidence` raises an
            error, and `log_marginal_likelihood` warns.

        Raises:
            ValueError: For a curvature other than `"kfac"` and `"ekfac"`, fewer than two inputs, or
                an error that is not positive. Otherwise this raises what `functional` raises.
        """
        fitted, thinning = thin_posterior(self._unchanged_fit, x, error, positions)
        self._replace(fitted)
        return thinning

    # ------------------------------------------------- files

    @collective("save")
    def save(self, path: str | Path, *, own_likelihood: bool = False) -> None:
        """Write the fitted posterior as a safetensors file (no pickle), atomically.

        The model itself is not in the file. It has a checksum, and the same posterior gives the
        same bytes. An existing file is replaced once the new one is complete; a symbolic link
        stays, and the file that it points to is replaced. With several processes, the first one
        writes and the others wait for it.

        Args:
            path: The file, in a folder that exists.
            own_likelihood: Whether a likelihood of your own class may be saved by its import path
                and its `options`. The file holds no code, and `load` imports none: pass an instance
                to it.

        Raises:
            RuntimeError: Before a fit.
            ValueError: If the likelihood is an instance of your own class, unless `own_likelihood`;
                if its `options` are not plain data.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder or a device or may not be written; if the disk is full.
                An existing file is then unchanged.
        """
        file.save(Path(path), self._unchanged_fit, own_likelihood)

    @collective("save_pretrained")
    def save_pretrained(
        self,
        folder: str | Path,
        card: bool = True,
        *,
        evaluation: Report | None = None,
        own_likelihood: bool = False,
    ) -> None:
        """Write the posterior and a model card into a folder, which is created if needed.

        The posterior is the file `posterior.safetensors`, as `save` writes it. The card is
        `README.md`: what the posterior is, a table of its calibration, and how to load it. In a
        card that exists, of the network for instance, only the section on the posterior changes.

        Args:
            folder: The folder, such as that of the model's own `save_pretrained`.
            card: Whether to write the card.
            evaluation: Metrics for the card's table: what `la.evaluate(test_loader)` returns.
            own_likelihood: Whether a likelihood of your own class may be saved; see `save`.

        Raises:
            TypeError: If `evaluation` is something else.
            ValueError: For an `evaluation` without a card; also what `save` raises.
            NotADirectoryError: If the folder is a file.
        """
        self._check_card(card, evaluation)
        path = Path(folder)
        pretrained.check_folder(path)
        fitted = self._unchanged_fit
        if process_group().rank == 0:
            path.mkdir(parents=True, exist_ok=True)
        file.save(path / pretrained.POSTERIOR, fitted, own_likelihood)
        if card and process_group().rank == 0:
            pretrained.write_card(path, describe(fitted), evaluation)

    def push_to_hub(
        self,
        repository: str,
        card: bool = True,
        *,
        evaluation: Report | None = None,
        private: bool | None = None,
        token: str | None = None,
        message: str | None = None,
        own_likelihood: bool = False,
    ) -> str:
        """Upload the posterior and a model card to the Hugging Face Hub (extra `hub`).

        The files are those of `save_pretrained`. The repository is made if there is none. In a card
        that it has, only the section on the posterior changes.

        Args:
            repository: Its name, `"user/name"`.
            card: Whether to upload a card.
            evaluation: Metrics for the card's table: what `la.evaluate(test_loader)` returns.
            private: Whether a new repository is private; None for the default of the account.
            token: A token with the right to write; None for the one of `hf auth login`.
            message: The message of the commit.
            own_likelihood: Whether a likelihood of your own class may be saved; see `save`.

        Returns:
            The address of the repository.

        Raises:
            ImportError: If huggingface_hub is not installed.
            NotImplementedError: In a process group. Call it within `alone()` on one process.
            OSError: If the upload fails; also what `save_pretrained` raises.
        """
        check_extra("hub", "huggingface_hub")
        refuse_ranks("push_to_hub", "each process would upload the files")
        self._check_card(card, evaluation)
        self._unchanged_fit  # noqa: B018 (raises before a connection is made)
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if card:
                pretrained.download_card(folder, repository, token)
            self.save_pretrained(folder, card, evaluation=evaluation, own_likelihood=own_likelihood)
            return pretrained.push(
                folder, repository, private=private, token=token, message=message
            )

    @staticmethod
    def _check_card(card: bool, evaluation: Report | None) -> None:
        """Require that an evaluation is a report, for a card."""
        check_is(evaluation, "evaluation", Report, type(None))
        if evaluation is not None and not card:
            raise ValueError("`evaluation=` has no effect with `card=False`. Remove one of them.")

    def export(
        self,
        path: str | Path,
        example: Inputs | Record,
        *,
        link: str | Link | None = None,
    ) -> None:
        """Export the predictive distribution as a program that runs without this package.

        It is the closed form for a posterior over the last layer, an `nn.Linear`, with curvature
        `"kfac"`, `"ekfac"` or `"diag"`. The program includes the network. Call it as the model,
        with any number of examples. It returns tensors by name, with positions `[B, T, ...]` if the
        model has them:

        - `"probs"`: `[B, C]` for `"classification"` and `"multilabel"`, `[B]` for `"binary"`; with
          them `"logits"` and their `"variance"`, `[B, C]`;
        - for `"regression"` and `"heteroscedastic"` `"mean"` and `"variance"` `[B, C]` and
          `"covariance"` `[B, C, C]` of y, which include the noise;
        - for `"poisson"` `"mean"` and `"variance"` `[B, C]` of the counts;
        - for a likelihood of your own what its `exported` returns.

        `torch.export.load(path).module()(x)["probs"]` reads and calls it.

        Args:
            path: The file, in a folder that exists. Its suffix is `.pt2` for a program that torch
                runs, or `.onnx` for one that onnxruntime and others run (extra `onnx`).
            example: Inputs as `predict` takes them, one example or more. The program takes inputs
                of the same sizes, except for the number of examples.
            link: The link; see `predict`.

        Raises:
            NotImplementedError: If torch cannot trace the model for any number of examples, for
                another posterior, for inputs that are not tensors, for a likelihood of your own
                class, or if ONNX has no operator for a part of the program.
            ValueError: For another suffix, or an unknown link.
            RuntimeError: If the program returns something else than `predict` for the example.
            OSError: If the file cannot be written. Otherwise this raises what `predict` raises.
        """
        export(self._unchanged_fit, Path(path), example, link)

    @classmethod
    @torch.inference_mode(False)
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

        A file that was changed in any byte is rejected by its checksum. With several processes,
        each reads all of it.

        Args:
            path: The file.
            model: The model, with the parameters that it had at the fit.
            likelihood: An instance of your own class that the file names, with the `options` that
                the file holds; None if the likelihood is one of this package.
            backend: The backend of a later fit, as for `Laplace`.
            fisher: The Fisher matrix of a later fit.
            factor_dtype: The dtype of factors in a later fit.
            mc_samples: Labels per example in a later fit.
            memory_bound: Bytes of working memory, as for `Laplace`.
            batch: A function from batches to `(inputs, targets)`, as for `Laplace`.

        Raises:
            ValueError: If the file is damaged, of another format, or does not match the model; if
                `likelihood` is missing, superfluous or not that of the fit.
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If the path is a folder.
            OSError: If the file cannot be read.
        """
        fitted = file.load(
            Path(path),
            model,
            likelihood=likelihood,
            backend=backend,
            fisher=FisherType(fisher, mc_samples),
            factor_dtype=factor_dtype,
            memory_bound=memory_bound,
            batch=batch,
        )
        return cls.from_posterior(fitted)

    @classmethod
    def from_posterior(cls, fitted: FittedPosterior) -> "Laplace":
        """Make a `Laplace` from a posterior that was not fitted by `fit`."""
        la = cls.__new__(cls)
        la._state = fitted
        return la

    @classmethod
    def from_pretrained(
        cls,
        folder_or_repository: str | Path,
        model: nn.Module,
        *,
        revision: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> "Laplace":
        """Read a posterior from a folder or the Hugging Face Hub (needs the `hub` extra).

        Args:
            folder_or_repository: A folder that `save_pretrained` wrote, or the name `"user/name"`
                of a repository that `push_to_hub` wrote.
            model: The model, with the parameters that it had at the fit.
            revision: A branch, tag or commit of a repository.
            token: A token for a private repository; None for the one of `hf auth login`.
            **options: The other arguments of `load`.

        Raises:
            FileNotFoundError: If there is no such folder or repository, or no posterior in it.
            ImportError: For a repository, if huggingface_hub is not installed.
            ValueError: For a `revision` of a folder; also what `load` raises.
        """
        path = pretrained.posterior_file(str(folder_or_repository), revision, token)
        return cls.load(path, model, **options)

    # ------------------------------------------------- state

    @property
    def _states(self) -> list[Unfitted | FittedPosterior]:
        return [self._state]

    def _agree(self, **arguments: Any) -> None:
        """Require the processes that make a call together to make it alike."""
        ranks = process_group()
        if ranks.size > 1:
            ranks.require_same(made=lambda: str(self), settings=self._state.config, **arguments)

    @property
    def _fitted(self) -> FittedPosterior:
        """The fitted state.

        Raises:
            RuntimeError: Before a fit.
        """
        if not isinstance(self._state, FittedPosterior):
            raise RuntimeError("The posterior is not fitted yet. Call `fit(train_loader)` first.")
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
            prior = state.prior
            device = state.device
            if prior_precision is not None:
                prior = replace(prior, precision=prior_precision_from(prior_precision, device))
            if prior_mean is not None:
                prior = replace(prior, mean=prior_mean_from(prior_mean, device))
            if prior is not state.prior:
                fields["prior"] = prior
            self._state = state.changed(**fields)

    @property
    def _parameters(self) -> ParameterBlocks:
        """The Bayesian parameters.

        Raises:
            RuntimeError: Before the fit that finds the last layer.
        """
        if self._state.parameters is None:
            raise RuntimeError(
                '`params="last_layer"` finds the last layer of a '
                f"{type(self.model).__name__} by running the model on an example. This "
                "happens only in the first fit. Call `fit(train_loader)` first, or pass "
                "the names of the parameters, `params=[...]`."
            )
        return self._state.parameters

    def _linked_fits(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[LinkedFit]:
        fitted = self._fitted
        link = link or fitted.link
        if method.is_closed and link is None:
            link = default_link(fitted, x)
        return [LinkedFit(fitted, link)]


def _with_prior(state: Unfitted, prior: GaussianPrior) -> Unfitted:
    """Set a Gaussian prior, which names the parameters of a last layer that no fit has found yet.

    The first fit compares the names with those of the layer.
    """
    parameters = state.parameters
    if parameters is None:
        config = replace(state.config, params=list(prior.param_names))
        parameters = ParameterBlocks.selected(state.spec.plain_model, config, None)
    checked = prior.on(parameters, state.config.structure).to(state.device)
    checked = checked.fitting(len(parameters.block_names), parameters.size)
    return replace(state, parameters=parameters, prior=checked)
