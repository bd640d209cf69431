"""Curvature of a network in training, measured on the batches of the training loop."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.chunks import ChunkRunner
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.directions import Eigenbasis, Eigenpairs
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import FactorSums
from laplace_debias.curvature.fits.magnitudes import assemble
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block, Sharing
from laplace_debias.curvature.losses.likelihoods import Likelihood, likelihood_from
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.batches import Stream
from laplace_debias.curvature.network.dataset_size import TrainingSize
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.module_snapshot import numbers_of
from laplace_debias.curvature.network.outputs import DeferredChecks
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.curvature.structures import curvature_structure
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.fitting.fit import build_posterior
from laplace_debias.laplace.fitting.fit_stream import FitStream
from laplace_debias.laplace.fitting.prepared import PreparedFit, examine
from laplace_debias.laplace.fitting.resuming import likelihood_identity
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fitted import checked_setup
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.prior import PriorPrecision
from laplace_debias.system.checks import check_generator, check_no_autocast, real, whole
from laplace_debias.system.ranks import alone
from laplace_debias.training.eval_copy import eval_copy
from laplace_debias.training.running import (
    RUNNING_MAGNITUDES,
    BatchSums,
    RunningMagnitudes,
    RunningSum,
)

MODE = "online"
"""The name of this kind of fit, as the posterior displays it."""


class OnlineCurvature:
    r"""Curvature collected during training, debiased without a second batch.

    The directions are the eigenvectors of a running mean of the Kronecker factors of *earlier*
    batches, and are recomputed every `refresh` updates. The magnitudes are a running mean of the
    curvature of the *current* batch along these directions:

    $$\Lambda \leftarrow \beta\Lambda + \sum_{n,c}\big((U_G^\top\,\textstyle\sum_t g_{nct}
    a_{nt}^\top\,U_A)_{ij}\big)^2,$$

    divided by the number of examples, which is discounted in the same way. A batch is not used for
    the directions along which it is measured, so its extremes do not bias the magnitudes. When the
    directions are refreshed, the magnitudes so far are projected onto the new directions.

    By default, every fourth batch is measured; `update` only counts the other batches. With random
    signs or sampled labels, the gradients of a few examples are summed before they are squared,
    because products of different examples' gradients vanish on average.

    An update runs the batch through a copy of the network that shares its parameters. The copy is
    in eval mode: it has no dropout, and uses the running statistics of batch normalisations. It
    also follows changes of numbers that are attributes of modules, such as a temperature that is
    lowered during training. The model itself, its gradients and its mode are not changed. In a
    process group, each process measures its own batches, and nothing is communicated.

    While the weights change, the running means lag behind them by about `1 / (1 - decay)` batches.

    Args:
        model: The network that is trained, on the device on which it remains.
        likelihood: `"classification"` or a different likelihood; see `Laplace`.
        decay: β, in (0, 1]. The running means are over about the last `1 / (1 - decay)` batches; 1
            counts all batches equally, which suits weights that no longer change.
        refresh: The number of batches after which the directions are recomputed. The first
            directions are computed from the first batch.
        every: One out of this many batches is measured. If all batches are measured (1), the
            running means have less noise, but updates take longer.
        curvature: `"ekfac"` for the equation above, or `"kfac"` for the products of the curvatures
            of the two factors (Eq. 9), which takes less time.
        params: Which parameters are Bayesian; see `Laplace`.
        fisher: `"signs"` (the columns of the loss Hessian's root, added up with random signs: one
            backward pass), `"mc"` (labels sampled from the model, one backward pass), `"exact"` (a
            backward pass per output) or `"empirical"` (the true labels).
        mc_samples: The number of random sums or labels per example for `fisher="signs"` and `"mc"`.
        sigma: Noise of `"regression"`.
        prior_precision: δ of the posteriors.
        temperature: T of the posteriors.
        joint: Whether to treat the weight and the bias of a layer as one block.
        sharing: How to treat weights that are applied at several positions; see `Laplace`.
        backend: `"backpack"`, `"hooks"` or `"auto"`.
        factor_dtype: The dtype of the running sums. The sums of one batch and the directions have
            the dtype of the model, so magnitudes are measured along rounded directions.
        memory_bound: The limit of the working memory for output gradients, in bytes; see `Laplace`.
        class_dim: The dimension of the outputs that holds the classes. Default: the last one.
        generator: Seeds the signs or labels. Default: torch's global generator.

    Raises:
        ValueError: If an option is out of its range.
        TypeError: If an option has the wrong type.
        NotImplementedError: If parameters are in half precision.

    Reference:
        George et al. (2018), "Fast approximate natural gradient descent in a Kronecker-factored
        eigenbasis", and Tatzel et al. (2025) for directions and magnitudes of different batches.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.training import OnlineCurvature
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> online = OnlineCurvature(model, "classification", decay=0.9, refresh=10)
        >>> for _ in range(20):
        ...     x, y = torch.randn(16, 2), torch.randint(3, (16,))
        ...     online.update(x, y)
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> la = online.posterior(num_data=320)
        >>> la.predict(torch.randn(5, 2)).probs.shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        decay: float = 0.95,
        refresh: int = 50,
        every: int = 4,
        *,
        curvature: str = "ekfac",
        params: ParameterSelection = "all",
        fisher: str = "signs",
        mc_samples: int = 1,
        sigma: float | Sequence[float] | Tensor | None = None,
        prior_precision: PriorPrecision = 1.0,
        temperature: float = 1.0,
        joint: bool = False,
        sharing: Sharing = "expand",
        backend: str = "auto",
        factor_dtype: torch.dtype = torch.float64,
        memory_bound: int | None = None,
        class_dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.decay = _checked_decay(decay)
        self.refresh = whole(refresh, "refresh")
        self.every = whole(every, "every")
        if curvature not in RUNNING_MAGNITUDES:
            raise ValueError(
                f"`curvature={curvature!r}` does not keep running means of Kronecker "
                f"factors. Use {' or '.join(map(repr, RUNNING_MAGNITUDES))}."
            )
        check_generator(generator)
        self.model = model
        working = eval_copy(model)
        self._numbers = numbers_of(unwrapped(model))
        config = CurvatureConfig(
            structure=curvature_structure(curvature),
            fisher=FisherType(fisher, mc_samples).seeded(generator),
            params=params,
            backend=backend,
            factor_dtype=factor_dtype,
            joint=joint,
            sharing=sharing,
            memory_bound=memory_bound,
        )
        spec = ModelSpec.checked(working, likelihood_from(likelihood, sigma), None, class_dim)
        self._state = checked_setup(
            spec, config, prior_precision=prior_precision, temperature=temperature
        )
        self._decay_per_measurement = self.decay**self.every
        self._factors = RunningSum(self._decay_per_measurement, factor_dtype)
        self._magnitudes = RUNNING_MAGNITUDES[curvature](self._decay_per_measurement, factor_dtype)
        self._num_updates = 0
        self._bases: dict[Block, Eigenbasis] = {}
        self._measurements: _Measurements | None = None
        self._loaded: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.model).__name__}, "
            f"likelihood={self._state.spec.likelihood.describe()}, "
            f"curvature={self._state.config.structure.name}, decay={self.decay:g}, "
            f"refresh={self.refresh}, every={self.every}, num_updates={self.num_updates})"
        )

    @property
    def num_updates(self) -> int:
        """The number of batches so far, including those whose curvature was not measured."""
        return self._num_updates

    @torch.inference_mode(False)
    def update(self, x: Inputs, y: Tensor) -> None:
        """Update the running means with the curvature of a batch at the current weights.

        The first batch is measured, and every `every`-th batch after it. All other batches are only
        counted.

        Args:
            x: Inputs, `[B, ...]`.
            y: Targets, in the form that the likelihood takes.

        Raises:
            ValueError: If a batch has no examples, or inputs, targets or outputs do not match the
                model and the likelihood. Such a batch does not enter the running means.
            TypeError: If inputs or targets have the wrong dtype.
            RuntimeError: If the model's parameters were moved or replaced, or autocast is enabled.
        """
        if self._num_updates % self.every:
            self._num_updates += 1
            return
        check_no_autocast(self._state.device)
        with alone():
            stream = self._state.spec.training_stream([(x, y)], self._state.device)
            measurements = self._measurements or self._prepare(stream)
            self._follow_model(measurements.context)
            if self._is_refresh_due:
                self._refresh_directions(measurements)
            # Some checks take place at the end of the data. A batch that fails them is not added.
            for batch in list(FitStream(stream, self._state.spec.likelihood)):
                self._add(batch, measurements)

    def posterior(self, num_data: SupportsIndex) -> Laplace:
        """Build the posterior at the current weights.

        The posterior is for a copy of the model in eval mode, `la.model`, so training can continue.
        It can be saved, and loaded for a model with the same weights.

        Args:
            num_data: N, the number of training examples.

        Raises:
            RuntimeError: If fewer than two batches have been measured, because there are no
                directions of an earlier batch for the first batch; if no batch has been measured
                since `load_state_dict`; or if the model's parameters were moved or replaced.
        """
        size = TrainingSize(whole(num_data, "num_data"))
        if self._loaded is not None:
            raise RuntimeError(
                "The loaded state has not been compared with the model yet. The next "
                "update compares them. Call `update` before `posterior`."
            )
        measurements = self._measurements
        if measurements is None or not self._magnitudes.sums.parts:
            raise RuntimeError(
                "The eigenvectors and the curvatures of a posterior must come from "
                f"different batches. With every={self.every}, {self._num_updates} updates "
                f"are not enough for this. Call `update` at least {self.every + 1} times."
            )
        self._check_parameters()
        state = self._state
        context = measurements.context
        trained = copy.deepcopy(unwrapped(self.model)).eval()
        state = replace(
            state,
            spec=ModelSpec.checked(trained, state.spec.likelihood, None, state.spec.class_dim),
        )
        magnitudes = {}
        for block, basis in self._bases.items():
            magnitudes[block] = basis.pooled(self._magnitudes.mean(block), context.dtype)
        curvature = assemble(context, dict(self._bases), magnitudes)
        prepared = PreparedFit(state, measurements.parameters, context, size, MODE)
        return Laplace.from_posterior(
            build_posterior(prepared, CurvatureFit(curvature, self._factors.totals))
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the running means and the eigenvectors, for `torch.save`."""
        if self._loaded is not None:
            return {**self._loaded, "num_updates": self._num_updates}
        blocks = {}
        for block, factors in self._factors.parts.items():
            tensors = dict(zip(("G", "A"), factors, strict=True))
            if block in self._magnitudes.sums.parts:
                for side, pairs in self._bases[block]._asdict().items():
                    tensors[f"eigenvalues_{side}"] = pairs.eigenvalues
                    if pairs.U is not None:
                        tensors[f"U_{side}"] = pairs.U
                for index, value in enumerate(self._magnitudes.sums.parts[block]):
                    tensors[f"magnitudes.{index}"] = value
            blocks[block.name] = {name: value.clone() for name, value in tensors.items()}
        totals = self._factors.totals
        magnitude_totals = self._magnitudes.sums.totals
        parameters = self._state.parameters
        return {
            "options": self._options,
            "num_updates": self._num_updates,
            "num_examples": totals.num_examples,
            "nll": totals.nll,
            "num_outputs": totals.num_outputs,
            "weight": totals.weight,
            "input_weights": dict(totals.input_weights),
            "magnitude_weight": magnitude_totals.weight,
            "magnitude_input_weights": dict(magnitude_totals.input_weights),
            "seed": self._state.config.fisher.seed,
            "parameters": None if parameters is None else list(parameters.names),
            "blocks": blocks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: If the state has different options, belongs to a different model, or is not
                a state of this class.
        """
        if "options" not in state or "blocks" not in state:
            raise ValueError(
                f"The state has the keys {list(state)[:5]}, but lacks `options` or `blocks`. Pass "
                "a state that OnlineCurvature.state_dict() returned."
            )
        # A state without `every` was saved by an earlier version, which measured every batch. Other
        # options that are missing from a state are unknown.
        options = {**self._options, "every": 1, **state["options"]}
        for name, value in self._options.items():
            saved = options[name]
            if saved != value:
                raise ValueError(
                    f"The state was saved with {name}={saved!r}, but this object has "
                    f"{name}={value!r}. Use the options of the saved run."
                )
        if self._state.parameters is not None:
            blocks = {block.name: block for block in self._state.parameters.blocks}
            _check_blocks(state["blocks"], blocks)
            _check_parameters_of_state(state.get("parameters"), self._state.parameters.names)
        config = self._state.config
        fisher = replace(config.fisher, seed=state["seed"])
        self._state = replace(self._state, config=replace(config, fisher=fisher))
        self._measurements = None
        self._num_updates = state["num_updates"]
        self._loaded = state

    @property
    def _options(self) -> dict[str, Any]:
        """Return the options that must be the same in a saved state."""
        config = self._state.config
        return {
            "decay": self.decay,
            "refresh": self.refresh,
            "every": self.every,
            "curvature": config.structure.name,
            "fisher": config.fisher.kind,
            "mc_samples": config.fisher.mc_samples,
            "joint": config.joint,
            "sharing": config.sharing,
            "likelihood": likelihood_identity(self._state.spec.likelihood),
            "class_dim": self._state.spec.class_dim,
        }

    @property
    def _is_refresh_due(self) -> bool:
        count = self._num_updates
        previous = count - self.every
        return previous == 0 or (count > 0 and count // self.refresh > previous // self.refresh)

    def _prepare(self, stream: Stream) -> "_Measurements":
        """Check the model on the first batch, and set up the network and its sums."""
        state = self._state
        parameters, context = examine(state, [stream], False, state.config.fisher)
        measurements = _Measurements(parameters, context)
        if self._loaded is not None:
            _check_all_blocks(self._loaded["blocks"], {b.name: b for b in context.blocks})
            self._restore(self._loaded, measurements)
            self._loaded = None
        self._measurements = measurements
        return measurements

    def _restore(self, state: Mapping[str, Any], measurements: "_Measurements") -> None:
        """Restore the tensors of a saved state."""
        context = measurements.context
        blocks = {block.name: block for block in context.blocks}
        self._factors.parts = {}
        self._magnitudes.sums.parts = {}
        self._bases = {}
        for name, saved in state["blocks"].items():
            tensors = {key: value.to(context.device, copy=True) for key, value in saved.items()}
            block = blocks[name]
            self._factors.parts[block] = [tensors["G"], tensors["A"]]
            if "magnitudes.0" not in tensors:
                continue
            parts = [f"magnitudes.{index}" for index in range(self._magnitudes.num_parts)]
            self._magnitudes.sums.parts[block] = [tensors[part] for part in parts]
            basis = Eigenbasis(
                Eigenpairs(tensors["eigenvalues_G"], tensors.get("U_G")),
                Eigenpairs(tensors["eigenvalues_A"], tensors.get("U_A")),
            )
            # In a state of an earlier version, the directions have the dtype of the sums, so they
            # are converted.
            self._bases[block] = basis.to(context.dtype)
        self._factors.totals = DataTotals(
            num_examples=state["num_examples"],
            nll=state["nll"],
            num_outputs=state["num_outputs"],
            weight=state["weight"],
            input_weights=_input_weights(state, ""),
        )
        self._magnitudes.sums.totals = DataTotals(
            weight=state["magnitude_weight"], input_weights=_input_weights(state, "magnitude_")
        )
        if self._bases:
            measurements.measure_along(self._bases, self._magnitudes)

    def _follow_model(self, context: FitContext) -> None:
        """Copy all changes of training to the working copies, which share only the parameters."""
        self._check_parameters()
        plain = unwrapped(self.model)
        numbers = numbers_of(plain)
        changed = [key for key, value in numbers.items() if self._numbers.get(key) != value]
        for network in (self._state.spec.plain_model, context.network):
            modules = dict(network.named_modules())
            for path, name in changed:
                if path in modules:
                    setattr(modules[path], name, numbers[path, name])
        self._numbers = numbers
        own_buffers = dict(context.network.named_buffers())
        for name, buffer in plain.named_buffers():
            if name in own_buffers and own_buffers[name].shape == buffer.shape:
                own_buffers[name].copy_(buffer)

    def _check_parameters(self) -> None:
        """Require that the model and the working copy still have the same parameters."""
        shared = dict(self._state.spec.model.named_parameters())
        for name, parameter in unwrapped(self.model).named_parameters():
            if name not in shared or shared[name].data_ptr() != parameter.data_ptr():
                raise RuntimeError(
                    f"{name} was moved or replaced after OnlineCurvature was built, so "
                    "updates would still use the old one. Build OnlineCurvature after you "
                    "move the model to its device and convert it to its dtype."
                )

    def _refresh_directions(self, measurements: "_Measurements") -> None:
        """Decompose the running factors, and project the magnitudes onto the new directions."""
        context = measurements.context
        dtype = context.dtype
        factors: FactorSums = {}
        for block, (G, A) in self._factors.parts.items():
            # A decomposition in single precision takes less than half the time of double precision.
            factors[block] = (G.to(dtype), A.to(dtype))
        bases = eigenbases(context, factors, self._factors.totals)
        for block, basis in self._bases.items():
            # If the batch after the last refresh was rejected, there are no magnitudes to rotate.
            if block in self._magnitudes.sums.parts:
                self._magnitudes.rotate(block, basis, bases[block], dtype)
        self._bases = bases
        measurements.measure_along(bases, self._magnitudes)

    def _add(self, batch: Batch, measurements: "_Measurements") -> None:
        """Measure a batch, and add it to the running means if all of its sums are finite."""
        batch = replace(batch, first_index=self._factors.totals.num_examples)
        totals = measurements.measure(batch)
        sums = measurements.sums
        factors = sums.factors.factors(totals.weight)
        if self._bases:
            squares = {} if sums.squares is None else sums.squares.squares
            measured = self._magnitudes.measure(self._bases, factors, squares)
            self._magnitudes.sums.update(measured, totals)
        self._factors.update(factors, totals)
        self._num_updates += 1


class _Measurements:
    """The network with which batches are measured, after it was checked on the first batch.

    Args:
        parameters: The Bayesian parameters and their blocks.
        context: The context of the fit.

    Attributes:
        sums: The sums of the last batch that was measured.
    """

    def __init__(self, parameters: ParameterBlocks, context: FitContext) -> None:
        self.parameters = parameters
        self.context = context
        self.sums = BatchSums(context)
        self._runner: ChunkRunner | None = None

    def measure_along(
        self, bases: Mapping[Block, Eigenbasis], magnitudes: RunningMagnitudes
    ) -> None:
        """Measure the curvature of the next batches along these directions."""
        self.sums.squares = magnitudes.accumulator(self.sums.context, bases)

    def measure(self, batch: Batch) -> DataTotals:
        """Measure a batch, whose sums must be finite."""
        self.sums.begin()
        if self._runner is None:
            self._runner = ChunkRunner(self.sums, batch.inputs)
        totals = DataTotals()
        checks = DeferredChecks()
        with checks.during_batch(None):
            self._runner.run(batch, totals)
        checks.read()
        self.sums.reduce()
        return totals


def _checked_decay(value: Any) -> float:
    decay = real(value, "decay")
    if decay.ndim:
        raise TypeError(f"`decay` is {decay.tolist()}. Pass one number.")
    if not 0 < float(decay) <= 1:
        raise ValueError(
            f"`decay` must be greater than 0 and at most 1, got {float(decay)}. Use 0.95 for a "
            "mean over about 20 batches, or 1 for a mean over all batches."
        )
    return float(decay)


def _input_weights(state: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the weights of the blocks' examples from a state, possibly of an earlier version.

    Earlier versions saved the weights of the examples that are absent from a layer, or no weights.
    """
    name = f"{prefix}input_weights"
    if name in state:
        return dict(state[name])
    weight = state[f"{prefix}weight"]
    return {block: weight - absent for block, absent in state.get(f"{prefix}absent", {}).items()}


def _check_parameters_of_state(saved: Sequence[str] | None, names: Sequence[str]) -> None:
    """Require the Bayesian parameters that a saved state names; some states have no names."""
    if saved is None or set(saved) == set(names):
        return
    differing = sorted(set(saved) ^ set(names))
    raise ValueError(
        f"{differing[:4]} are parameters of either the state or this object, but not of both. "
        "Use the same model and the same `params=` as when the state was saved."
    )


def _check_all_blocks(
    saved: Mapping[str, Mapping[str, Tensor]], blocks: Mapping[str, Block]
) -> None:
    """Require that a saved state has either exactly these blocks or no blocks."""
    _check_blocks(saved, blocks)
    missing = [name for name in blocks if name not in saved]
    if saved and missing:
        raise ValueError(
            f"This model has the blocks {missing[:4]}, but the state does not. Load the state into "
            "an object with the same model and the same `params=` as when it was saved. If the "
            "first batch of the saved run did not call these layers, leave them out by `params=`."
        )


def _check_blocks(saved: Mapping[str, Mapping[str, Tensor]], blocks: Mapping[str, Block]) -> None:
    """Require that a saved state has only these blocks."""
    for name, tensors in saved.items():
        if name not in blocks:
            raise ValueError(
                f"The state has a block {name!r}, but this model does not. Load the state "
                "into an object with the same model and the same `params=` as when it "
                "was saved."
            )
        block = blocks[name]
        shape_G, shape_A = block.factor_shapes
        expected = [shape_G, shape_A or (*block.groups, 1, 1)]
        shapes = [tuple(tensors["G"].shape), tuple(tensors["A"].shape)]
        if shapes != expected:
            raise ValueError(
                f"The state's factors of {name!r} have the shapes {shapes}, but the factors of "
                f"this model have {expected}. Use the model with which the state was saved."
            )
