"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias.curvature.fits.dense import WHOLE
from laplace_debias.curvature.fits.kfac import Fitted, Problem
from laplace_debias.curvature.layers.backends import choose_backend
from laplace_debias.curvature.layers.blocks import Block, Sharing, curvature_blocks, parameter_order
from laplace_debias.curvature.losses.cotangents import Fisher
from laplace_debias.curvature.losses.likelihood import Categorical, Likelihood, likelihood_from
from laplace_debias.curvature.network.batches import Batches, OnDevice, with_progress
from laplace_debias.curvature.network.class_dim import (
    check_layout,
    classes_last,
    warn_of_probabilities,
)
from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.curvature.network.first_batch import FirstBatchKnown
from laplace_debias.curvature.network.inputs import Inputs, call, move, take
from laplace_debias.curvature.network.last_layer import is_last_layer, needs_example
from laplace_debias.curvature.network.selection import (
    ParameterSelection,
    check_parameters,
    select_parameters,
)
from laplace_debias.curvature.network.shadow import (
    check_deterministic,
    check_finite,
    check_no_autocast,
    shadow,
)
from laplace_debias.laplace import predictive, tuning
from laplace_debias.laplace.data_size import (
    Expected,
    data_size,
    expected_of_all,
    expected_of_some,
    refuse_misleading,
)
from laplace_debias.laplace.description import Described
from laplace_debias.laplace.evaluation import evaluate_predictions
from laplace_debias.laplace.files import posterior_file as serialization
from laplace_debias.laplace.functional.moments import Wanted, functional_moments
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.posterior_range import check_num_data, check_prior_precision
from laplace_debias.laplace.settings import FOLDS, MEMORY_BOUND, Examples, FitSettings
from laplace_debias.system.randomness import seeded
from laplace_debias.system.threads import Lock

PriorPrecision = float | Tensor
# One δ a grid point, [P], or one for each block, [P, blocks].
Grid = Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | Sequence[float]

MODES = ("full", "mini", "debiased", "crossfit", "shrinkage")
METHODS = ("glm", "glm-mc", "nn", "map")
_DEFAULT_SAMPLES = 100
# Examples that are run before a fit, to see what the outputs are.
_FIRST_EXAMPLES = 4
# Held for the moment in which a fit or a prior precision takes the place of another.
_EXCHANGE = Lock()


@dataclass(frozen=True)
class _Selected:
    """The Bayesian parameters, their blocks, and `parameter_order`."""

    names: list[str]
    blocks: list[Block]
    order: Tensor | None


class Laplace:
    r"""A Laplace approximation of a trained network's posterior.

    The posterior is $N(\theta^*, P^{-1})$ with $P = N C + \mathrm{diag}(\delta)$: θ* the trained
    parameters, C the curvature of the mean loss, N the number of training examples and δ the prior
    precision (Eq. 4 and 17 of Tatzel et al., 2025, "Debiasing mini-batch quadratics for
    applications in deep learning"). The model itself is never changed.

    Any number of threads may predict, sample, evaluate and save with one object, and fit objects of
    one model or of several. Where a thread fits or tunes an object that others use, a call of
    theirs sees it as it was before or as it is after, `evaluate` batch by batch.

    Randomness is torch's global one, or the `generator`'s of a call. With a generator the call is
    a function of it and of the data, the order of a shuffling loader included, and torch's global
    generator on the CPU is left as it was.

    Args:
        model: A trained network in eval mode, from inputs `[B, ...]` to outputs `[B, C]`.
        likelihood: `"classification"` (softmax), `"regression"` (Gaussian noise `sigma`),
            `"binary"` (one logit), `"multilabel"` (one logit a label, several of which may apply;
            targets 0 or 1, `[B, C]`), or a `Likelihood`.
        curvature: `"kfac"` (Kronecker-factored), `"ekfac"` (the same directions, exact curvature
            along each of them), `"diag"` (the exact diagonal), `"lowrank"` (the leading
            eigenvectors of the whole matrix) or `"full"` (the whole matrix, for small networks).
        params: Which parameters are Bayesian: `"all"`, `"weights"` (no biases), `"last_layer"`,
            names, or a predicate `(name, parameter) -> bool`. Frozen ones never are. The last layer
            is the one that the outputs come from, whatever was registered last. Unless the model is
            an `nn.Sequential` that ends in one of torch's layers, the first `fit` finds it by
            running an example, and `param_names` and `block_names` are not known before.
        prior_precision: δ, one number or one a block (see `block_names`).
        backend: `"backpack"`, `"hooks"`, or `"auto"`: BackPACK where it can, hooks elsewhere. Both
            give the same factors.
        fisher: `"exact"` (the loss Hessian in closed form), `"mc"` (labels drawn from the model) or
            `"empirical"` (the true labels).
        factor_dtype: In what Kronecker factors are summed and decomposed.
        sigma: Noise of `"regression"`: standard deviation, one number or one an output.
        mc_samples: Labels an example for `fisher="mc"`.
        joint: Whether a layer's weight and bias make one block instead of two.
        sharing: How the positions of a convolution or a sequence share a weight, `"expand"` or
            `"reduce"`: one for all, or a mapping from layers' paths.
        rank: Directions of `"lowrank"`, 20 if None.
        memory_bound: Bytes of working memory for output gradients, in `fit` and `predict`. Batches
            are cut to it; results do not depend on it.
        class_dim: Which dimension of the outputs has the classes: None or -1 for `[B, ..., C]`, 1
            for `[B, C, ...]` as `F.cross_entropy` has them. With 1 everything is as if the model
            gave `outputs.movedim(1, -1)`: predictives, functional means and covariances come out
            as `[B, ..., C]`. Targets with an entry for every output (regression, `[B, C, ...]`)
            are moved with them. With None a fit asks where its first batch's shapes fit both.

    Attributes:
        model: The model.
        likelihood: The likelihood.

    Raises:
        ValueError: For an unknown name, a prior precision that is not positive, a model that holds
            NaN, or one with dropout or batch normalisation in training mode.
        NotImplementedError: If a Bayesian parameter's layer has no Kronecker form here; for
            BackPACK with a model that it would get wrong.

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
        memory_bound: int = MEMORY_BOUND,
        class_dim: int | None = None,
    ) -> None:
        self._settings = FitSettings(
            curvature,
            Fisher(fisher, mc_samples),
            factor_dtype,
            joint,
            sharing,
            rank,
            memory_bound,
            class_dim,
        )
        check_deterministic(model)
        check_finite(model)
        self.model = model
        self.likelihood = likelihood_from(likelihood, sigma)
        self._params = params
        self._selected = None if needs_example(model, params) else self._select(None)
        if class_dim not in (None, -1) and backend == "backpack":
            raise NotImplementedError(
                f"BackPACK does not see how class_dim={class_dim} moves the outputs' dimensions: "
                "use backend='hooks' or 'auto', or put the classes last in the model."
            )
        self._backend = choose_backend(classes_last(model, class_dim), backend)
        self._prior_precision = self._check_prior_precision(prior_precision)
        self._posterior: GaussianPosterior | None = None
        self._others: dict[str, int] = {}
        self._nll: float = float("nan")
        self._mode: str | None = None

    def __repr__(self) -> str:
        """Model, likelihood, curvature, Bayesian parameters, blocks, δ, N and the fit's mode."""
        is_known, is_fitted = self._selected is not None, self._posterior is not None
        return str(
            Described(
                self.model,
                self.likelihood,
                self._settings.curvature,
                self.param_names if is_known else None,
                self.block_names if is_known else None,
                self._prior_precision,
                self._mode,
                self.num_data if is_fitted else None,
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
    def _blocks(self) -> list[Block]:
        return self._known.blocks

    @property
    def _known(self) -> _Selected:
        if self._selected is None:
            raise RuntimeError(
                f'params="last_layer" of a {type(self.model).__name__} is found by running an '
                "example, which the first fit does: call `fit(train_loader)` first, or name the "
                "parameters, params=[...]."
            )
        return self._selected

    def _select(self, example: Inputs | None) -> _Selected:
        names = select_parameters(self.model, self._params, example)
        check_parameters(self.model, names)
        blocks = curvature_blocks(self.model, names, self._settings.joint, self._settings.sharing)
        return _Selected(names, blocks, parameter_order(self.model, names, blocks))

    def _look_at(self, batches: FirstBatchKnown) -> None:
        """Run examples of the first batch, and find or check what they tell of the model.

        They tell the last layer, in which dimension the classes are, and logits from probabilities.

        Raises:
            ValueError: If there is no last layer, it is not what it was, or there is no batch; if
                the shapes leave open where the classes are.
        """
        if self._selected is None and not batches.first:
            raise ValueError("The data holds no example: pass a loader with at least one batch.")
        for x, y in self._on_device(batches.first):
            if is_last_layer(self._params):
                found = self._select(x)
                if self._selected is None:
                    self._selected = found
                    self._prior_precision = self._check_prior_precision(self._prior_precision)
                if self._selected.names != found.names:
                    raise ValueError(
                        f'params="last_layer" was {self._selected.names}, but now the outputs come '
                        f"from {found.names}: the model has changed, build a new Laplace."
                    )
            few = slice(0, _FIRST_EXAMPLES)
            with torch.no_grad():
                outputs = call(shadow(self._network), take(x, few))
            # What is no tensor, or not of these examples, is refused where the fit looks at it.
            if not isinstance(outputs, Tensor):
                continue
            shape = torch.Size((len(y), *outputs.shape[1:]))
            check_layout(shape, y, self._settings.class_dim)
            if isinstance(self.likelihood, Categorical):
                warn_of_probabilities(outputs)

    @property
    def _network(self) -> nn.Module:
        """The model with its outputs `[B, ..., C]`."""
        return classes_last(self.model, self._settings.class_dim)

    @property
    def _first_parameter(self) -> nn.Parameter:
        """The first Bayesian parameter; the first trainable one as long as they are not known."""
        if self._selected is None:
            return next(p for p in self.model.parameters() if p.requires_grad)
        return self.model.get_parameter(self._selected.names[0])

    # ---------------------------------------------------------------- fitting

    def fit(
        self,
        train_loader: Batches,
        mode: str = "full",
        num_data: SupportsIndex | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
        *,
        scale: bool = False,
    ) -> "Laplace":
        """Fit the posterior's curvature.

        Args:
            train_loader: Batches `(x, y)` of training data. `"ekfac"` in full mode goes through
                them twice.
            mode: `"full"`: all batches. `"mini"`: the first batch alone (biased: directions and
                magnitudes are both the extremes of that batch). `"debiased"`: directions from the
                first batch, magnitudes from the second (Eq. 9). `"crossfit"`: directions from the
                whole first batch, magnitudes out of fold (8 folds of its examples). `"shrinkage"`:
                directions from the whole first batch, its factors' eigenvalues corrected in closed
                form (K-FAC alone).
            num_data: N, the number of training examples, which the curvature is scaled to whatever
                the fit sees (a subset, say, that stands for all). If None, N is the number of
                examples that the loader's sampler goes through, or for `"full"` of data that does
                not tell its size the number of examples seen. A sampler that repeats examples or
                splits them over processes does not tell N.
            generator: Seeds the labels of `fisher="mc"` and the loader's order and augmentation,
                and leaves torch's global generator alone; that one if None.
            progress: Show a progress bar over the batches of a full fit, or of the scale.
            scale: Scale what one or two batches tell by the whole loader's curvature of the loss in
                the outputs, which takes a forward pass over it (see `fit_batches`).

        Returns:
            The object itself.

        Raises:
            ValueError: For an unknown mode, an empty loader, fewer than two batches for
                `"debiased"`, targets or outputs that do not fit the likelihood, NaN in the outputs;
                if the model draws random numbers or mixes the examples of a batch; if every target
                is ignored; for `num_data` below 1 or above 2**53, and without it if the loader does
                not tell N, or if a full fit sees another number of examples than the loader told.
            TypeError: For targets or inputs of the wrong dtype, `num_data` that is not an integer.
            NotImplementedError: If the forward pass uses Bayesian parameters outside of their
                layers, or a layer in a way that has no Kronecker form here.
            RuntimeError: Under autocast.
        """
        if mode not in MODES:
            raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
        if scale and mode == "full":
            raise ValueError('mode="full" sees all data, whose scale it has: leave out scale=True.')
        # Of the other modes the batches are held, and may come from anything.
        seen = train_loader if mode == "full" else []
        again = train_loader if scale else None
        given = None if num_data is None else check_num_data(num_data)
        self._settings.check(Examples(seen, shrinkage=mode == "shrinkage", scale=again))
        if mode == "full":
            expected = expected_of_all(train_loader, given)
            data = with_progress(train_loader, progress, "fit")
            return self._fit(Examples(data), expected, generator, mode)
        wanted = 2 if mode == "debiased" else 1
        expected = expected_of_some(train_loader, given, mode, wanted)
        batches = list(itertools.islice(seeded(train_loader, generator), wanted))
        if len(batches) < wanted:
            raise ValueError(
                f'mode="{mode}" needs {wanted} batch(es), the loader gave {len(batches)}: use a '
                "smaller batch size or more data."
            )
        examples = Examples(
            batches[:1],
            batches[1:] or None,
            FOLDS if mode == "crossfit" else None,
            mode == "shrinkage",
            None if again is None else with_progress(again, progress, "scale"),
        )
        return self._fit(
            examples, expected, generator, mode if again is None else f"{mode}, scaled"
        )

    def fit_batches(
        self,
        directions: Batches,
        magnitudes: Batches | None = None,
        *,
        num_data: SupportsIndex | None = None,
        folds: int | None = None,
        shrinkage: bool = False,
        generator: torch.Generator | None = None,
        scale: Batches | None = None,
    ) -> "Laplace":
        """Fit with explicit data: directions from some batches, magnitudes from others.

        Args:
            directions: Batches `(x, y)` that give the eigenbases.
            magnitudes: Batches that the curvature along them is measured on; None for the same.
            num_data: N, as `fit` takes it; the number of examples in `directions` and `magnitudes`
                if None.
            folds: Cross-fit instead: magnitudes from `directions` itself, measured out of so many
                folds; no `magnitudes` then.
            shrinkage: Correct the eigenvalues of K-FAC's factors in closed form instead, without
                folds or `magnitudes`; at least two examples. What is assumed says
                `curvature.fits.shrinkage`.
            generator: Seeds the labels of `fisher="mc"` and what loaders draw, as in `fit`.
            scale: Batches `(x, y)`, say all training data, that take a forward pass each: the
                magnitudes are multiplied by the ratio of the loss's mean curvature in the outputs
                (tr ∇²_f ℓ; 1 − Σ p² for a softmax; of `fisher="empirical"` ‖∇_f ℓ‖²) over these
                to that over the examples that the magnitudes were measured on. A few examples
                rarely hold their share of the hard ones that curve the loss of a confident
                network. None for no scaling.

        Returns:
            The object itself.

        Raises:
            ValueError: As `fit`; also for `folds` with `magnitudes`, fewer than two or more than
                there are examples; for `shrinkage` with one of them, or of another curvature than
                `"kfac"`.
            TypeError: As `fit`; also for data that can be read only once where it is needed twice.
        """
        if num_data is None:
            for data in (directions, magnitudes):
                refuse_misleading(data_size(data))
        expected = Expected(None if num_data is None else check_num_data(num_data))
        examples = Examples(directions, magnitudes, folds, shrinkage, scale)
        return self._fit(examples, expected, generator, examples.mode)

    def _fit(
        self,
        examples: Examples,
        expected: Expected,
        generator: torch.Generator | None,
        mode: str,
    ) -> "Laplace":
        self._settings.check(examples)
        check_deterministic(self.model)
        check_finite(self.model)
        check_no_autocast(self._first_parameter.device)
        with torch.inference_mode(False):
            problem = self._problem(generator)
            known = FirstBatchKnown(seeded(examples.directions, generator))
            self._look_at(known)
            problem = replace(problem, blocks=self._blocks)
            examples = replace(examples, directions=known)
            on_device = partial(self._on_device, generator=generator)
            fitted = self._settings.fit(problem, self.likelihood, examples, on_device)
        self._set_posterior(fitted, expected.given(fitted.seen.num_examples), mode)
        return self

    def _problem(self, generator: torch.Generator | None) -> Problem:
        blocks = [] if self._selected is None else self._blocks
        return self._settings.problem(
            self._network, self.likelihood, blocks, self._backend, generator
        )

    def _set_posterior(self, fitted: Fitted, num_data: int, mode: str) -> None:
        seen = fitted.seen
        others = fingerprint(self.model, self.param_names)
        mean, order = self._flat_parameters(), self._order_on_device()
        nll = seen.nll * (num_data / seen.num_examples)
        if not math.isfinite(nll):
            raise ValueError(
                f"The loss, summed over {num_data} examples, is {nll}: targets are too far from "
                "the outputs for the likelihood (regression: in units of sigma). Check both, or "
                "convert the model to a wider dtype."
            )
        with _EXCHANGE:
            posterior = GaussianPosterior(
                mean, fitted.curvature, num_data, self._prior_precision, order
            )
            # A fit that is refused leaves the one before as it was.
            self._posterior, self._nll, self._others = posterior, nll, others
            self._mode = mode

    def _order_on_device(self) -> Tensor | None:
        order = self._known.order
        return None if order is None else order.to(self._first_parameter.device)

    def _flat_parameters(self) -> Float[Tensor, " parameters"]:
        values = [self.model.get_parameter(name).detach() for name in self.param_names]
        return torch.cat([value.flatten() for value in values])

    def _on_device(self, batches: Batches, generator: torch.Generator | None = None) -> OnDevice:
        if not isinstance(batches, FirstBatchKnown):
            batches = seeded(batches, generator)
        dtypes = {p.dtype for p in self.model.parameters()}
        return OnDevice(batches, self._first_parameter.device, dtypes)

    def _moved(self, x: Inputs) -> Inputs:
        return move(x, self._first_parameter.device, {p.dtype for p in self.model.parameters()})

    # -------------------------------------------------------------- posterior

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian over the Bayesian parameters.

        Raises:
            RuntimeError: Before a fit.
        """
        if self._posterior is None:
            raise RuntimeError("Not fitted yet: call `fit(train_loader)` first.")
        return self._posterior

    @property
    def mean(self) -> Float[Tensor, " parameters"]:
        """θ*, the Bayesian parameters at the fit, flattened in the model's order, `[D]`."""
        return self.posterior.mean

    @property
    def num_data(self) -> int:
        """N, the number of training examples that the posterior stands for."""
        return self.posterior.num_data

    @property
    def block_names(self) -> list[str]:
        """Names of the curvature blocks, in the order that per-block prior precisions take.

        Raises:
            RuntimeError: As `param_names`.
        """
        return [WHOLE] if self._settings.is_whole else [block.name for block in self._blocks]

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """δ; setting it needs no refit."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: PriorPrecision) -> None:
        prior_precision = self._check_prior_precision(value)
        with _EXCHANGE:
            if self._posterior is not None:
                self._posterior = self._posterior.with_prior_precision(prior_precision)
            self._prior_precision = prior_precision

    def _check_prior_precision(self, value: PriorPrecision) -> Tensor:
        first = self._first_parameter
        prior_precision = torch.as_tensor(value, dtype=torch.float64, device=first.device)
        prior_precision = prior_precision.detach().clone()
        # As long as there are no blocks, the fit that finds them checks their number.
        num_blocks = len(self.block_names) if self._selected else prior_precision.numel()
        check_prior_precision(prior_precision, num_blocks, first.dtype)
        return prior_precision

    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        """Draw Bayesian parameters, `[n, D]`, in the model's order."""
        if n < 1:
            raise ValueError(f"The number of samples must be at least 1, got {n}.")
        return self.posterior.sample(n, generator)

    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None
    ) -> Float[Tensor, ""]:
        r"""The Laplace approximation of log p(D), in nats over all N examples, float64.

        $-\sum_n \ell_n + \log N(\theta^* \mid 0, \delta^{-1}) + \tfrac D2\log 2\pi
        - \tfrac12\log\det P$, every constant included. Where the fit saw fewer than N examples,
        the first term is scaled up from those.

        Args:
            prior_precision: δ to evaluate at, differentiable; the current one if None.
        """
        with _EXCHANGE:
            posterior, nll = self.posterior, self._nll
        delta = posterior.prior_precision if prior_precision is None else prior_precision
        delta = torch.as_tensor(delta, dtype=torch.float64, device=self.mean.device)
        check_prior_precision(delta.detach(), len(self.block_names))
        normaliser = 0.5 * len(posterior.mean) * math.log(2 * math.pi)
        return (
            -nll
            + posterior.log_prior(delta)
            + normaliser
            - 0.5 * posterior.log_det_precision(delta)
        )

    # ------------------------------------------------------------- predicting

    def functional(
        self,
        x: Inputs,
        diagonal: bool = False,
        outputs: Int[Tensor, "batch k"] | Sequence[Sequence[int]] | int | None = None,
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

        Raises:
            ValueError: If the inputs or outputs are not finite, or of the wrong rank; if `outputs`
                has no such indices; if the memory bound is too small.
            RuntimeError: As `predict`.
        """
        delta = self.prior_precision.unsqueeze(0)
        mean, covariances = _shared_moments([self], x, [delta], diagonal, outputs)
        return mean, covariances[0, 0]

    def predict_grid(self, x: Inputs, prior_precisions: Grid) -> list[Distribution]:
        """The closed-form `"glm"` predictive at several prior precisions, in one pass.

        Args:
            x: Inputs, `[B, ...]`.
            prior_precisions: One δ a grid point, `[P]`, or one for each block, `[P, blocks]`; a
                tensor or a list.

        Returns:
            P predictives of batch shape `[B]`; the posterior's own prior precision stays.

        Raises:
            ValueError: If there is no prior precision, or one that is not positive; as `predict`.
            RuntimeError: As `predict`.
        """
        return predict_grids([self], x, [prior_precisions])[0]

    def _checked_posterior(self) -> GaussianPosterior:
        posterior = self.posterior
        check_no_autocast(posterior.mean.device)
        current = self._flat_parameters()
        if current.device != posterior.mean.device or current.dtype != posterior.mean.dtype:
            raise RuntimeError(
                f"The model has moved to {current.device}, {current.dtype} since the fit on "
                f"{posterior.mean.device}, {posterior.mean.dtype}: move it back or fit again."
            )
        if not torch.equal(current, posterior.mean):
            raise RuntimeError(
                "The model's parameters have changed since the fit, so the posterior is not "
                "around them any more: fit again."
            )
        if wrong := changed(self._others, fingerprint(self.model, self.param_names)):
            raise RuntimeError(
                f"{wrong[0]} has changed since the fit, so the model is another one: fit again."
            )
        return posterior

    def predict(
        self,
        x: Inputs,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Distribution:
        """The predictive distribution p(y | x), batch shape `[B]`.

        Args:
            x: Inputs, `[B, ...]`.
            method: `"glm"`: linearised network with exact functional covariance, averaged in closed
                form (probit) or over `samples` draws of the outputs. `"glm-mc"`: linearised, weight
                samples by Jacobian-vector products (Eq. 18, as in the paper). `"nn"`: weight
                samples through the network itself. `"map"`: the trained network, no uncertainty.
            samples: Draws; None is the closed form for `"glm"` and 100 for `"glm-mc"` and `"nn"`.
            generator: For the draws; torch's global one if None.

        Returns:
            `Categorical`, `Bernoulli`, `Independent(Bernoulli)` for several labels (`.mean` are
            their probabilities) or `MultivariateNormal`, which includes the noise σ².

        Raises:
            ValueError: For an unknown method, samples below 1, or samples of a method that
                has none; outputs that are not finite.
            RuntimeError: Before a fit, if anything that the model's checkpoint holds has changed
                since, or under autocast.
        """
        if method not in METHODS:
            raise ValueError(f"Unknown method={method!r}: use one of {', '.join(METHODS)}.")
        if samples is not None and (method == "map" or samples < 1):
            raise ValueError(
                f'samples={samples} with method="{method}": give a positive number of samples to '
                '"glm", "glm-mc" or "nn", none to "map".'
            )
        posterior = self._checked_posterior()
        if method == "glm":
            if samples is None:
                return self.predict_grid(x, self.prior_precision.unsqueeze(0))[0]
            mean, covariance = self.functional(x)
            outputs = predictive.sample_outputs(mean.flatten(1), covariance, samples, generator)
            return self.likelihood.mixture(outputs.unflatten(2, mean.shape[1:]))
        with torch.inference_mode(False):
            x = self._moved(x)
            if method == "map":
                return self.likelihood.predictive(predictive.map_outputs(self._network, x), None)
            draws = posterior.sample(_DEFAULT_SAMPLES if samples is None else samples, generator)
            is_linear = method == "glm-mc"
            push = predictive.linearised_outputs if is_linear else predictive.sampled_outputs
            return self.likelihood.mixture(push(self._network, self.param_names, x, draws))

    # ------------------------------------------------- tuning and evaluation

    def tune(
        self,
        loader: Batches | None = None,
        metric: str = "nll",
        grid: Float[Tensor, " grid"] | Sequence[float] | None = None,
        method: str = "grid",
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuning.Tuning:
        """Find the best prior precision, set it and return it.

        Args:
            loader: Held-out batches `(x, y)`; for `method="grid"`. One pass serves the whole grid.
            metric: `"nll"`, `"ece"`, `"brier"` or `"accuracy"` of the `"glm"` predictive; of
                several labels the NLL is summed over those of an example, the others are over all.
            grid: Prior precisions to try; 21 from 1e-4 to 1e4 if None.
            method: `"grid"`, or `"marglik"`: maximise the marginal likelihood, no data needed.
            progress: Show a progress bar over the loader.
            generator: Seeds the loader's order and augmentation, and leaves torch's global
                generator alone; that one if None. The `"glm"` predictive draws nothing.

        Returns:
            The best value, the metric there, and `.table` with every value tried.

        Raises:
            ValueError: For an unknown method or metric, a grid that is empty or not positive, an
                empty loader or one whose targets are all ignored; if the marginal likelihood has no
                optimum.
            RuntimeError: Before a fit.
        """
        if method == "marglik":
            if (loader, grid, generator) != (None, None, None) or metric != "nll":
                raise ValueError(
                    'method="marglik" uses neither a loader, a generator, a grid nor a metric.'
                )
            found = tuning.maximise_marginal_likelihood(self.log_marginal_likelihood)
        elif method == "grid":
            if loader is None:
                raise ValueError(
                    'method="grid" needs held-out data: pass a loader, or use method="marglik".'
                )
            grid = torch.logspace(-4, 4, 21, dtype=torch.float64) if grid is None else grid
            grid = torch.as_tensor(grid, dtype=torch.float64)
            self._checked_posterior()
            batches = self._on_device(with_progress(loader, progress, "tune"), generator)
            found = tuning.tune_on_grid(
                self.predict_grid,
                self.likelihood,
                batches,
                metric,
                grid,
                self._settings.class_dim,
            )
        else:
            raise ValueError(f"Unknown method={method!r}: use 'grid' or 'marglik'.")
        self.prior_precision = found.prior_precision
        return found

    def evaluate(
        self,
        loader: Batches,
        ood: Mapping[str, Batches] | None = None,
        method: str = "glm",
        samples: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> dict[str, float]:
        """Accuracy, NLL, ECE and Brier score on labelled data; OOD detection by the entropy.

        Args:
            loader: Labelled batches `(x, y)`.
            ood: Out-of-distribution batches by name; their labels are ignored. Each gives
                `auroc_<name>` and the like (in-distribution = 0, OOD = 1).
            method: As `predict`.
            samples: As `predict`.
            generator: As `predict`; also seeds the order and augmentation of the loaders.
            progress: Show progress bars over the loaders.

        Returns:
            The metrics by name, as `metrics.evaluate` has them; for several labels as
            `metrics.evaluate_multilabel`; for regression NLL and RMSE.

        Raises:
            ValueError: As `predict`; for an empty loader or one whose targets are all ignored; for
                `ood` with a regression likelihood.
        """
        self._checked_posterior()

        def predict(x: Inputs) -> Distribution:
            return self.predict(x, method, samples, generator)

        def batches(data: Batches) -> Batches:
            return self._on_device(with_progress(data, progress, "evaluate"), generator)

        return evaluate_predictions(
            predict,
            self.likelihood,
            batches(loader),
            {name: batches(data) for name, data in (ood or {}).items()},
            self._settings.class_dim,
        )

    # -------------------------------------------------------------- on disk

    def save(self, path: str | Path) -> None:
        """Write the fitted posterior as a safetensors file (no pickle), atomically.

        The model itself is not in it. The file has a checksum, and the same posterior gives the
        same bytes. What stood at the path is replaced once the new file is complete; a symbolic
        link stays, and the file that it leads to is replaced.

        Args:
            path: The file, in a folder that exists.

        Raises:
            RuntimeError: Before a fit.
            ValueError: If the likelihood is an instance of a user's class, or the negative
                log-likelihood is not finite.
            FileNotFoundError: If the folder does not exist.
            OSError: If the path is a folder, a device or may not be written; if the disk is full.
                What was there before is still there.
        """
        sharing = self._settings.sharing
        with _EXCHANGE:
            posterior, nll, others = self._checked_posterior(), self._nll, self._others
            mode = self._mode
        serialization.save(
            Path(path),
            posterior,
            serialization.Header(
                likelihood=serialization.likelihood_to_json(self.likelihood),
                curvature=self._settings.curvature,
                joint=bool(self._settings.joint),
                sharing=sharing if isinstance(sharing, str) else dict(sharing),
                param_names=self.param_names,
                block_names=self.block_names,
                num_data=posterior.num_data,
                nll=nll,
                rank=self._settings.rank,
                others=others,
                class_dim=self._settings.class_dim,
                mode=mode,
            ),
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        backend: str = "auto",
        fisher: str = "exact",
        factor_dtype: torch.dtype = torch.float64,
        mc_samples: int = 1,
        memory_bound: int = MEMORY_BOUND,
    ) -> "Laplace":
        """Read a posterior that `save` wrote, for the same trained model.

        A file that was changed in any byte is refused, by its checksum. Files of the format before
        (3) have none; of them all else is checked. That directions are orthonormal is checked to
        single precision with random vectors, at the cost of a few products with each.

        Args:
            path: The file.
            model: The model, with the parameters that it had at the fit.
            backend: For another fit, as the constructor takes it; likewise the next three.
            fisher: For another fit.
            factor_dtype: For another fit.
            mc_samples: For another fit.
            memory_bound: As the constructor takes it.

        Raises:
            ValueError: If the file is damaged, of another format, or does not fit the model.
            FileNotFoundError: If there is no such file.
            IsADirectoryError: If it is a folder.
            OSError: If it cannot be read.
        """
        header, tensors = serialization.load(Path(path))
        serialization.check_names(header, dict(model.named_parameters()))
        la = cls(
            model,
            likelihood=serialization.likelihood_from_json(header.likelihood),
            curvature=header.curvature,
            params=header.param_names,
            rank=header.rank,
            joint=header.joint,
            sharing=header.sharing,
            class_dim=header.class_dim,
            backend=backend,
            fisher=fisher,
            factor_dtype=factor_dtype,
            mc_samples=mc_samples,
            memory_bound=memory_bound,
        )
        la._posterior = serialization.posterior_from(
            header,
            tensors,
            la._flat_parameters(),
            serialization.expected_blocks(
                la._blocks, header.curvature, serialization.rank_of(header, tensors)
            ),
            la._order_on_device(),
        )
        la._others = fingerprint(model, la.param_names)
        if wrong := changed(header.others, la._others):
            raise ValueError(
                f"The model's {wrong[0]} is not that of the fit: load the checkpoint that the "
                "posterior was fitted on."
            )
        la._prior_precision = la._posterior.prior_precision
        la._nll = header.nll
        la._mode = header.mode
        return la


def predict_grids(
    posteriors: Sequence[Laplace],
    x: Inputs,
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
    diagonal = all(la.likelihood.variances_suffice for la in posteriors)
    grids = [torch.as_tensor(grid, dtype=torch.float64) for grid in prior_precisions]
    if any(grid.ndim == 0 or len(grid) == 0 for grid in grids):
        raise ValueError("The grid holds no prior precision: pass at least one, [δ].")
    mean, covariances = _shared_moments(posteriors, x, grids, diagonal)
    if mean.ndim > 2 and not diagonal:
        covariances = predictive.within_positions(covariances, mean.shape)
    return [
        [la.likelihood.predictive(mean, covariance) for covariance in of_grid]
        for la, of_grid in zip(posteriors, covariances, strict=True)
    ]


def _shared_moments(
    posteriors: Sequence[Laplace],
    x: Inputs,
    prior_precisions: Sequence[Tensor],
    diagonal: bool = False,
    outputs: Tensor | Sequence[Sequence[int]] | int | None = None,
) -> tuple[Tensor, Tensor]:
    first = posteriors[0]
    if any(
        la.model is not first.model
        or la._blocks != first._blocks
        or la._settings.is_whole != first._settings.is_whole
        or la._settings.class_dim != first._settings.class_dim
        for la in posteriors
    ):
        raise ValueError(
            "The posteriors are of different models or Bayesian parameters: predict with each."
        )
    checked = [la._checked_posterior() for la in posteriors]
    num_blocks = len(first.block_names)
    for posterior, grid in zip(checked, prior_precisions, strict=True):
        for point in grid:
            posterior.check_prior_precision(point)
    grids = [grid.reshape(len(grid), -1).expand(-1, num_blocks) for grid in prior_precisions]
    with torch.inference_mode(False):
        x = first._moved(x)
        if outputs is not None:
            outputs = predictive.chosen_outputs(predictive.map_outputs(first._network, x), outputs)
        return functional_moments(
            first._network,
            first._blocks,
            checked,
            x,
            torch.stack(grids).to(checked[0].mean),
            Wanted(diagonal, outputs, first._settings.memory_bound),
        )
