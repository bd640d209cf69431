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

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.likelihoods import Likelihood, likelihood_from
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace.description import describe
from laplace_debias.laplace.fitting.fit import fit
from laplace_debias.laplace.fitting.mode_schemes import scheme_of_batches, scheme_of_mode
from laplace_debias.laplace.fitting.modes import check_mode
from laplace_debias.laplace.fitting.plan import Plan, plan_fit
from laplace_debias.laplace.fitting.schemes import Scheme
from laplace_debias.laplace.fitting.update import update
from laplace_debias.laplace.functional.context import OutputChoice
from laplace_debias.laplace.functional.differentiable import differentiable_moments
from laplace_debias.laplace.functional.gaussian_outputs import DenseOutputs
from laplace_debias.laplace.functional.joint import joint_moments
from laplace_debias.laplace.functional.linearised import moments
from laplace_debias.laplace.gaussian_prior import GaussianPrior, setup_with_prior
from laplace_debias.laplace.links import Link, SecondMoments, link_from
from laplace_debias.laplace.prediction.predictive import (
    NETWORK_METHODS,
    FitWithLink,
    PredictionMethod,
    default_link_of_fit,
)
from laplace_debias.laplace.prediction.predictor import Predictor
from laplace_debias.laplace.saving import file, pretrained
from laplace_debias.laplace.saving.export import export
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fit_report import FitReport
from laplace_debias.laplace.state.fitted import (
    FitSetup,
    FittedPosterior,
    checked_setup,
    checked_temperature,
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
from laplace_debias.laplace.tuning import evidence, noise, tune
from laplace_debias.laplace.tuning.result import TunedFit, Tuning
from laplace_debias.laplace.wrong_names import (
    CURVATURES,
    EXPLANATIONS,
    explains_wrong_arguments,
)
from laplace_debias.metrics import Report
from laplace_debias.system.checks import check_extra, check_is, whole
from laplace_debias.system.ranks import collective, process_group, refuse_ranks
from laplace_debias.system.shown import html_table, warn

# This lock is held only while one state replaces another.
_EXCHANGE = threading.RLock()


class Laplace(Predictor):
    r"""A Laplace approximation of a trained network's posterior.

    Wrap a trained network, call `fit` with its training data, and then `tune` with held-out data.
    `predict`, `uncertainty` and `evaluate` use the resulting posterior, and `save` writes it to a
    file. The network is not changed. Two arguments matter most: `likelihood` says what the outputs
    of the network mean, and `params` chooses between all parameters and only the last layer, which
    is faster.

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

    Args:
        model: A trained network in eval mode that maps inputs `[B, ...]` to outputs `[B, C]`, or to
            `[B]` if it has a single output.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"heteroscedastic"` (means and log-variances, `[B, 2C]`), `"binary"` (one logit),
            `"multilabel"` (targets 0 or 1, `[B, C]`), `"poisson"` (counts, outputs are logarithms
            of rates), or a `Likelihood`.
        sigma: For `"regression"`: the standard deviation of the noise in units of the targets, one
            number or one per output. If None, `fit` issues a warning, and then uses 1.0 for a
            single output or, for several outputs, estimates the noise of each output from the
            residuals. `tune` rescales this noise.
        temperature: T in the tempered likelihood $p(D \mid \theta)^{1/T}$. Values below 1 make the
            posterior narrower.
        class_dim: The dimension of the outputs that holds the classes: None or -1 for
            `[B, ..., C]`, or 1 for `[B, C, ...]`, in which case it is moved to the end.
        batch: A function that converts each item of a loader to `(inputs, targets)`. The default
            handles pairs, as well as mappings and dataclasses whose targets are under `labels`,
            `label`, `label_ids`, `targets`, `target` or `y`.
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"supported"`
            (parameters of supported layers), `"last_layer"` (the layer that produces the outputs,
            determined by the first `fit`; faster, see docs/choosing.md), a list of names, or a
            predicate `(name, parameter) -> bool`. Frozen parameters are never Bayesian. Parameters
            of unsupported layers get an exact curvature block: the full matrix for up to 1,024
            entries, or only its diagonal for more.
        curvature: `"kfac"`, `"ekfac"` (the eigenvectors of K-FAC, with the exact curvature along
            each of them), `"diag"`, `"lowrank"` (leading eigenvectors of the full matrix),
            `"full"`, or `"gp"` (the `"full"` posterior in function space, computed from kernels
            between inputs; approximate unless every example is an inducing input, see `inducing`).
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels sampled from the model),
            `"signs"` (the columns of a square root of the loss Hessian, summed with random signs)
            or `"empirical"` (the true labels). `"mc"` and `"signs"` are unbiased estimates of
            `"exact"` that need only one backward pass; `"signs"` is less noisy if the network is
            confident, and exact for a single output.
        mc_samples: The number of sampled labels (`fisher="mc"`) or sums with random signs
            (`"signs"`) per example.
        joint: Whether to treat the weight and the bias of a layer as one block. Not available for
            `"lowrank"`, `"full"` and `"gp"`.
        sharing: How to treat weights that are applied at several positions, as in a convolution:
            `"expand"` or `"reduce"`, or a mapping from the paths of layers to one of the two. Only
            for `"kfac"` and `"ekfac"`.
        rank: For `"lowrank"`: the number of directions. Default: 20. For `"kfac"` and `"ekfac"`:
            the number of eigenvectors to keep per factor, or the fraction of the trace to keep,
            such as 0.99; all other directions share their mean curvature. If `rank` is a number r,
            factors with at least 8 r rows are never formed as matrices. Default: all directions.
            Cannot be combined with `mode="auto"`; see `thin`.
        inducing: For `"gp"`: the number of training examples to use as inducing inputs, or these
            inputs as a tensor `[M, ...]`. Default: all examples.
        independent_outputs: For `"gp"`: whether each output has its own Gaussian process, with its
            own kernel and its own diagonal entry of the loss Hessian. The outputs are then
            uncorrelated, and parameters cannot be sampled. The kernels are smaller, but the data
            are read once per output.
        prior_precision: Prior precision δ: one number, or one per block (see `block_names`).
        prior_mean: Mean of the prior: one number, or one per parameter `[D]`. It only affects the
            marginal likelihood.
        prior: A `GaussianPrior` to use instead of `prior_precision` and `prior_mean`: one precision
            per parameter, or an earlier posterior (`posterior_as_prior`). `fit` adds the curvature
            of the data to its precision. `la.prior_precision` is then only the part of the
            precision that is common to all parameters.
        backend: How the Kronecker factors are computed: `"backpack"`, `"hooks"`, or `"auto"`, which
            uses BackPACK where possible, except for convolutions on a CPU. Both give the same
            factors.
        factor_dtype: The dtype in which the curvature is summed and decomposed.
        memory_bound: Limit on the working memory for output gradients, in bytes; it does not affect
            the results. Default: 128 MiB (2 GiB on a GPU), or up to 4 GiB if a single example needs
            more.

    Raises:
        ValueError: If a name is unknown, if `sharing` or `joint` is passed with a curvature that
            does not use it, if a prior precision is not positive, or if the model contains NaN or
            has dropout or batch normalisation in training mode.
        NotImplementedError: If BackPACK is chosen but does not support the model.

    The posterior is $N(\theta^*, P^{-1})$ with $P = \tfrac NT C + \mathrm{diag}(\delta)$ (Eq. 4 and
    17 of Tatzel et al., 2025, "Debiasing mini-batch quadratics for applications in deep learning").
    Here θ* are the trained parameters, C is the curvature of the mean loss, N is the number of
    training examples, δ is the prior precision, and T is the temperature of the likelihood.

    A `Laplace` object can be shared between threads. In a process group, call `fit`, `fit_batches`,
    `tune`, `evaluate` and `save` on all processes: each process reads its shard of the data
    (`ShardedBatches`) and ends up with the full posterior. To call one of them on a single process,
    see `alone`. If you pass a `generator`, the result depends only on this generator and the data,
    and torch's global generator is left unchanged.
    """

    # A state is always replaced as a whole, so other threads see either the old or the new state.
    _state: FitSetup | FittedPosterior

    @explains_wrong_arguments
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
        # `CurvatureConfig` accepts these combinations, because files written by earlier versions
        # contain them.
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
        setup = checked_setup(
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
            setup = setup_with_prior(setup, prior)
        self._state = setup

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in EXPLANATIONS:
                raise AttributeError(EXPLANATIONS[name])
            return object.__getattribute__(self, name)

        def __call__(self, *_: Any, **__: Any) -> Any:
            """Raise a `TypeError` that names `predict`."""
            raise TypeError("`la(x)` is the syntax of laplace-torch. Use la.predict(x).")

    def __repr__(self) -> str:
        """Summarise the model, likelihood, curvature, parameters, blocks, prior and fit."""
        lines = "".join(f"  {key}: {line}\n" for key, line in describe(self._state).items())
        return f"{type(self).__name__}(\n{lines})"

    def _repr_html_(self) -> str:
        return html_table(describe(self._state).items())

    # ------------------------------------------------- fitting

    @explains_wrong_arguments
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

        The model's parameters are the mean of the posterior and are not changed. The fit computes
        the curvature of the loss at these parameters, which together with the prior gives the
        posterior precision. Call `tune` afterwards to choose the prior precision. A new fit keeps
        the prior precision and the link of an earlier `tune`, so tune again.

        Args:
            train_loader: Batches `(x, y)`, or a fitting scheme such as
                `Split(directions, magnitudes)`.
            mode: How much data to use.
                `"full"`: every batch.
                `"auto"`: as many randomly ordered examples as it takes until the standard
                deviations of the outputs are estimated to be within 5 % of a full fit; see
                `fit_report` for the estimate, and `Auto` for other limits.
                `"crossfit"`: the first batch, split into folds. The curvature of each fold is
                measured along eigenvectors of the other folds.
                `"debiased"`: eigenvectors from the first batch, curvature from the second (Eq. 9).
                `"mini"`: only the first batch. Biased; provided for comparison.
            num_data: Number of training examples N. By default it is inferred from the loader's
                sampler or, with `mode="full"`, counted.
            generator: Makes the fit reproducible: it seeds sampled labels (`fisher="mc"`) or signs,
                shuffling, and augmentation that uses torch. Default: torch's global generator.
            progress: Show a progress bar over the batches.
            folds: Number of folds for `"crossfit"`. Default: 2.
            resume: Folder for checkpoints, which are written once a minute. To resume an
                interrupted fit, repeat the same call with the same number of processes; the result
                is bit-identical to an uninterrupted fit.

        Raises:
            ValueError: If data and likelihood do not match, there are too few batches, N cannot be
                inferred or differs from the number of examples read, the posterior does not fit
                into memory, several processes read the same data, or `resume` belongs to a
                different fit or needs batches that cannot be read again in the same order.
            TypeError: If inputs or targets have the wrong dtype, or `num_data` is not an integer.
            NotImplementedError: If torch cannot differentiate the forward pass, or the gradients of
                individual examples cannot be separated.
            RuntimeError: If called under autocast.
            OSError: If the folder of `resume` cannot be written to.
        """
        self._require_same(mode=mode, num_data=num_data, folds=folds, resume=resume)
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
                self._setup,
                train_loader,
                mode,
                num_data=num_data,
                generator=generator,
                resume=folder,
                folds=folds,
            )
        fitted = fit(
            self._setup,
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
        """Fit the posterior to given batches, and return `self`.

        Args:
            directions: Batches `(x, y)` from which the eigenvectors are computed.
            magnitudes: Batches on which the curvature along these eigenvectors is measured.
                Default: the same batches.
            num_data: Number of training examples N. Default: the number of examples in `directions`
                and `magnitudes` together (for `"diag"`, which has no directions, only in
                `magnitudes`).
            folds: The number of folds (at least two) into which `directions` are split for
                cross-fitting. Default: no cross-fitting. Cannot be combined with `magnitudes`.
            generator: Seeds sampled labels (`fisher="mc"`) and the shuffling of loaders. Default:
                torch's global generator.
            resume: A folder for checkpoints; see `fit`.
        """
        self._require_same(num_data=num_data, folds=folds, resume=resume)
        scheme = scheme_of_batches(directions, magnitudes, folds)
        size = scheme.training_size(num_data)
        folder = None if resume is None else Path(resume)
        fitted = fit(self._setup, scheme, size, generator=generator, resume=folder)
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

        The mean does not change. The curvature of the new data is added to the precision:
        $P \leftarrow P + \tfrac{N_2}{T} C_2$. N and the loss in the marginal likelihood then
        include the new data, as do saved files. The prior, the link and the noise of a regression
        do not change, so call `tune` again.

        How close the result is to a fit to all data depends on the curvature:

        - `"diag"`, `"full"`: equal to a fit to all data.
        - `"kfac"`: equal to a fit to all data if the earlier fit used `mode="full"`. The factors G
          and A are each averaged over all data, which is the approximation that any K-FAC fit makes
          for the sum over examples. After a fit in another mode, the average includes the factors
          estimated by that fit.
        - `"ekfac"`: the directions do not change, but the curvature along each of them is measured
          on all data.
        - `"lowrank"`: keeps the leading directions of the earlier and the new curvature combined.
        - `"gp"`: equal to a fit to all data with the same inducing inputs.

        Args:
            loader: Batches `(x, y)` of new examples, all of which are read.
            num_data: The number of examples that the batches represent. By default, they are
                counted.
            generator: Seeds sampled labels (`fisher="mc"`) and the shuffling of the loader; see
                `fit`.
            progress: Show a progress bar over the batches.
            resume: Folder for checkpoints, written once a minute. To continue from the last
                checkpoint, repeat the same call on the same earlier posterior; see `fit`.

        Raises:
            RuntimeError: If nothing has been fitted, or the model has changed since the fit.
            ValueError: If the posterior was thinned, if it is a `"kfac"` posterior from a file
                written by an earlier version, which lacks the factors, or if the new data does not
                use the same parameters. Also raises the errors of `fit`. After an error, the
                posterior is unchanged.
            NotImplementedError: If the curvature is an instance of your own class, which does not
                define `update`.

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
        self._require_same(num_data=num_data, resume=resume)
        self._require_same_posterior()
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

        The sizes of the sums and the posterior are computed from shapes, whereas the memory and
        time per batch are measured on the first batch. Nothing is fitted. In a process group, each
        process plans its own fit.

        Args:
            train_loader: The loader that you will pass to `fit`. Its first batch is read, so it
                must be re-iterable.
            mode: The argument `mode` of `fit`.
            folds: The argument `folds` of `fit`.

        Returns:
            The plan. `print` shows it as a table; `plan.check()` raises an error if memory is
            insufficient.

        Raises:
            ValueError: If the mode is unknown, `folds` is passed with a mode other than
                `"crossfit"`, there is no batch, or `fit` would reject the first batch.
            TypeError: If `train_loader` is an iterator, which would lose its first batch.

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
        return plan_fit(self._setup, train_loader, mode=mode, folds=folds)

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
        1e-4 to 1e8), the candidate links, and 33 temperatures from 1/4 to 4. If only the last layer
        is Bayesian, the search skips temperatures that are far from the best. The combination with
        the best score is used, with two exceptions in favour of simpler settings:

        - The default link at temperature 1 is kept if it scores within a quarter of a paired
          standard error of the best, and always if there are fewer than 100 examples.
        - If a temperature other than 1 is chosen, the smallest prior precision that scores equally
          well is used. A larger prior precision could remove the effect of the posterior and leave
          only plain temperature scaling.

        Predictions from draws and temperature scaling of the network (`method="temperature"`) have
        their own temperatures, which the same pass determines; see `Link`. That of the network is
        between 1/128 and 128.

        In blocks of 32,768 parameters or more, parameters with nearly equal curvature (within 5 %)
        are grouped together. This changes variances by about 1e-4.

        Args:
            loader: Held-out batches `(x, y)`, not used for training.
            metric: Score to minimise: `"nll"` or `"brier"` of the `"glm"` predictive. If an example
                has several labels, the NLL is summed over them, and the Brier score is averaged.
            grid: Prior precisions to try instead of the default grid.
            method: `"grid"` searches on held-out data; `"marglik"` is an older way to call
                `tune_evidence(sigma=, per=)`.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation. Default: torch's global generator.
            sigma: Whether to tune a regression's noise as well. By default, it is tuned if you
                never set it and pass no `grid`. The best noise has a closed form for each prior
                precision (with `metric="nll"` and no `grid`). If there are several outputs, their
                noise levels are multiplied by a common factor. With `"per_output"`, `tune` then
                also chooses the noise level of each output that minimises the NLL for the fitted
                posterior; a later `fit` uses these levels for the curvature. Not available for
                `fisher="empirical"`.
            link: Restrict the search to one link. Pass a name to try all temperatures, or a `Link`
                to fix the temperatures, too.
            per: Only for `method="marglik"`; see `tune_evidence`.

        Returns:
            The chosen values and how they compare with the alternatives. `print(tuned)` explains
            the result in words; `tuned.compared` lists the network, temperature scaling and the
            other links; `tuned.table` lists every prior precision that was tried.

        Raises:
            ValueError: If the method, metric or link is unknown; if the grid is empty or not
                positive; if the loader is empty, or all of its targets are ignored; if `sigma` is
                passed for a likelihood other than `"regression"`, or residuals are zero; if an
                argument is passed that the method does not use.
            RuntimeError: If nothing has been fitted.
        """
        self._require_same(metric=metric, grid=grid, method=method, sigma=sigma, link=link, per=per)
        self._require_same_posterior()
        if method == "marglik":
            _refuse_unused(
                loader=loader is not None,
                generator=generator is not None,
                grid=grid is not None,
                link=link is not None,
                progress=progress,
                metric=metric != "nll",
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
        tuned = tune.tune_on_data(
            self._unchanged_fit,
            loader,
            metric,
            grid,
            sigma=sigma,
            link=link,
            generator=generator,
            progress=progress,
        )
        self._apply(tuned)
        return tuned.tuning

    @collective("tune_evidence")
    def tune_evidence(self, *, sigma: bool | None = None, per: str | None = None) -> Tuning:
        """Choose the prior precision with the largest marginal likelihood, and set it.

        This method reads no data, and does not change the link. Prefer `tune` if data can be held
        out: in the study described in docs/does-it-help.md, posteriors over all parameters had a
        worse NLL with `tune_evidence` than with `tune` on every problem.

        Args:
            sigma: Whether to tune a regression's noise as well. By default, it is tuned if you
                never set it. With `per`, the chosen noise is the best noise for a single, common
                prior precision.
            per: Use one prior precision for each `"kind"` of layer (linear, convolution, embedding,
                normalisation, bias, other) or for each `"block"`. Default: a single prior
                precision. A group without curvature gets the value that is best for all groups
                together.

        Returns:
            The chosen value and its evidence; `.table` lists every value that was tried.

        Raises:
            ValueError: If there is no optimum; if the posterior was thinned; if `sigma` is passed
                for a likelihood other than `"regression"`, or residuals are zero; if `per` is
                passed for a curvature that is one block.
            RuntimeError: If nothing has been fitted.
        """
        self._require_same(sigma=sigma, per=per)
        self._require_same_posterior()
        check_is(sigma, "sigma", bool, type(None))
        tuned = evidence.maximise_evidence(self.fitted, sigma, per)
        self._apply(tuned)
        return tuned.tuning

    # ------------------------------------------------- attributes

    @property
    def model(self) -> nn.Module:
        """The trained model."""
        return self._state.spec.model

    @property
    def param_names(self) -> list[str]:
        """Names of the Bayesian parameters, in the model's order.

        Raises:
            RuntimeError: If `params="last_layer"` and nothing has been fitted yet.
        """
        return self._parameters.names

    @property
    def block_names(self) -> list[str]:
        """Names of the curvature blocks, in the order of the per-block prior precisions.

        Raises:
            RuntimeError: If `params="last_layer"` and nothing has been fitted yet.
        """
        return self._parameters.block_names

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian over the Bayesian parameters.

        Raises:
            RuntimeError: If nothing has been fitted.
        """
        return self.fitted.posterior

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
            RuntimeError: If nothing has been fitted, or the posterior was fitted with a different
                mode or loaded from a file.
        """
        report = self.fitted.report
        if report is None:
            raise RuntimeError(
                'There is no report. Only a fit with `mode="auto"` creates a report, and '
                'the report is not saved to files. Fit with `mode="auto"`.'
            )
        return report

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """A copy of the prior precision δ. You can set it without a new fit.

        Warns:
            UserWarning: If the new value is smaller than the prior precision at which the posterior
                was thinned.
        """
        # A copy is returned, so that `la.prior_precision *= 2` changes the prior only through the
        # setter.
        return self._state.prior.precision.clone()

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        with _EXCHANGE:
            state = self._state
            precision = prior_precision_from(value, state.device)
            self._state = state.with_prior(replace(state.prior, precision=precision))
        if isinstance(self._state, FittedPosterior):
            note = self._state.note_on_thinning(self._state.posterior.deltas())
            if note is not None:
                warn(note)

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """A copy of the prior mean, one number or `[D]`. You can set it without a new fit."""
        state = self._state
        if state.prior.mean is None:
            return torch.zeros((), dtype=torch.float64, device=state.device)
        return state.prior.mean.clone()

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        with _EXCHANGE:
            state = self._state
            mean = prior_mean_from(value, state.device)
            self._state = state.with_prior(replace(state.prior, mean=mean))

    @property
    def temperature(self) -> float:
        """The temperature T of the likelihood. You can set it without a new fit."""
        return self._state.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        temperature = checked_temperature(value)
        with _EXCHANGE:
            self._state = self._state.with_temperature(temperature)

    @property
    def link(self) -> Link | None:
        """The link, which turns logits into probabilities. None selects the default link.

        `tune` sets it. You can also set it to a name or a `Link` without a new fit.
        """
        return self._state.link

    @link.setter
    def link(self, value: str | Link | None) -> None:
        link = link_from(value, self.likelihood)
        with _EXCHANGE:
            self._state = self._state.with_link(link)

    @property
    def sigma(self) -> Float[Tensor, "*outputs"]:
        """The standard deviation of a regression's noise: one number, or one per output.

        You can set it without a new fit if the noise of all outputs changes by the same factor.
        After `tune(sigma="per_output")`, it is the noise of the predictive distribution, whereas
        the curvature was computed with `likelihood.curvature_sigma`.

        Raises:
            AttributeError: If the likelihood is not `"regression"`.
            ValueError: If the curvature for the new value cannot be computed without a new fit.
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
                self._state = noise.with_noise(self._state, likelihood)
            else:
                self._state = self._state.with_likelihood(likelihood)

    # ------------------------------------------------- the posterior

    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw samples of the Bayesian parameters, `[n, D]`, in the order of `param_names`.

        Args:
            n: Number of samples.
            generator: Seeds the draws. Default: torch's global generator.

        Raises:
            RuntimeError: If nothing has been fitted.
            ValueError: If the posterior was fitted with `independent_outputs=True`.
        """
        return self.posterior.sample(n, generator)

    @explains_wrong_arguments
    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None
    ) -> Float[Tensor, ""]:
        r"""Compute the Laplace approximation of log p(D), in nats over all N examples.

        $-\tfrac1T\sum_n \ell_n + \log N(\theta^* \mid \mu, \delta^{-1}) + \tfrac D2\log 2\pi
        - \tfrac12\log\det P$, including all constants. $\ell_n$ is an example's negative
        log-likelihood, T the temperature, μ the prior mean, P the posterior precision, and D the
        number of parameters. If the fit read fewer than N examples, the first term is scaled up.

        Args:
            prior_precision: The δ at which to evaluate; the result is differentiable with respect
                to it. Default: the current prior precision.

        Warns:
            UserWarning: If the posterior was thinned. The value is then a lower bound on the value
                for the full posterior.
        """
        if self.fitted.thinned_at is not None:
            warn(
                "The posterior is thinned, so this value is a lower bound of its log marginal "
                "likelihood, and may be much too low. Compute it before `thin`, or load the "
                "posterior that was saved before `thin`."
            )
        return self.fitted.log_marginal_likelihood(prior_precision)

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

        Given the posterior, both are exact. For outputs with positions, `[B, T, C]`, the mean has
        this shape, and the covariance is over all `T·C` outputs of an example, `[B, T·C, T·C]`.

        Args:
            x: Inputs, `[B, ...]`.
            diagonal: Compute only the variances, in the shape of the mean. This is much cheaper.
            outputs: Restrict the result to some outputs: indices `[B, k]` into the flattened
                outputs of each example, or a number k for the k largest outputs. The mean is then
                `[B, k]`, and the covariance is `[B, k, k]`.
            joint: Also compute the covariance between inputs, `[B, C, B, C]`: entry `[n, i, m, j]`
                is the covariance of output i at input n and output j at input m.
            positions: Restrict the result to some positions of outputs `[B, T, C]`; see `predict`.
                The mean is then `[B, p, C]`, or `[B, C]` for a single position, and `outputs`
                selects outputs at each position.
            differentiable: Whether gradients flow back to the inputs. Can only be combined with
                `joint`. The Jacobians of all inputs, `[B, C, D]`, are kept in memory.

        Raises:
            ValueError: If the inputs or outputs are not finite, or of the wrong rank; if `outputs`
                or `positions` are out of range; if the memory bound is too small, or there are too
                many outputs; if `joint` is combined with `diagonal`, or `differentiable` with an
                option other than `joint`.
            TypeError: If inputs have the wrong type or dtype.
            RuntimeError: If nothing has been fitted, the model has changed since the fit, or
                autocast is enabled.
        """
        if joint and diagonal:
            raise ValueError(
                "`diagonal=True` computes variances, but `joint=True` computes covariances "
                "between inputs. Remove one of them."
            )
        state = self.fitted
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
        kind: SecondMoments = "variances" if diagonal else "covariance"
        mean, covariances = moments(state, x, kind=kind, outputs=outputs, positions=positions)
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
        differentiable: bool = False,
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Draw samples of the outputs, `[n, B, ..., C]`: logits, or means of regression targets.

        With `"glm"` and `"glm-mc"`, the samples have the mean and the covariance that `functional`
        returns. They include neither the temperature of the link nor the noise of a regression. For
        samples of targets, call `predict(x).sample((n,))`.

        Args:
            x: Inputs, `[B, ...]`, in any form that `predict` accepts.
            n: Number of samples.
            method: `"glm"`: draws from the Gaussian distribution of the linearised network's
                outputs. `"glm-mc"`: the linearised network at `n` samples of the parameters.
                `"nn"`: the network itself at `n` samples of the parameters. The last two are joint
                samples over all inputs.
            generator: Seeds the draws. Default: torch's global generator.
            joint: For `"glm"`: whether a sample is one function at all inputs, as for Thompson
                sampling. This decomposes the covariance of all outputs at all inputs,
                `[B·C, B·C]`. By default, the samples at different inputs are independent.
            positions: Only some positions of the outputs; see `predict`.
            differentiable: Whether gradients flow back to the inputs. Possible only for `"nn"`. The
                activations of all samples are kept in memory.

        Raises:
            ValueError: If the method is `"map"` or `"temperature"`, which have no samples. Also
                raises the errors of `functional`.
            RuntimeError: If nothing has been fitted, the model has changed since the fit, or
                autocast is enabled.
        """
        whole(n, "n")
        if method in NETWORK_METHODS:
            raise ValueError(
                f'`method="{method}"` is the trained network, which has no samples. Use "glm", '
                '"glm-mc" or "nn".'
            )
        if differentiable and method != "nn":
            raise ValueError(
                '`differentiable=True` supports only samples of `method="nn"`. For differentiable '
                "samples of the linearised network, draw them from the Gaussian distribution that "
                "`functional(x, joint=True, differentiable=True)` returns."
            )
        prediction_method = PredictionMethod(method, n, generator, positions, differentiable)
        fit = FitWithLink(self.fitted, None)
        with torch.inference_mode(False):
            # The samples of the other methods are joint samples in any case.
            if method != "glm" or not joint:
                return fit.draws(x, prediction_method)
            mean, covariance = joint_moments(fit.fitted, x, None, positions)
            size = mean.numel()
            outputs = DenseOutputs(mean.unsqueeze(0), covariance.reshape(1, size, size))
            return outputs.draws(n, generator).squeeze(1)

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

        The distribution has batch shape `[B, C]` for C targets. In addition to `.mean`, `.variance`
        and `.log_prob(y)`, it has `.icdf(q)` and `.cdf(y)`:
        `la.marginals(x).icdf(torch.tensor(0.975))` is `[B, C]`, and a tensor of Q probabilities
        `[Q, 1, 1]` gives `[Q, B, C]`. In closed form, it is a `Normal`; with samples, it is a
        mixture of the S normal distributions p(y | f_s) with equal weights. Both distributions
        include the noise.

        Args:
            x: Inputs, `[B, ...]`, in any form that `predict` accepts.
            method: `"glm"`, `"glm-mc"`, `"nn"` or `"map"`; see `predict`.
            samples: Number of samples. Default: the closed form.
            generator: Seeds the samples. Default: torch's global generator.
            positions: Only some positions of the outputs; see `predict`.

        Raises:
            TypeError: If the likelihood is not for regression. Also raises the errors of `predict`.
        """
        prediction_method = PredictionMethod(method, samples, generator, positions)
        return FitWithLink(self.fitted, None).marginals(x, prediction_method)

    @torch.inference_mode(False)
    def thin(
        self, x: Inputs | Record, error: float = 1e-3, *, positions: Positions | None = None
    ) -> Thinning:
        r"""Compress the posterior: keep only the directions that affect predictions.

        Directions in which the data add little to the prior ($\tfrac NT\Lambda \ll \delta$) all
        have a variance close to 1/δ, so their eigenvectors need not be stored. Their curvature is
        replaced by its mean, which preserves the trace. The memory and the saved file shrink
        accordingly.

        Half of `x` is used to find the smallest set of directions for which no output standard
        deviation changes by more than `error`; the other half is used to measure the actual change.

        Call `thin` after tuning, because the error grows for a smaller prior precision. The full
        posterior is discarded, so save it first if you may need it again. In a process group, pass
        the same `x` on every process.

        Args:
            x: A few dozen inputs that are typical of those you will predict for, in any form that
                `predict` accepts.
            error: Largest allowed relative change of an output's standard deviation.
            positions: Only some positions of outputs `[B, T, C]`; see `predict`.

        Returns:
            The fraction of the posterior's bytes that is kept, and the error with its confidence
            interval; `.message` summarises both in words. Afterwards, `tune` adds a note if it
            chooses a smaller prior precision, `tune_evidence` raises an error, and
            `log_marginal_likelihood` warns.

        Raises:
            ValueError: If the curvature is not `"kfac"` or `"ekfac"`, if there are fewer than two
                inputs, or if `error` is not positive. Also raises the errors of `functional`.
        """
        fitted, thinning = thin_posterior(self._unchanged_fit, x, error, positions)
        self._replace(fitted)
        return thinning

    # ------------------------------------------------- files

    @collective("save")
    def save(self, path: str | Path, *, own_likelihood: bool = False) -> None:
        """Write the fitted posterior as a safetensors file (no pickle), atomically.

        The file does not contain the model. It contains a checksum, and is byte-identical for
        identical posteriors. An existing file is replaced only when the new one is complete. If the
        path is a symbolic link, its target is replaced. With several processes, the first process
        writes and the other processes wait for it.

        Args:
            path: The file, in a folder that exists.
            own_likelihood: Whether a likelihood of your own class may be saved by its import path
                and its `options`. The file contains no code and `load` imports none, so you must
                pass an instance of the class to `load`.

        Raises:
            RuntimeError: If nothing has been fitted.
            ValueError: If the likelihood is an instance of your own class and `own_likelihood` is
                false, or its `options` are not plain data.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder or a device, if it cannot be written to, or if the disk
                is full. An existing file is then unchanged.
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
        """Write the posterior and a model card into a folder, which is created if it is missing.

        The posterior is written to `posterior.safetensors` (see `save`), and the card to
        `README.md`. The card describes the posterior, states how to load it, and contains a table
        of its calibration. If the folder already has a card, for example the card of the network,
        only the section on the posterior is replaced.

        Args:
            folder: The folder, for example the folder that the model's own `save_pretrained` wrote.
            card: Whether to write the card.
            evaluation: Metrics for the card's table, as returned by `la.evaluate(test_loader)`.
            own_likelihood: Whether a likelihood of your own class may be saved; see `save`.

        Raises:
            TypeError: If `evaluation` is not a report.
            ValueError: If `evaluation` is passed without a card. Also raises the errors of `save`.
            NotADirectoryError: If the folder is a file.
        """
        pretrained.check_card(card, evaluation)
        path = Path(folder)
        pretrained.check_folder(path)
        fitted = self._unchanged_fit
        pretrained.save_posterior(path, fitted, own_likelihood)
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

        The files are the same as from `save_pretrained`. The repository is created if it does not
        exist. In an existing card, only the section on the posterior is replaced.

        Args:
            repository: The name of the repository, `"user/name"`.
            card: Whether to upload a card.
            evaluation: Metrics for the card's table, as returned by `la.evaluate(test_loader)`.
            private: Whether a new repository is private. Default: the setting of the account.
            token: An access token with write permission. Default: the token that `hf auth login`
                stored.
            message: The commit message.
            own_likelihood: Whether a likelihood of your own class may be saved; see `save`.

        Returns:
            The address of the repository.

        Raises:
            ImportError: If huggingface_hub is not installed.
            NotImplementedError: In a process group. Call it within `alone()` on one process.
            OSError: If the upload fails. Also raises the errors of `save_pretrained`.
        """
        check_extra("hub", "huggingface_hub")
        refuse_ranks("push_to_hub", "each process would upload the files")
        pretrained.check_card(card, evaluation)
        self._unchanged_fit  # noqa: B018 (raises before a connection is made)
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if card:
                pretrained.download_card(folder, repository, token)
            self.save_pretrained(folder, card, evaluation=evaluation, own_likelihood=own_likelihood)
            return pretrained.push(
                folder, repository, private=private, token=token, message=message
            )

    def export(
        self,
        path: str | Path,
        example: Inputs | Record,
        *,
        link: str | Link | None = None,
    ) -> None:
        """Export the predictive distribution as a program that runs without this package.

        The posterior must be over the last layer, an `nn.Linear`, with curvature `"kfac"`,
        `"ekfac"` or `"diag"`. The program contains the network and the closed form of the
        predictive distribution. Call it like the model, with any number of examples. It returns a
        dict of tensors (of shape `[B, T, ...]` if the model has positions):

        - `"classification"`, `"multilabel"` and `"binary"`: `"probs"`, `[B, C]` (`[B]` for
          `"binary"`), and `"logits"` and the `"variance"` of each logit, both `[B, C]`;
        - `"regression"` and `"heteroscedastic"`: `"mean"` and `"variance"`, `[B, C]`, and
          `"covariance"`, `[B, C, C]`, of y, which include the noise;
        - `"poisson"`: `"mean"` and `"variance"`, `[B, C]`, of the counts;
        - a likelihood of your own: the tensors that its `exported` returns.

        To load and call the program, use `torch.export.load(path).module()(x)["probs"]`.

        Args:
            path: The file, in a folder that exists. The suffix selects the format: `.pt2` for a
                program that torch runs, or `.onnx` for onnxruntime and other runtimes (needs the
                extra `onnx`).
            example: Inputs for one or more examples, in any form that `predict` accepts. The
                program takes inputs of the same sizes, except for the number of examples.
            link: The link; see `predict`.

        Raises:
            NotImplementedError: If torch cannot trace the model for any number of examples, if the
                posterior is of a different kind, if inputs are not tensors, if the likelihood is an
                instance of your own class and cannot be exported, or if ONNX has no operator for a
                part of the program.
            ValueError: If the suffix is neither `.pt2` nor `.onnx`, or the link is unknown.
            RuntimeError: If the program and `predict` disagree on the example.
            OSError: If the file cannot be written. Also raises the errors of `predict`.
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
        fisher: str | None = None,
        factor_dtype: torch.dtype = torch.float64,
        mc_samples: int | None = None,
        memory_bound: int | None = None,
        batch: BatchHook | None = None,
    ) -> "Laplace":
        """Load a posterior that was written by `save`, for the same trained model.

        A damaged or modified file is rejected, because its checksum does not match. With several
        processes, each one reads the full file.

        Args:
            path: The file.
            model: The model, with the parameters that it had at the fit.
            likelihood: An instance of your own class, with the `options` that the file contains. It
                is required if the file names this class. Default: a likelihood of this package.
            backend: The backend for later fits; see `Laplace`.
            fisher: The Fisher matrix for later fits and updates; see `Laplace`. Default: the Fisher
                matrix of the saved fit, or `"exact"` if an earlier version wrote the file.
            factor_dtype: The dtype of the factors in later fits.
            mc_samples: Labels per example in later fits and updates. Default: the number used by
                the saved fit, or 1 if `fisher` is passed.
            memory_bound: Limit on the working memory, in bytes; see `Laplace`.
            batch: A function from batches to `(inputs, targets)`; see `Laplace`.

        Raises:
            ValueError: If the file is damaged, has a different format or does not match the model,
                or if `likelihood` is missing, superfluous or different from the likelihood of the
                fit.
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If the path is a folder.
            OSError: If the file cannot be read.
        """
        fitted = file.load(
            Path(path),
            model,
            likelihood=likelihood,
            backend=backend,
            fisher=fisher,
            factor_dtype=factor_dtype,
            mc_samples=mc_samples,
            memory_bound=memory_bound,
            batch=batch,
        )
        return cls.from_posterior(fitted)

    @classmethod
    def from_posterior(cls, fitted: FittedPosterior) -> "Laplace":
        """Create a `Laplace` from a fitted posterior, such as `fitted` of another `Laplace`."""
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
        """Load a posterior from a folder or from the Hugging Face Hub (needs the `hub` extra).

        Args:
            folder_or_repository: A folder written by `save_pretrained`, or the name `"user/name"`
                of a repository written by `push_to_hub`.
            model: The model, with the parameters that it had at the fit.
            revision: A branch, tag or commit of a repository.
            token: A token for a private repository. Default: the token that `hf auth login` stored.
            **options: The other arguments of `load`.

        Raises:
            FileNotFoundError: If there is no such folder or repository, or no posterior in it.
            ImportError: If `folder_or_repository` is a repository and huggingface_hub is not
                installed.
            ValueError: If `revision` is passed for a folder. Also raises the errors of `load`.
        """
        path = pretrained.posterior_file(str(folder_or_repository), revision, token)
        return cls.load(path, model, **options)

    # ------------------------------------------------- state

    @property
    def _states(self) -> list[FitSetup | FittedPosterior]:
        return [self._state]

    @property
    def _setup(self) -> FitSetup:
        """The setup from which the next fit starts."""
        state = self._state
        return state.setup if isinstance(state, FittedPosterior) else state

    @property
    def state(self) -> FitSetup | FittedPosterior:
        """The model with its prior and, after a fit, its posterior.

        The state is immutable: every change to the `Laplace` replaces it.
        """
        return self._state

    @property
    def fitted(self) -> FittedPosterior:
        """The state after a fit; `from_posterior` turns it back into a `Laplace`.

        Raises:
            RuntimeError: If nothing has been fitted.
        """
        if not isinstance(self._state, FittedPosterior):
            raise RuntimeError("The posterior is not fitted yet. Call `fit(train_loader)` first.")
        return self._state

    @property
    def _unchanged_fit(self) -> FittedPosterior:
        """The fitted state; requires that the model has not changed since the fit."""
        fitted = self.fitted
        fitted.check_unchanged()
        return fitted

    def _replace(self, fitted: FittedPosterior) -> None:
        """Replace the state by a new fit, but keep the current prior, temperature and link.

        These may have been set while the fit was running.
        """
        with _EXCHANGE:
            state = self._state
            fitted = fitted.with_temperature(state.temperature)
            self._state = fitted.with_prior(state.prior.to(fitted.device)).with_link(state.link)

    def _apply(self, tuned: TunedFit) -> None:
        """Set the values that a search chose, and keep everything else.

        While the search was running, other values may have been set, and another posterior fitted.
        """
        with _EXCHANGE:
            current = self._state
            # A new noise also rescales the curvature, so the whole fit is taken over.
            state = current if tuned.tuning.sigma is None else tuned.fitted
            prior = replace(current.prior, precision=tuned.fitted.prior.precision)
            link = tuned.tuning.link or current.link
            state = state.with_temperature(current.temperature)
            self._state = state.with_prior(prior).with_link(link)

    @property
    def _parameters(self) -> ParameterBlocks:
        """The Bayesian parameters.

        Raises:
            RuntimeError: If `params="last_layer"` and nothing has been fitted yet.
        """
        if self._state.parameters is None:
            raise RuntimeError(
                '`params="last_layer"` finds the last layer of a '
                f"{type(self.model).__name__} by running the model on an example. This "
                "happens only in the first fit. Call `fit(train_loader)` first, or pass "
                "the names of the parameters, `params=[...]`."
            )
        return self._state.parameters

    def _fits_with_links(
        self, x: Inputs | Record, method: PredictionMethod, link: Link | None
    ) -> list[FitWithLink]:
        fitted = self.fitted
        link = link or fitted.link
        if method.is_closed_form and link is None:
            link = default_link_of_fit(fitted, x)
        return [FitWithLink(fitted, link)]


def _refuse_unused(**is_passed: bool) -> None:
    """Reject arguments of `tune` that `method="marglik"` does not use."""
    unused = " and ".join(f"`{name}`" for name in is_passed if is_passed[name])
    if unused:
        raise ValueError(f'`method="marglik"` does not use {unused}. Remove {unused}.')
