"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.fits.kinds import CURVATURES, WITH_FACTORS, CurvatureKind
from laplace_debias.curvature.fits.passes import NOT_SAVED, Passes
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.fits.saved_passes import SavedPasses
from laplace_debias.curvature.layers.backends import choose_backend
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.losses.likelihoods import Gaussian, Likelihood, likelihood_from
from laplace_debias.curvature.losses.likelihoods.names import look_at_shapes
from laplace_debias.curvature.network.batches import (
    Batches,
    Checked,
    Counted,
    FirstBatchKnown,
    Pairs,
    source_of,
    with_progress,
)
from laplace_debias.curvature.network.chosen_positions import Positions
from laplace_debias.curvature.network.class_dim import classes_last
from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.curvature.network.gathered import (
    over_whole_model,
    with_all_ranks,
    with_own_values,
)
from laplace_debias.curvature.network.inputs import Inputs, Record
from laplace_debias.curvature.network.last_layer import is_last_layer, needs_example
from laplace_debias.curvature.network.outputs import explaining_unbatched
from laplace_debias.curvature.network.precision import is_narrow, wide
from laplace_debias.curvature.network.reader import BatchHook, BatchReader
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.shadow import (
    check_deterministic,
    check_finite,
    check_no_autocast,
    check_usable,
)
from laplace_debias.curvature.network.shards import Placed, check_shared, place_of
from laplace_debias.curvature.network.wrappers import plain_names, unwrapped
from laplace_debias.laplace import grids, links, predictive, shards, tune, tuning
from laplace_debias.laplace.asked import Asked, OutputChoice
from laplace_debias.laplace.data_size import (
    Expected,
    Known,
    Supposed,
    data_size,
    expected_of_all,
    expected_of_some,
    refuse_misleading,
)
from laplace_debias.laplace.description import Described
from laplace_debias.laplace.evaluation import evaluate_predictions
from laplace_debias.laplace.export.export import export
from laplace_debias.laplace.files import posterior_file, stored
from laplace_debias.laplace.files.fit_state import FitStates
from laplace_debias.laplace.files.likelihood_json import likelihood_from_json
from laplace_debias.laplace.first_look import look_at
from laplace_debias.laplace.fitted import Fitted, Noise, network_of
from laplace_debias.laplace.grids import Grid
from laplace_debias.laplace.grouping import (
    Room,
    agreed,
    check_fit_bound,
    check_rereadable,
    fit_grouped,
    grouped,
    plan_within,
)
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.plan import Plan
from laplace_debias.laplace.planned import Planned
from laplace_debias.laplace.planning import is_too_large, posterior_bytes, too_large
from laplace_debias.laplace.posterior import GaussianPosterior, scaled
from laplace_debias.laplace.posterior_range import (
    check_num_data,
    check_prior_precision,
    check_temperature,
)
from laplace_debias.laplace.prior import PriorMean, check_kind, prior_mean_from
from laplace_debias.laplace.resume import check_resumable, states_of, states_of_tuning
from laplace_debias.laplace.same_arguments import together
from laplace_debias.laplace.scale import check_scale, scale_of
from laplace_debias.laplace.schemes import (
    MODES,
    OF_FIRST_BATCHES,
    CrossFit,
    Full,
    Scheme,
    scheme_of,
)
from laplace_debias.laplace.settings import FitSettings
from laplace_debias.laplace.sharded_calls import on_all_ranks, run_together
from laplace_debias.laplace.uncertainty import has_variance_in_closed_form, of_draws, of_moments
from laplace_debias.metrics import Report, Uncertainty
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.available import check_available
from laplace_debias.system.randomness import alike, replayed, seeded
from laplace_debias.system.ranks import current
from laplace_debias.system.threads import Lock

PriorPrecision = float | Tensor

METHODS = ("glm", "glm-mc", "nn", "map")
_DEFAULT_SAMPLES = 100

# Held for the moment in which a fit or a prior precision takes the place of another.
_EXCHANGE = Lock()


def _model_of(la: "Laplace", *_: object, **__: object) -> nn.Module:
    """The model that a method of `Laplace` computes with."""
    return la.model


class Laplace:
    r"""A Laplace approximation of a trained network's posterior.

    The posterior is $N(\theta^*, P^{-1})$ with $P = N C + \mathrm{diag}(\delta)$: θ* the trained
    parameters, C the curvature of the mean loss, N the number of training examples and δ the prior
    precision (Eq. 4 and 17 of Tatzel et al., 2025, "Debiasing mini-batch quadratics for
    applications in deep learning"). The model itself is never changed.

    Any number of threads may predict, sample, evaluate and save with one object, and fit objects of
    one model or of several. Where a thread fits or tunes an object that others use, a call of
    theirs sees it as it was before or as it is after, `evaluate` batch by batch.

    In a process group of `torch.distributed` the processes fit together: each reads its part of the
    data (`ShardedBatches`). `fit`, `fit_batches`, `tune`, `evaluate` and `save` are called on all
    of them, in the same order; see `alone` for one process on its own. The posterior of `"kfac"`,
    `"ekfac"` and `"diag"` is sharded: each process holds some of the blocks. So `predict`,
    `functional`, `sample`, `log_marginal_likelihood` and the like are called on all of them, too,
    with the same arguments, and all get the same result. With `replicate=True` at the fit, or
    after `gather`, each process has the whole posterior, and these work on each alone. A model
    that `fully_shard` has split over them is made whole on each while a method computes with it,
    which is then called on all of them, the constructor too; see `gathered`.

    Randomness is torch's global one, or the `generator`'s of a call. With a generator the call is
    a function of it and of the data, the order of a shuffling loader included, and torch's global
    generator on the CPU is left as it was.

    Args:
        model: A trained network in eval mode, from inputs `[B, ...]` to outputs `[B, C]`.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"heteroscedastic"` (means and log-variances, `[B, 2C]`), `"binary"` (one logit),
            `"multilabel"` (one logit a label, several of which may apply; targets 0 or 1,
            `[B, C]`), or a `Likelihood`: `Categorical(class_weights=, label_smoothing=)`, say.
        curvature: `"kfac"` (Kronecker-factored), `"ekfac"` (the same directions, exact curvature
            along each of them), `"diag"` (the exact diagonal), `"lowrank"` (the leading
            eigenvectors of the whole matrix) or `"full"` (the whole matrix, for small networks).
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"supported"`
            (those of one known layer that act through it alone), `"last_layer"`, names, or a
            predicate `(name, parameter) -> bool`. Frozen ones never are; of `"all"`,
            `"weights"` and `"supported"` a fit leaves out, with a warning, those that the outputs
            do not depend on. A parameter of no known layer, or of several, or that acts in another
            way, has an exact block from gradients of each example: dense up to 1,024 entries,
            diagonal above. A fit finds these by running two examples. The last layer
            is the one that the outputs come from, whatever was registered last. Unless the model is
            an `nn.Sequential` that ends in one of torch's layers, the first `fit` finds it by
            running an example, and `param_names` and `block_names` are not known before.
        prior_precision: δ, one number or one per block (see `block_names`).
        backend: `"backpack"`, `"hooks"`, or `"auto"`: BackPACK where it can, hooks elsewhere. Both
            give the same factors.
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels drawn from the model) or
            `"empirical"` (the true labels).
        factor_dtype: In what Kronecker factors are summed and decomposed.
        sigma: Noise of `"regression"`: standard deviation, one number or one per output. If None
            a fit assumes 1.0 and warns of it; `tune` finds it.
        mc_samples: Labels an example for `fisher="mc"`.
        joint: Whether a layer's weight and bias make one block instead of two.
        sharing: How the positions of a convolution or a sequence share a weight, `"expand"` or
            `"reduce"`: one for all, or a mapping from layers' paths. Of `"kfac"` and `"ekfac"`.
        rank: Directions of `"lowrank"`, 20 if None.
        memory_bound: Bytes of working memory for output gradients, in `fit` and `predict`. Batches
            are cut to it; results do not depend on it. None for 128 MiB, and more where one example
            needs it.
        class_dim: Which dimension of the outputs has the classes: None or -1 for `[B, ..., C]`, 1
            for `[B, C, ...]` as `F.cross_entropy` has them. With 1 everything is as if the model
            gave `outputs.movedim(1, -1)`: predictives, functional means and covariances come out
            as `[B, ..., C]`. Targets with an entry for every output (regression, `[B, C, ...]`)
            are moved with them. With None a fit asks where its first batch's shapes fit both.
        batch: A function from what loaders yield to `(inputs, targets)`, for batches of another
            form: `batch=lambda batch: (batch[0], batch[1])` for `(x, y, index)`. It serves every
            method that takes batches. None reads pairs `(x, y)`, and mappings and dataclasses that
            hold the targets under `labels`, `label`, `label_ids`, `targets`, `target` or `y`.
            Targets are not passed to the model. Labels of tokens go with the outputs that the
            model's own loss compares them with: those of one position earlier for a Hugging Face
            model that shifts them, as causal language models do.
        temperature: T of the likelihood: the posterior is that of $p(D \mid \theta)^{1/T}$, with
            $P = \tfrac NT C + \mathrm{diag}(\delta)$. Less than 1 is more certain.
        prior_mean: Mean of the Gaussian prior: one number, one per Bayesian parameter `[D]` in the
            model's order, or a mapping that has each of them by its name (the `state_dict` that a
            fine-tuning began with). It is part of the marginal likelihood and of nothing else: the
            posterior's mean is θ* whatever the prior's.

    Attributes:
        model: The model.
        likelihood: The likelihood.

    Raises:
        ValueError: For an unknown name, `sharing` with a curvature without Kronecker factors, a
            prior precision that is not positive, a model that holds NaN, or one with dropout or
            batch normalisation in training mode.
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
        self._settings = FitSettings(
            CurvatureKind(curvature, rank),
            FisherType(fisher, mc_samples),
            factor_dtype,
            joint,
            sharing,
            memory_bound,
            class_dim,
        )
        if sharing != "expand" and curvature in CURVATURES and curvature not in WITH_FACTORS:
            raise ValueError(
                f"sharing={sharing!r} is for Kronecker factors, and curvature={curvature!r} has "
                "none: leave it out."
            )
        plain = _plain(model)
        self.model = model
        self.likelihood = likelihood_from(likelihood, sigma)
        self._read_batch = BatchReader(model, batch)
        self._params = plain_names(model, params) if isinstance(params, (list, tuple)) else params
        # What the model's structure tells; a fit holds it against an example.
        self._selected: BayesianParameters | None = None
        if not needs_example(plain, self._params):
            self._selected = BayesianParameters.of(plain, self._params, self._settings, None)
        self._parameters = self._selected
        if class_dim not in (None, -1) and backend == "backpack":
            raise NotImplementedError(
                f"BackPACK does not see how class_dim={class_dim} moves the outputs' dimensions: "
                "use backend='hooks' or 'auto', or put the classes last in the model."
            )
        names = p.names if (p := self._parameters) else [n for n, _ in plain.named_parameters()]
        if is_narrow(plain, names):
            if backend == "backpack":
                raise NotImplementedError(
                    "BackPACK does not see that parameters in half precision are computed with in "
                    "single precision: use backend='hooks' or 'auto'."
                )
            backend = "hooks"
        self._backend = backend
        choose_backend(classes_last(plain, class_dim), backend)
        self._prior_precision = self._check_prior_precision(prior_precision)
        self._temperature = check_temperature(temperature)
        check_kind(prior_mean)
        self._given_prior_mean = prior_mean
        self._prior_mean: Tensor | None = None
        if self._parameters is not None:
            self._prior_mean = prior_mean_from(prior_mean, plain, self._parameters.names)
        self._fitted: Fitted | None = None

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        parameters, fitted = self._parameters, self._fitted
        return str(
            Described(
                unwrapped(self.model),
                self.likelihood,
                self._settings.kind.name,
                None if parameters is None else parameters.names,
                None if parameters is None else parameters.block_names,
                self._prior_precision,
                self._prior_mean if parameters is not None else self._given_prior_mean,
                self._temperature,
                None if fitted is None else fitted.mode,
                None if fitted is None else fitted.posterior.num_data,
                1 if fitted is None else fitted.posterior.num_ranks,
            )
        )

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
        if self._parameters is None:
            raise RuntimeError(
                f'params="last_layer" of a {type(self.model).__name__} is found by running an '
                "example, which the first fit does: call `fit(train_loader)` first, or name the "
                "parameters, params=[...]."
            )
        return self._parameters

    @property
    def _first_parameter(self) -> nn.Parameter:
        """The first Bayesian parameter; the first trainable one as long as they are not known."""
        if self._parameters is None:
            return next(p for p in self.model.parameters() if p.requires_grad)
        return unwrapped(self.model).get_parameter(self._parameters.names[0])

    def _look_at(self, batches: FirstBatchKnown) -> BayesianParameters:
        """The Bayesian parameters, as the first batch tells; checks what it tells of outputs.

        A process without examples looks at those of the first one that has some.

        Raises:
            ValueError: If there is no last layer, it is not what it was, or there is no batch; if
                the shapes leave open where the classes are; as `BayesianParameters.verified`.
            NotImplementedError: As `BayesianParameters.verified`.
        """
        for x, y in self._on_device(shards.first_batch(current(), batches.first)):
            plain, found = unwrapped(self.model), self._selected
            if found is None or is_last_layer(self._params):
                found = BayesianParameters.of(plain, self._params, self._settings, x)
                known = self._parameters
                if known is not None and known.names != found.names:
                    raise ValueError(
                        f'params="last_layer" was {known.names}, but now the outputs come '
                        f"from {found.names}: the model has changed, build a new Laplace."
                    )
            network = network_of(self.model, found.names, self._settings)
            look_at(network, self.likelihood, x, y, self._settings.class_dim)
            found = found.verified(network, plain, self._params, self._settings, x)
            self._check_prior_precision(self._prior_precision, found)
            prior_mean_from(self._given_prior_mean, plain, found.names)
            return found
        raise ValueError("The data holds no example: pass a loader with at least one batch.")

    # ---------------------------------------------------------------- fitting

    @over_whole_model(_model_of)
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
        replicate: bool = False,
        memory_bound: SupportsIndex | None = None,
        store: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        """Fit the posterior's curvature.

        Args:
            train_loader: Batches `(x, y)` of training data. `"ekfac"` in full mode reads them
                twice. Or a way to fit with its data, such as `Split(directions, magnitudes)`; the
                other arguments are then those of `fit_batches`.
            mode: `"full"`: all batches. `"mini"`: the first batch alone (biased: directions and
                magnitudes are both the extremes of that batch). `"debiased"`: directions from the
                first batch, magnitudes from the second (Eq. 9). `"crossfit"`: directions from the
                whole first batch, magnitudes out of fold. Of several processes the first batch is
                the union of their first batches.
                They are short for `Full`, `Split` and `CrossFit` of `schemes`.
            num_data: N, the number of training examples, which the curvature is scaled to whatever
                the fit sees (a subset, say, that stands for all). If None, N is the number of
                examples that the loader's sampler reads, or for `"full"` of data that does
                not tell its size the number of examples seen. A sampler that repeats examples or
                splits them over processes does not tell N.
            generator: Seeds the labels of `fisher="mc"` and the loader's order and augmentation,
                and leaves torch's global generator alone; that one if None.
            progress: Show a progress bar over the batches of a full fit, or of the scale.
            scale: Scale what one or two batches tell by the whole loader's curvature of the loss in
                the outputs, which takes a forward pass over it (see `fit_batches`).
            folds: For `"crossfit"`: how many folds the first batch is cut into, 2 if None.
            resume: A folder of its own, in which every minute, and at Ctrl-C, the fit saves what it
                has summed. The same call in another process goes on from there: it reads the
                batches again that are in the sums, computes with the rest alone, and ends bit for
                bit as a fit that was never broken off. The model, the options, the data and the
                generator's state must be the same. A fit that ends removes its state. In a process
                group each process saves its own sums there. Another number of processes goes on,
                too, and ends with the same up to rounding; `ShardedBatches` give it the same data.
            replicate: Whether each process of a process group ends with the whole posterior. If
                not, it is sharded: each process keeps the blocks that it has decomposed, and all
                make each call on the posterior together (see the class). `"lowrank"` and `"full"`
                have one block of all parameters, which every process keeps either way. One process
                alone keeps all blocks.
            memory_bound: Bytes that the fit may hold, beyond the model and the data: sums,
                eigenbases, the posterior, and the working memory of a chunk of a batch (which the
                constructor's `memory_bound` bounds by itself). Blocks are put into groups that fit,
                and each group takes passes of its own over the data, which must be re-iterable. The
                curvature is that of a fit in one go: bit for bit, or to rounding where chunks must
                be smaller. Bytes are planned, as `plan` does for batches like the first one, with a
                margin of a fifth. None for one group.
            store: A folder that the posterior is written to, group by group as it is fitted, and
                that it is read from block by block ever after: what `save(store, parts=True)` and
                `load(store, model, mmap=True)` would do. For a model on the CPU, in one process.
                None to hold it in memory.

        Returns:
            The object itself.

        Raises:
            ValueError: For an unknown mode, `folds` with another mode than `"crossfit"`, a
                posterior that takes more memory than is available (see `plan`), an empty loader,
                fewer than two batches for `"debiased"`, targets or outputs that do not fit the
                likelihood, NaN in the outputs; if the model draws random numbers or mixes the
                examples of a batch; if every target is ignored; for `num_data` below 1 or above
                2**53, and without it if the loader does not tell N, or if a full fit sees another
                number of examples than the loader told. In a process group, on all processes with
                the number of the one it comes from; also if two of them read the same data, or if
                their models differ. With `resume` also without a generator where the loader
                shuffles or labels are drawn, and if the folder holds the state of another fit or of
                other data, with what differs.
                With `memory_bound` if a block by itself does not fit, with what would do. With
                `store` in a process group, for a model on an accelerator, or with less space left.
            TypeError: For targets or inputs of the wrong dtype, `num_data` that is not an integer;
                for data that can be read only once where there are several groups.
            NotImplementedError: If torch cannot differentiate the forward pass, or the gradients of
                its examples cannot be told apart.
            RuntimeError: Under autocast.
            OSError: If the folder of `resume` or `store` cannot be written to, or somebody else is
                writing to that of `store`.
        """
        if mode not in MODES:
            raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
        room = Room.of(memory_bound, store, replicate)
        if isinstance(train_loader, Scheme):
            if mode != "full" or progress or scale or folds is not None:
                raise ValueError(
                    f"{type(train_loader).__name__}(...) says how to fit: leave out mode, folds, "
                    "progress and scale (fit_batches(..., scale=data) scales)."
                )
            expected = _expected_of(train_loader, num_data)
            self._check_resumable(resume, generator, train_loader)
            return self._fit(
                train_loader, expected, generator, train_loader.mode, room, resume=resume
            )
        if folds is not None and mode != "crossfit":
            raise ValueError(f'folds={folds} belongs to mode="crossfit", not to mode="{mode}".')
        if scale and mode == "full":
            raise ValueError('mode="full" sees all data and needs no scale: leave out scale=True.')
        if scale:
            check_scale(train_loader)
        ranks = current()
        self._check_resumable(resume, generator, train_loader)
        is_shared = check_shared(ranks, train_loader)
        given = None if num_data is None else check_num_data(num_data)
        if mode == "full":
            Full(train_loader).check(self._settings.kind)
            expected = expected_of_all(train_loader, given)
            scheme: Scheme = Full(with_progress(train_loader, progress, "fit"))
            return self._fit(scheme, expected, generator, mode, room, None, is_shared, resume)
        wanted = OF_FIRST_BATCHES[mode]
        expected = expected_of_some(train_loader, given, mode, wanted.num_batches)
        batches = list(itertools.islice(seeded(train_loader, generator), wanted.num_batches))
        most = max(ranks.exchange(len(batches)))
        if most < wanted.num_batches:
            raise ValueError(
                f'mode="{mode}" needs {wanted.num_batches} batch(es), the loader gave '
                f"{most}: use a smaller batch size or more data."
            )
        scale_data = with_progress(train_loader, progress, "scale") if scale else None
        scheme = wanted.scheme(batches) if folds is None else CrossFit(batches, folds)
        return self._fit(scheme, expected, generator, mode, room, scale_data, is_shared, resume)

    @over_whole_model(_model_of)
    @together("plan")
    def plan(
        self,
        train_loader: Batches,
        mode: str = "full",
        *,
        folds: int | None = None,
        replicate: bool = False,
        timed: bool = False,
        available: SupportsIndex | None = None,
        memory_bound: SupportsIndex | None = None,
        store: bool | str | os.PathLike[str] | None = None,
    ) -> Plan:
        """What `fit` would take: memory, passes, operations, messages, and if asked for seconds.

        Bytes of what a fit sums and keeps are counted from shapes. Those of a chunk that goes
        forward and back come from one example and two. Nothing is fitted.

        Args:
            train_loader: As `fit` takes it. Its first batch is read, so it must be re-iterable.
            mode: As `fit` takes it.
            folds: As `fit` takes it.
            replicate: As `fit` takes it.
            timed: Estimate seconds, too: the time of the first batch, times the number of batches,
                and that of eigendecompositions of random matrices, scaled by d³ above 512 columns.
            available: Bytes that the fit may take; None for those that the device has left.
            memory_bound: As `fit` takes it: the plan is that of a fit in groups.
            store: As `fit` takes it, or whether it is given. Nothing is written.

        Returns:
            The plan; `print` shows it as a table, `plan.check()` refuses what does not fit.

        Raises:
            ValueError: For an unknown mode, `folds` with another mode than `"crossfit"`, fewer than
                one byte, no batch; as `fit` for the first batch, for what one example needs, and
                for `memory_bound`.
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
        if mode not in MODES:
            raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
        if folds is not None and mode != "crossfit":
            raise ValueError(f'folds={folds} belongs to mode="crossfit", not to mode="{mode}".')
        if isinstance(train_loader, Iterator):
            raise TypeError(
                "A plan reads the first batch, which this iterator would lose for the fit: pass a "
                "DataLoader or a list of batches."
            )
        limit = None if available is None else check_available(available)
        bound = check_fit_bound(memory_bound)
        # The loader's order, and labels that a fit draws, are drawn anew by the fit.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            problem, _, known = self._problem_of(train_loader, None, replicate)
            batch = next(iter(self._on_device(known.first)))
        size = data_size(train_loader)
        planned = Planned(
            *(unwrapped(self.model), problem, self._settings, mode, folds, batch),
            len(train_loader) if isinstance(train_loader, Sized) else None,
            size.num_examples if isinstance(size, (Known, Supposed)) else None,
        )
        with torch.inference_mode(False):
            return plan_within(planned, timed, limit, bound, store not in (None, False))

    @over_whole_model(_model_of)
    @together("fit")
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
        replicate: bool = False,
        memory_bound: SupportsIndex | None = None,
        store: str | os.PathLike[str] | None = None,
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
            scale: Batches `(x, y)`, say all training data, that take a forward pass each: the
                magnitudes are multiplied by the ratio of the loss's mean curvature in the outputs
                (tr ∇²_f ℓ; 1 − Σ p² for a softmax; of `fisher="empirical"` ‖∇_f ℓ‖²) over these
                to that over the examples that the magnitudes were measured on. A few examples
                rarely hold their share of the hard ones that curve the loss of a confident
                network. None for no scaling.
            resume: As `fit` takes it; so are the next three.
            replicate: Whether each process ends with the whole posterior.
            memory_bound: Bytes that the fit may hold.
            store: A folder that the posterior is written to.

        Returns:
            The object itself.

        Raises:
            ValueError: As `fit`; also for `folds` with `magnitudes`, fewer than two or more than
                there are examples.
            TypeError: As `fit`; also for data that can be read only once where it is needed twice.
            OSError: As `fit`.
        """
        scheme = scheme_of(directions, magnitudes, folds)
        self._check_resumable(resume, generator, scheme)
        of_data = [check_shared(current(), data) for data in (directions, magnitudes, scale)]
        is_shared = of_data[0]
        expected = _expected_of(scheme, num_data)
        room = Room.of(memory_bound, store, replicate)
        return self._fit(scheme, expected, generator, scheme.mode, room, scale, is_shared, resume)

    def _fit(
        self,
        scheme: Scheme,
        expected: Expected,
        generator: torch.Generator | None,
        mode: str,
        room: Room,
        scale: Batches | None = None,
        is_shared: bool = False,
        resume: str | os.PathLike[str] | None = None,
    ) -> "Laplace":
        kind, memory_bound, store = self._settings.kind, room.memory_bound, room.store
        scheme.check(kind)
        if memory_bound is not None:
            check_rereadable(scheme)
        if scale is not None:
            check_scale(scale, scheme.measured[0])
        plain = _plain(self.model)
        check_no_autocast(self._first_parameter.device)
        ranks = current()
        expected = expected.over(ranks)
        with torch.inference_mode(False), ExitStack() as stack:
            problem, parameters, known = self._problem_of(
                scheme.first_read, generator, room.replicate
            )
            first = self._checked(known.first)
            alike = {"replicate": room.replicate, "memory_bound": memory_bound}
            shards.check_alike(ranks, plain, parameters.block_names, first, is_shared, alike)
            if store is None and is_too_large(problem, kind):
                x = next((x for x, _ in self._on_device(known.first)), None)
                raise too_large(unwrapped(self.model), problem, kind, x)
            keep: stored.StoredFit | None = None
            if store is not None:
                needed = posterior_bytes(problem, kind)
                stored.check_store(store, self.likelihood, problem.device, ranks, needed)
                keep = stack.enter_context(stored.StoredFit(store))
            sizes: Sequence[int] = [len(problem.blocks)]
            if memory_bound is not None:
                batch = next(iter(self._on_device(shards.first_batch(ranks, known.first))))
                planned = Planned(
                    *(plain, problem, self._settings, scheme.mode, scheme.num_folds, batch),
                    *(None, expected.num_data),
                )
                problem, sizes = agreed(grouped(planned, memory_bound, store is not None))
            states = None
            if resume is not None:
                of_data: dict[str, Any] = {
                    "mode": mode,
                    "num_data": expected.num_data,
                    "folds": scheme.num_folds,
                }
                if memory_bound is not None:
                    of_data |= {"memory_bound of the fit": memory_bound, "groups": list(sizes)}
                states = states_of(
                    resume, problem, self._settings, self.likelihood, plain, **of_data
                )
                passes = SavedPasses(states, problem.device, ranks)
                problem = replace(problem, passes=passes)
            scheme, is_saved = scheme.reading_first(known), states is not None

            read_with = partial(self._read, is_saved)
            read = partial(read_with, generator)
            ratio = 1.0 if scale is None else scale_of(problem, scheme, scale, read)

            def finished(curvature: BlockDiagonal) -> BlockDiagonal:
                if scale is not None:
                    curvature = curvature.map(lambda _, block: scaled(block, ratio))
                return curvature if keep is None else keep.stored(curvature)

            found = fit_grouped(scheme, known, problem, kind, sizes, generator, read_with, finished)
            mode = mode if scale is None else f"{mode}, scaled"
            num_data = expected.given(found.seen.num_examples)
            self._take(found, parameters, num_data, mode, keep)
        if states is not None:
            ranks.exchange(None)
            states.remove()
        return self

    def _check_resumable(
        self,
        folder: str | os.PathLike[str] | None,
        generator: torch.Generator | None,
        data: Batches | Scheme,
    ) -> None:
        read = (data.first_read, data.measured[0]) if isinstance(data, Scheme) else (data,)
        check_resumable(folder, self._settings.fisher.kind, generator, *read)

    def _problem_of(
        self, data: Batches, generator: torch.Generator | None, replicate: bool = False
    ) -> tuple[Problem, BayesianParameters, FirstBatchKnown]:
        """What is fitted, as the first batch of some data tells."""
        problem = self._settings.problem(_plain(self.model), self.likelihood, generator)
        problem = problem.on(current())
        known = FirstBatchKnown(seeded(data, generator))
        parameters = self._look_at(known)
        network = network_of(self.model, parameters.names, self._settings)
        backend = choose_backend(network, self._backend, parameters.blocks)
        problem = replace(
            problem,
            model=network,
            blocks=parameters.blocks,
            backend=backend,
            replicate=replicate or self._settings.kind.is_dense,
        )
        return problem, parameters, known

    def _take(
        self,
        found: CurvatureFit,
        parameters: BayesianParameters,
        num_data: int,
        mode: str,
        keep: stored.StoredFit | None,
    ) -> None:
        """Make a fit the one that is predicted with; one that is refused leaves the last one."""
        plain = unwrapped(self.model)
        others = fingerprint(plain, parameters.names)
        mean = parameters.flat(plain)
        order = None if parameters.order is None else parameters.order.to(mean.device)
        prior_mean = prior_mean_from(self._given_prior_mean, plain, parameters.names)
        per_seen = num_data / found.seen.num_examples
        of_noise = None
        if type(self.likelihood) is Gaussian:
            power = 4 if self._settings.fisher.kind == "empirical" else 2
            of_noise = Noise(found.seen.num_outputs * per_seen, power)
        with _EXCHANGE:
            posterior = GaussianPosterior(
                mean,
                found.curvature,
                num_data,
                self._prior_precision,
                order,
                prior_mean,
                self._temperature,
            )
            fitted = Fitted(
                self.model,
                self.likelihood,
                self._settings,
                parameters,
                posterior,
                found.seen.nll * per_seen,
                others,
                mode,
                of_noise,
            )
            fitted = fitted if keep is None else keep.finish(fitted)
            self._parameters, self._prior_mean = parameters, prior_mean
            self._fitted = fitted

    def _read(
        self, is_saved: bool, generator: torch.Generator | None, batches: Batches, what: str
    ) -> Pairs:
        """Batches of a fit, of which at least one target must count.

        Where labels are drawn, or sums are saved, it matters where the examples of one process are
        among those of all.

        Questions about numbers that still lie on the CPU are asked there: a fit moves them.
        """
        ranks = current()
        ignored = getattr(self.likelihood, "ignore_index", None)
        of_targets = None if look_at_shapes(self.likelihood) else self._first_parameter.device
        checked = self._checked(batches, generator, None, of_targets)
        counted = Counted(
            checked,
            self.likelihood.counts_any,
            "" if ignored is None else f"ignore_index={ignored}",
            what,
            ranks,
        )
        if ranks.size == 1 or not (is_saved or self._settings.fisher.kind == "mc"):
            return counted
        source = source_of(batches)
        return Placed(counted, place_of(ranks, source, lambda: [len(y) for _, y in checked]))

    def _on_device(self, batches: Batches, generator: torch.Generator | None = None) -> Checked:
        device = self._first_parameter.device
        return self._checked(batches, generator, device, device)

    def _checked(
        self,
        batches: Batches,
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        of_targets: torch.device | None = None,
    ) -> Checked:
        if not isinstance(batches, FirstBatchKnown):
            batches = seeded(batches, generator)
        dtypes = {p.dtype for p in self.model.parameters()}
        return Checked(batches, device, dtypes, self._read_batch, of_targets)

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

    @property
    def _posteriors(self) -> Sequence[GaussianPosterior]:
        """The fitted posterior, in a list that is empty before a fit."""
        return [] if self._fitted is None else [self._fitted.posterior]

    @on_all_ranks("gather")
    def gather(self) -> "Laplace":
        """Make a sharded posterior whole on every process, which may then work on its own.

        All processes call it. A whole posterior stays as it is.

        Returns:
            The object itself.

        Raises:
            RuntimeError: Before a fit; if not all processes that share the blocks take part.
        """
        posterior = self._state.posterior.gathered()
        with _EXCHANGE:
            self._fitted = self._state.with_posterior(posterior)
        return self

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
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        prior_precision = self._check_prior_precision(value)
        with _EXCHANGE:
            if self._fitted is not None:
                posterior = self._fitted.posterior.with_prior_precision(prior_precision)
                self._fitted = self._fitted.with_posterior(posterior)
            self._prior_precision = prior_precision

    @property
    def temperature(self) -> float:
        """T of the likelihood; setting it needs no refit."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        temperature = check_temperature(value)
        with _EXCHANGE:
            if self._fitted is not None:
                posterior = self._fitted.posterior.with_temperature(temperature)
                self._fitted = self._fitted.with_posterior(posterior)
            self._temperature = temperature

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"]:
        """The prior's mean, one number or `[D]`, float64; setting it needs no refit.

        Raises:
            RuntimeError: As `param_names`.
        """
        device = unwrapped(self.model).get_parameter(self._known.names[0]).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return zero if self._prior_mean is None else self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: PriorMean) -> None:
        prior_mean = prior_mean_from(value, unwrapped(self.model), self._known.names)
        with _EXCHANGE:
            if self._fitted is not None:
                posterior = self._fitted.posterior.with_prior_mean(prior_mean)
                self._fitted = self._fitted.with_posterior(posterior)
            self._given_prior_mean, self._prior_mean = value, prior_mean

    def _check_prior_precision(
        self, value: PriorPrecision, parameters: BayesianParameters | None = None
    ) -> Tensor:
        first = self._first_parameter
        parameters = self._parameters if parameters is None else parameters
        prior_precision = torch.as_tensor(value, dtype=torch.float64, device=first.device)
        prior_precision = prior_precision.detach().clone()
        # As long as there are no blocks, the fit that finds them checks their number.
        num_blocks = len(parameters.block_names) if parameters else prior_precision.numel()
        check_prior_precision(prior_precision, num_blocks, wide(first.dtype))
        return prior_precision

    @on_all_ranks("sample")
    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw Bayesian parameters, `[n, D]`, in the model's order."""
        if n < 1:
            raise ValueError(f"The number of samples must be at least 1, got {n}.")
        return self.posterior.sample(n, generator)

    @on_all_ranks("log_marginal_likelihood")
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

    @over_whole_model(_model_of)
    @on_all_ranks("functional")
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
            outputs: Look at some outputs only: indices `[B, k]` into the (flattened) outputs of
                each example, or a number k for the k largest; in their order, mean `[B, k]` and
                covariance `[B, k, k]`. Many classes cost no more than few then.
            joint: Give the covariance between inputs, too, as a Gaussian process has it:
                `[B, C, B, C]` (`[B, T·C, B, T·C]`, `[B, k, B, k]`), entry `[n, i, m, j]` that of
                output i at input n with output j at input m. Inputs that do not fit into the
                memory bound together take a pass for every two groups of them.
            positions: Look at some positions of outputs `[B, T, C]` only, as `predict`. The mean is
                `[B, p, C]` (`[B, C]` for one position), the covariance as of a network with these
                outputs. `outputs` are those at each position then: a number k for the k largest,
                `[B, p, k]`, or indices `[B, p, k]` below C.

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
            return grids.joint(state, x, outputs, positions)
        deltas = [state.posterior.prior_precision.unsqueeze(0)]
        mean, covariances = grids.moments([state], x, deltas, diagonal, outputs, positions)
        return mean, covariances[0, 0]

    @over_whole_model(_model_of)
    @on_all_ranks("predict_grid")
    def predict_grid(
        self,
        x: Inputs | Record,
        prior_precisions: Grid,
        link: str = "probit",
        *,
        positions: Positions | None = None,
    ) -> list[Distribution]:
        """The closed-form `"glm"` predictive at several prior precisions, in one pass.

        Args:
            x: Inputs, `[B, ...]`.
            prior_precisions: One δ per grid point, `[P]`, or one for each block, `[P, blocks]`; a
                tensor or a list.
            link: As `predict`.
            positions: As `predict`.

        Returns:
            P predictives of batch shape `[B]`; the posterior's own prior precision stays.

        Raises:
            ValueError: If there is no prior precision, or one that is not positive; as `predict`.
            RuntimeError: As `predict`.
        """
        state = self._unchanged_state
        return grids.predictives([state], x, [prior_precisions], link, positions)[0]

    @over_whole_model(_model_of)
    @on_all_ranks("predict")
    def predict(
        self,
        x: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str = "probit",
        positions: Positions | None = None,
    ) -> Distribution:
        """The predictive distribution p(y | x), batch shape `[B]`.

        Args:
            x: Inputs, `[B, ...]`: a tensor, several in a tuple, or a mapping or dataclass by name,
                whose entry `labels` (or another of the names of targets that the forward pass does
                not take) is left out.
            method: `"glm"`: linearised network with exact functional covariance, averaged in closed
                form (probit) or over `samples` draws of the outputs. `"glm-mc"`: linearised, weight
                samples by Jacobian-vector products (Eq. 18, as in the paper). `"nn"`: weight
                samples through the network itself. `"map"`: the trained network, no uncertainty.
            samples: Draws; None is the closed form for `"glm"` and 100 for `"glm-mc"` and `"nn"`.
            generator: For the draws; torch's global one if None.
            link: How the closed form of `"glm"` comes from Gaussian logits to class probabilities.
                `"probit"`: the softmax of the logits, each shrunk by its variance (MacKay, 1992).
                `"bridge"`, for `"classification"`: the mean of the Dirichlet distribution that the
                Laplace bridge makes of them (Hobbhahn et al., 2022). It needs the logits' full
                covariance, and approximates best where their variances are of order 1.
            positions: Which positions of outputs `[B, T, C]`, all if None: one, for batch shape
                `[B]` (a language model's last token is -1), or several, `[p]` for all examples or
                `[B, p]`, for batch shape `[B, p]`. They count along T from 0. Negative ones count
                from the end: where the inputs hold an `attention_mask` `[B, T]`, from the last
                position that is not padding, on whichever side padding is. A head that is an
                `nn.Linear` sees these positions alone: nothing of size T·C is made.

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
        _check_method(method, samples)
        links.check_link(link, self.likelihood)
        if link != "probit" and (method != "glm" or samples is not None):
            raise ValueError(
                f'link={link!r} belongs to the closed form of method="glm" without samples: leave '
                "link out, or method and samples."
            )
        state = self._unchanged_state
        if method == "glm" and samples is None:
            deltas = state.posterior.prior_precision.unsqueeze(0)
            return grids.predictives([state], x, [deltas], link, positions)[0][0]
        with torch.inference_mode(False):
            if method == "map":
                return state.likelihood.predictive(self._map_outputs(state, x, positions), None)
            draws = self._draws(state, x, method, samples, generator, positions)
            return state.likelihood.mixture(draws)

    @over_whole_model(_model_of)
    @on_all_ranks("marginals")
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

        In closed form it is a `Normal`: exact for `Gaussian`; for `HeteroscedasticGaussian` the
        normal with the predictive's exact mean and variance. With samples (`"glm-mc"`, `"nn"`,
        `"glm"` with `samples=`) it is the equal mixture of the S normals p(y | f_s), noise
        included, and a quantile is the point where the mean of their distribution functions has the
        value, not a quantile of S numbers. `predict` gives the normal with that mixture's moments.

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
        _check_method(method, samples)
        state = self._unchanged_state
        if method == "glm" and samples is None:
            deltas = state.posterior.prior_precision.unsqueeze(0)
            mean, variances = grids.moments(
                [state], x, [deltas], diagonal=True, positions=positions
            )
            return state.likelihood.marginals(mean, variances[0, 0])
        with torch.inference_mode(False):
            if method == "map":
                mean = self._map_outputs(state, x, positions)
                return state.likelihood.marginals(mean, torch.zeros_like(mean))
            draws = self._draws(state, x, method, samples, generator, positions)
            return state.likelihood.marginal_mixture(draws)

    @staticmethod
    def _map_outputs(
        state: Fitted, x: Inputs | Record, positions: Positions | None
    ) -> Float[Tensor, "batch *outputs"]:
        x, network = state.moved(x), state.network
        with explaining_unbatched(network, x):
            asked = Asked.of(network, x, positions, lambda _: True)
            return asked.shaped(predictive.map_outputs(asked.network, asked.x), None)

    @staticmethod
    def _draws(
        state: Fitted,
        x: Inputs | Record,
        method: str,
        samples: int | None,
        generator: torch.Generator | None,
        positions: Positions | None,
    ) -> Float[Tensor, "samples batch *outputs"]:
        """Samples of the outputs, `[S, B, ..., C]`."""
        num_samples = _DEFAULT_SAMPLES if samples is None else samples
        if method == "glm":
            deltas = state.posterior.prior_precision.unsqueeze(0)
            mean, covariances = grids.moments([state], x, [deltas], positions=positions)
            if state.posterior.is_sharded:
                generator = alike(current(), generator, mean.device)
            outputs = predictive.sample_outputs(
                mean.flatten(1), covariances[0, 0], num_samples, generator
            )
            return outputs.unflatten(2, mean.shape[1:])
        x, network = state.moved(x), state.network
        with explaining_unbatched(network, x):
            draws = state.posterior.sample(num_samples, generator)
            is_linear = method == "glm-mc"
            push = predictive.linearised_outputs if is_linear else predictive.sampled_outputs
            asked = Asked.of(network, x, positions, lambda _: True)
            found = push(asked.network, state.parameters.names, asked.x, draws)
            return asked.shaped(found, None)

    # ------------------------------------------------- tuning and evaluation

    @over_whole_model(_model_of)
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
        link: str = "probit",
        extend: bool | None = None,
        per: str | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> tuning.Tuning:
        """Find the best prior precision, set it and return it.

        On held-out data the first pass is over a wide grid, 1e-4 to 1e8. Where the best lies at its
        end and the metric has not levelled off, further passes go on, to 1e-8 and 1e12 at most.
        Where the neighbours of the best are worse by more than a standard error of the difference
        (paired over the examples), a last pass divides the intervals to them by 8: a resolution of
        a factor of 1.12. Of values that are equally good the middle one is taken. `.flat`,
        `.notes` and `.message` tell how sharp the optimum is, and where the search ended.

        Args:
            loader: Held-out batches `(x, y)`; for `method="grid"`. One pass serves a whole grid. A
                loader that shuffles should do so by torch's global generator or `generator`, so
                that a further pass has the order of the first.
            metric: `"nll"`, `"ece"`, `"brier"` or `"accuracy"` of the `"glm"` predictive; of
                several labels the NLL is summed over those of an example, the others are over all.
            grid: Prior precisions to try, these alone unless `extend=True`; None for 31 from 1e-4
                to 1e8, where the search begins.
            method: `"grid"`, or `"marglik"`: maximise the marginal likelihood, no data needed.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation, and leaves torch's global
                generator alone; that one if None. The `"glm"` predictive draws nothing.
            sigma: Tune the noise of a regression, too, and set it: the `likelihood` is then a
                `Gaussian` of the best sigma, and posterior and evidence are those of a fit with it.
                If None, a sigma that was never given is tuned, unless a `grid` is given; one that
                was given stays. On held-out data the best sigma for each prior precision has a
                closed form (`metric="nll"`, no `grid`, not with `fisher="empirical"`). One sigma
                per output is multiplied by a common factor, the `sigma_factor` of the table.
            link: As `predict`, for `method="grid"`.
            extend: Whether to go on from the grid and to refine it, as above. None: from the
                default grid, not from one that is given.
            per: With `method="marglik"`, one prior precision for each `"kind"` of layer (linear,
                convolution, embedding, normalisation, bias, other) or for each `"block"`; None for
                one. A group without curvature takes what is best for all together.
            resume: A folder of its own, for `method="grid"`, in which every minute, and at Ctrl-C,
                the scores of the examples so far are saved. The same call in another process goes
                on from there, as `fit` does, and ends bit for bit as one that was never broken
                off. Fit, data, options and the number of processes must be the same.

        Returns:
            The best value, the metric there, and `.table` with every value tried; `.sigma` if it
            was tuned.

        Raises:
            ValueError: For an unknown method or metric, a grid that is empty or not positive, an
                empty loader or one whose targets are all ignored; if the marginal likelihood has no
                optimum; for `sigma` with another likelihood, or residuals of zero; for an argument
                that the method does not use; for `per` with a curvature that is one block; for
                `resume` as `fit`.
            RuntimeError: Before a fit.
            OSError: If the folder of `resume` cannot be written to.
        """
        if method == "marglik":
            is_given = any(x is not None for x in (loader, grid, generator, extend, resume))
            if is_given or (metric, link) != ("nll", "probit"):
                raise ValueError(
                    'method="marglik" uses neither a loader, a generator, a grid, extend, '
                    "resume, a link nor a metric."
                )
            found, fitted = tune.by_evidence(self._state, sigma, per)
        elif method == "grid":
            if loader is None:
                raise ValueError(
                    'method="grid" needs held-out data: pass a loader, or use method="marglik".'
                )
            if per is not None:
                raise ValueError(
                    f'per={per!r} tunes by the marginal likelihood: pass method="marglik", and no '
                    "loader."
                )
            self._state.check_model()
            links.check_link(link, self.likelihood)
            check_resumable(resume, "exact", generator, loader)
            self._check_shared(loader)
            passes = replayed(with_progress(loader, progress, "tune"), generator)
            wanted = tune.Wanted(metric, grid, extend, sigma, isinstance(loader, Iterator))
            states: FitStates | None = None
            saved: Passes = NOT_SAVED
            if resume is not None:
                if self._state.posterior.is_sharded:
                    raise ValueError(
                        "`resume` needs the whole posterior on each process: fit with "
                        "`replicate=True`, or call `la.gather()` before `la.tune`."
                    )
                asked = {**wanted.as_plain(), "link": link}
                states = states_of_tuning(resume, self._state, current(), **asked)
                saved = SavedPasses(states, self._state.posterior.mean.device, current(), "tuning")
            found, fitted = tune.on_data(
                self._state,
                partial(self.predict_grid, link=link),
                lambda: self._on_device(passes()),
                wanted,
                saved,
            )
            if states is not None:
                current().exchange(None)
                states.remove()
        else:
            raise ValueError(f"Unknown method={method!r}: use 'grid' or 'marglik'.")
        if fitted is None:
            self.prior_precision = torch.tensor(found.prior_precision, dtype=torch.float64)
            return found
        with _EXCHANGE:
            self._fitted, self.likelihood = fitted, fitted.likelihood
            self._prior_precision = fitted.posterior.prior_precision
        return found

    @staticmethod
    def _check_shared(loader: Batches) -> None:
        """Require held-out data that the processes share, where there are several."""
        ranks = current()
        if ranks.size > 1:
            check_shared(ranks, loader)
            refuse_misleading(data_size(loader))

    @over_whole_model(_model_of)
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
        link: str = "probit",
        intervals: bool = True,
        level: float = 0.95,
        num_resamples: int = 500,
    ) -> Report:
        """Accuracy, NLL and calibration on labelled data; OOD detection by the uncertainty.

        Each metric has a confidence interval over the targets that count, taken as independent:
        those of one text or picture are not quite, and their intervals too narrow.

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
            num_resamples: Draws of the examples, for the metrics whose interval needs them. They
                have a generator of their own.

        Returns:
            The metrics by name, each a float with `.low` and `.high`, as `metrics.evaluate` has
            them; for several labels as `metrics.evaluate_multilabel`; for regression as
            `metrics.evaluate_regression`, with OOD detection by the variance. `metrics.compare`
            takes two of them.

        Raises:
            ValueError: As `predict`; for an empty loader or one whose targets are all ignored; for
                `ood` with a regression whose predictive is not normal; for a level that is not
                between 0 and 1, or fewer than two draws.
        """
        self._state.check_model()
        for data in (loader, *(ood or {}).values()):
            self._check_shared(data)

        def predict(x: Inputs) -> Distribution:
            return self.predict(x, method, samples, generator, link=link)

        def batches(data: Batches) -> Batches:
            return self._on_device(with_progress(data, progress, "evaluate"), generator)

        return evaluate_predictions(
            predict,
            self.likelihood,
            batches(loader),
            {name: batches(data) for name, data in (ood or {}).items()},
            self._settings.class_dim,
            intervals=intervals,
            level=level,
            num_resamples=num_resamples,
            in_turn=self._state.posterior.is_sharded,
        )

    @over_whole_model(_model_of)
    @on_all_ranks("uncertainty")
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
            The three, of the predictive's batch shape `[B]`; of a regression `[B, C]`.

        Raises:
            ValueError: For `method="map"`, which has no uncertainty about the parameters; as
                `predict`.
            TypeError: As `predict`.
            RuntimeError: As `predict`.

        Reference:
            Houlsby, Huszár, Ghahramani, Lengyel. Bayesian active learning for classification and
            preference learning. 2011.
        """
        _check_method(method, samples)
        if method == "map":
            raise ValueError(
                'method="map" has one setting of the parameters and no uncertainty about them: use '
                "'glm', 'glm-mc' or 'nn'."
            )
        state = self._unchanged_state
        if method == "glm" and samples is None and has_variance_in_closed_form(state.likelihood):
            deltas = [state.posterior.prior_precision.unsqueeze(0)]
            mean, variances = grids.moments([state], x, deltas, diagonal=True, positions=positions)
            return of_moments(state.likelihood, mean, variances[0, 0])
        with torch.inference_mode(False):
            draws = self._draws(state, x, method, samples, generator, positions)
            return of_draws(state.likelihood, draws)

    # -------------------------------------------------------------- on disk

    @over_whole_model(_model_of)
    @together("save")
    def save(self, path: str | Path, *, own_likelihood: bool = False, parts: bool = False) -> None:
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
            parts: Write a folder of that name instead, with a file for each block and an index of
                them, for `load(..., mmap=True)`. Blocks that are mapped from the same folder are
                not written again. What was there before is removed once the index is complete.

        Raises:
            RuntimeError: Before a fit.
            ValueError: If the likelihood is an instance of a user's class, unless
                `own_likelihood`; if its `options` are not plain data, or the negative
                log-likelihood is not finite.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder (with `parts` a file), a device or may not be written;
                if the disk is full; if somebody else is writing to the folder. What was there
                before is still there.
        """
        state, ranks = self._unchanged_state, current()
        if state.posterior.is_sharded or ranks.rank == 0:
            write = stored.save_parts if parts else posterior_file.save
            write(Path(path), state, own_likelihood)
        # Nobody goes on before the file is there.
        ranks.exchange(None)

    @over_whole_model(_model_of)
    def export(
        self,
        path: str | Path,
        example: Inputs | Record,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        link: str = "probit",
    ) -> None:
        """Write the predictive as a program that runs without this package, atomically.

        The program holds the network. It is called as the model is, with any number of examples
        (inputs that are no tensors are left out: they are fixed to what they are in `example`), and
        gives tensors by their names, with positions `[B, T, ...]` where the model has them:

        - `"probs"`: of `"classification"` and `"multilabel"` `[B, C]`, of `"binary"` `[B]`; with
          them `"logits"` and their `"variance"`, `[B, C]`;
        - of `"regression"` `"mean"` and `"variance"` `[B, C]` and `"covariance"` `[B, C, C]` of y,
          which include σ².

        `torch.export.load(path).module()(x)["probs"]` reads and calls a `.pt2`; a `.onnx` has
        inputs named as the model's arguments, or `input` where they have no names.

        Args:
            path: The file, `.pt2` for `torch.export` or `.onnx`, in a folder that exists.
            example: Inputs as `predict` takes them, one example or more. Their sizes but for the
                number of examples are those that the program takes.
            method: `"glm"`: the closed form, of a posterior over the last layer, an `nn.Linear`.
                `"nn"`: samples of the parameters through the network, of any posterior; the file
                holds them all, and the program gives the same numbers every time. Logits and mean
                are averages over the samples then.
            samples: Draws for `"nn"`, 100 if None.
            generator: For the draws; torch's global one if None.
            link: For `"glm"`, as `predict` takes it.

        Raises:
            NotImplementedError: If torch cannot trace the model for any number of examples, for
                `"glm"` with a posterior over other layers, for a likelihood of a user's class, or
                for a sharded posterior.
            ValueError: For another suffix, an unknown method or link, or an argument that the
                method does not use; as `predict`.
            ImportError: For `.onnx` without the packages `onnx` and `onnxscript`.
            RuntimeError: If the program does not give for the example what `predict` gives; as
                `predict`.
            OSError: As `save`.
        """
        state = self._unchanged_state
        if state.posterior.is_sharded:
            raise NotImplementedError(
                "A sharded posterior cannot be exported, as each process holds some of its blocks: "
                "call `la.gather()` on all of them before."
            )
        export(state, Path(path), example, method, samples, generator, link)

    @classmethod
    @over_whole_model(lambda cls, path, model, **_: model)
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
        mmap: bool = False,
    ) -> "Laplace":
        """Read a posterior that `save` wrote, for the same trained model.

        A file that was changed in any byte is refused, by its checksum. Files of the format before
        (3) have none; of them all else is checked. That directions are orthonormal is checked to
        single precision with random vectors, at the cost of a few products with each.

        Args:
            path: The file, or the folder that `save(..., parts=True)` wrote.
            model: The model, with the parameters that it had at the fit.
            likelihood: An instance of the class of your own that the file names, with the `options`
                that the file has; None if the likelihood is one of this package.
            backend: For another fit, as the constructor takes it; likewise the next three.
            fisher: For another fit.
            factor_dtype: For another fit.
            mc_samples: For another fit.
            memory_bound: As the constructor takes it; likewise the next one.
            batch: How batches are read.
            mmap: Use the directions and magnitudes as they lie on disk, for a model on the CPU:
                what computes with a block reads its part of the file, and the system lets go of it
                when memory is short. Any number of processes share one copy. All is read once here,
                for the checksum. The file must not be written to; predictions refuse it then.

        Raises:
            ValueError: If the file is damaged, of another format, or does not fit the model; if a
                part of a folder is damaged, missing or of another save; if `likelihood` is missing,
                superfluous or not that of the fit; for `mmap` with a model on an accelerator.
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If it is a folder without a posterior in parts.
            OSError: If it cannot be read.
        """
        if mmap:
            stored.check_mappable(next(model.parameters()).device, "mmap=True")
        header, tensors, mapped = stored.load(Path(path), mmap)
        plain = _plain(model)
        posterior_file.check_names(header, dict(plain.named_parameters()))
        posterior_file.check_calls(header, plain)
        la = cls(
            model,
            likelihood=likelihood_from_json(header.likelihood, likelihood),
            curvature=header.curvature,
            params=header.param_names,
            rank=header.rank,
            joint=header.joint,
            # Files of earlier versions may name what had no effect.
            sharing=header.sharing if header.curvature in WITH_FACTORS else "expand",
            class_dim=header.class_dim,
            backend=backend,
            fisher=fisher,
            factor_dtype=factor_dtype,
            mc_samples=mc_samples,
            memory_bound=memory_bound,
            batch=batch,
        )
        parameters = BayesianParameters.of(
            plain, header.param_names, la._settings, None, header.calls
        )
        posterior = posterior_file.posterior_from(header, tensors, parameters, plain)
        others = fingerprint(plain, parameters.names)
        if wrong := changed(header.others, others):
            raise ValueError(
                f"The model's {wrong[0]} is not that of the fit: load the checkpoint that the "
                "posterior was fitted on."
            )
        la._parameters = parameters
        la._prior_precision = posterior.prior_precision
        la._given_prior_mean = 0.0 if posterior.prior_mean is None else posterior.prior_mean
        la._prior_mean = posterior.prior_mean
        la._temperature = posterior.temperature
        la._fitted = Fitted(
            model,
            la.likelihood,
            la._settings,
            parameters,
            posterior,
            header.nll,
            others,
            header.mode,
            None if header.noise is None else Noise(**header.noise),
            mapped=stored.with_blocks(mapped, posterior),
        )
        return la


def _plain(model: nn.Module) -> nn.Module:
    """The model without wrappers, found to be one that curvature is defined for."""
    with with_all_ranks(model):
        check_usable(model)
        plain = unwrapped(model)
        check_deterministic(plain)
        check_finite(unwrapped(with_own_values(model)))
    return plain


def _check_method(method: str, samples: int | None) -> None:
    """Require a way to predict, and samples where there are some."""
    if method not in METHODS:
        raise ValueError(f"Unknown method={method!r}: use one of {', '.join(METHODS)}.")
    if samples is not None and (method == "map" or samples < 1):
        raise ValueError(
            f'samples={samples} with method="{method}": give a positive number of samples to '
            '"glm", "glm-mc" or "nn", none to "map".'
        )


def _expected_of(scheme: Scheme, num_data: SupportsIndex | None) -> Expected:
    """N of a fit whose data are given."""
    if num_data is not None:
        return Expected(check_num_data(num_data))
    for data in (scheme.first_read, scheme.measured[0]):
        refuse_misleading(data_size(data))
    return Expected(None)


@over_whole_model(lambda posteriors, *_, **__: posteriors[0].model)
def predict_grids(
    posteriors: Sequence[Laplace],
    x: Inputs | Record,
    prior_precisions: Sequence[Grid],
) -> list[list[Distribution]]:
    """`Laplace.predict_grid` for several fits of one model, which share the backward passes.

    Args:
        posteriors: Fitted approximations of the same model and Bayesian parameters.
        x: Inputs, `[B, ...]`.
        prior_precisions: For each of them a grid as `Laplace.predict_grid` takes it, all of one
            length.

    Returns:
        For each of the posteriors its predictives.

    Raises:
        ValueError: If they are not of one model; as `Laplace.predict_grid`.
        RuntimeError: As `Laplace.predict`.
    """
    states = [la._unchanged_state for la in posteriors]
    return run_together(
        "predict_grids",
        [state.posterior for state in states],
        lambda: grids.predictives(states, x, prior_precisions),
    )
