"""Curvature of a network during training, measured on the batches of the training loop."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Stream
from laplace_debias.curvature.data.dataset_size import TrainingSize
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.likelihoods import Likelihood, likelihood_from
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.module_snapshot import numbers_of
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
from laplace_debias.laplace.state.prior import PriorPrecision
from laplace_debias.system.checks import check_generator, check_no_autocast, real, whole
from laplace_debias.system.ranks import alone
from laplace_debias.training.batch_sums import BatchMeasurements
from laplace_debias.training.eval_copy import eval_copy
from laplace_debias.training.running import RUNNING_MAGNITUDES
from laplace_debias.training.running_curvature import RunningCurvature, check_blocks

MODE = "online"
"""The name under which the posterior shows this kind of fit."""


class OnlineCurvature:
    r"""Curvature collected during training and debiased without a second batch.

    The directions are the eigenvectors of a running mean of the Kronecker factors of *earlier*
    batches, and are recomputed every `refresh` updates. The magnitudes are a running mean of the
    curvature of the *current* batch along these directions:

    $$\Lambda \leftarrow \beta\Lambda + \sum_{n,c}\big((U_G^\top\,\textstyle\sum_t g_{nct}
    a_{nt}^\top\,U_A)_{ij}\big)^2,$$

    divided by the number of examples, which is discounted in the same way. Because a batch does not
    contribute to the directions along which it is measured, its extremes do not bias the
    magnitudes. When the directions are refreshed, the existing magnitudes are projected onto the
    new directions.

    By default, only every fourth batch is measured, and `update` merely counts the others. With
    random signs or sampled labels, the gradients of a few examples are summed before they are
    squared, because products of gradients of different examples vanish on average.

    An update runs the batch through a copy of the network that shares its parameters. The copy is
    in eval mode: it has no dropout, and uses the running statistics of batch normalisations.
    Numbers that are attributes of modules, such as a temperature that is lowered during training,
    are copied before each measurement. The model itself, its gradients and its mode are not
    changed. In a process group, each process measures its own batches without communication.

    While the weights change, the running means lag behind them by about `1 / (1 - decay)` batches.

    Args:
        model: The network that is trained. Move it to its final device first.
        likelihood: `"classification"` or a different likelihood; see `Laplace`.
        decay: β, in (0, 1]. The running means cover about the last `1 / (1 - decay)` batches; with
            1, all batches count equally, which is suitable once the weights no longer change.
        refresh: The number of batches after which the directions are recomputed. The first
            directions are computed from the first batch.
        every: One out of this many batches is measured. With 1, all batches are measured, so the
            running means are less noisy but updates take longer.
        curvature: `"ekfac"` for the equation above, or `"kfac"` for products of the two factors'
            curvatures (Eq. 9), which is faster.
        params: Which parameters are Bayesian; see `Laplace`.
        fisher: `"signs"` (the columns of a square root of the loss Hessian, summed with random
            signs; one backward pass), `"mc"` (labels sampled from the model; one backward pass),
            `"exact"` (one backward pass per output) or `"empirical"` (the true labels).
        mc_samples: The number of sums with random signs (`fisher="signs"`) or of sampled labels
            (`"mc"`) per example.
        sigma: For `"regression"`: the standard deviation of the noise.
        prior_precision: δ of the posteriors.
        temperature: T of the posteriors.
        joint: Whether to treat the weight and the bias of a layer as one block.
        sharing: How to treat weights that are applied at several positions; see `Laplace`.
        backend: `"backpack"`, `"hooks"` or `"auto"`.
        factor_dtype: The dtype of the running sums. The directions and the sums over one batch have
            the dtype of the model, so magnitudes are measured along rounded directions.
        memory_bound: Limit on the working memory for output gradients, in bytes; see `Laplace`.
        class_dim: The dimension of the outputs that holds the classes. Default: the last one.
        generator: Seeds the signs or labels. Default: torch's global generator.

    Raises:
        ValueError: If an option is out of range.
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
        decay_per_measurement = self.decay**self.every
        self._running = RunningCurvature(curvature, decay_per_measurement, factor_dtype)
        self._num_updates = 0
        self._measurements: BatchMeasurements | None = None
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
        """The number of batches so far, including batches that were only counted."""
        return self._num_updates

    @torch.inference_mode(False)
    def update(self, x: Inputs, y: Tensor) -> None:
        """Add the curvature of a batch, at the current weights, to the running means.

        The first batch is measured, and every `every`-th batch after it; all others are only
        counted.

        Args:
            x: Inputs, `[B, ...]`.
            y: Targets, in the form that the likelihood expects.

        Raises:
            ValueError: If a batch has no examples, or inputs, targets or outputs do not match the
                model and the likelihood. The running means are then unchanged.
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
            # The list makes all checks run, including those at the end of the data, before the
            # batch is added.
            for batch in list(FitStream(stream, self._state.spec.likelihood)):
                self._add(batch, measurements)

    def posterior(self, num_data: SupportsIndex) -> Laplace:
        """Build the posterior at the current weights.

        The posterior uses a copy of the model in eval mode, `la.model`, so training can continue.
        It can be saved, and loaded later for a model with the same weights.

        Args:
            num_data: Number of training examples N.

        Raises:
            RuntimeError: If fewer than two batches have been measured, because the first batch has
                no directions of an earlier batch; if no batch has been measured since
                `load_state_dict`; or if the model's parameters were moved or replaced.
        """
        size = TrainingSize(whole(num_data, "num_data"))
        if self._loaded is not None:
            raise RuntimeError(
                "The loaded state has not been compared with the model yet. The next "
                "update compares them. Call `update` before `posterior`."
            )
        measurements = self._measurements
        if measurements is None or not self._running.has_magnitudes:
            raise RuntimeError(
                "The eigenvectors and the curvatures of a posterior must come from "
                f"different batches. With every={self.every}, {self._num_updates} updates "
                f"are not enough for this. Call `update` at least {self.every + 1} times."
            )
        self._check_parameters()
        context = measurements.context
        trained = copy.deepcopy(unwrapped(self.model)).eval()
        spec = self._state.spec
        trained_spec = ModelSpec.checked(trained, spec.likelihood, None, spec.class_dim)
        curvature = CurvatureFit(
            self._running.mean_curvature(context), self._running.factors.totals
        )
        prepared = PreparedFit(
            setup=replace(self._state, spec=trained_spec),
            parameters=measurements.parameters,
            context=context,
            size=size,
            mode=MODE,
        )
        return Laplace.from_posterior(build_posterior(prepared, curvature))

    def state_dict(self) -> dict[str, Any]:
        """Return the running means and the eigenvectors, for `torch.save`."""
        if self._loaded is not None:
            return {**self._loaded, "num_updates": self._num_updates}
        parameters = self._state.parameters
        return {
            "options": self._options,
            "num_updates": self._num_updates,
            "seed": self._state.config.fisher.seed,
            "parameters": None if parameters is None else list(parameters.names),
            **self._running.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that was returned by `state_dict`.

        Raises:
            ValueError: If the state has different options, was saved for a different model, or is
                not a state of this class.
        """
        if "options" not in state or "blocks" not in state:
            raise ValueError(
                f"The state has the keys {list(state)[:5]}, but lacks `options` or `blocks`. Pass "
                "a state that OnlineCurvature.state_dict() returned."
            )
        # A state without `every` was saved by an earlier version, which measured every batch. Other
        # options that are missing from a state cannot be compared.
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
            check_blocks(state["blocks"], blocks)
            _check_parameters_of_state(state.get("parameters"), self._state.parameters.names)
        config = self._state.config
        fisher = replace(config.fisher, seed=state["seed"])
        self._state = replace(self._state, config=replace(config, fisher=fisher))
        self._measurements = None
        self._num_updates = state["num_updates"]
        self._loaded = state

    @property
    def _options(self) -> dict[str, Any]:
        """The options that a saved state must have in common with this object."""
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
        """Whether to recompute the directions before the next batch is measured."""
        count = self._num_updates
        previous = count - self.every
        return previous == 0 or (count > 0 and count // self.refresh > previous // self.refresh)

    def _prepare(self, stream: Stream) -> BatchMeasurements:
        """Check the model on the first batch, and set up the network that measures batches."""
        state = self._state
        parameters, context = examine(state, [stream], reads_all=False, fisher=state.config.fisher)
        measurements = BatchMeasurements(parameters, context)
        if self._loaded is not None:
            self._running.load_state_dict(self._loaded, context)
            self._loaded = None
            measurements.sums.squares = self._running.squares_accumulator(measurements.sums.context)
        self._measurements = measurements
        return measurements

    def _follow_model(self, context: FitContext) -> None:
        """Copy changed buffers and numbers to the working copies, which share only parameters."""
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
        """Require that the model and the working copy still share their parameters."""
        shared = dict(self._state.spec.model.named_parameters())
        for name, parameter in unwrapped(self.model).named_parameters():
            if name not in shared or shared[name].data_ptr() != parameter.data_ptr():
                raise RuntimeError(
                    f"{name} was moved or replaced after OnlineCurvature was built, so "
                    "updates would still use the old one. Build OnlineCurvature after you "
                    "move the model to its device and convert it to its dtype."
                )

    def _refresh_directions(self, measurements: BatchMeasurements) -> None:
        """Compute the directions along which the next batches are measured."""
        self._running.refresh_directions(measurements.context)
        measurements.sums.squares = self._running.squares_accumulator(measurements.sums.context)

    def _add(self, batch: Batch, measurements: BatchMeasurements) -> None:
        """Measure a batch, and add it to the running means unless a sum is not finite."""
        batch = replace(batch, first_index=self._running.factors.totals.num_examples)
        totals = measurements.measure(batch)
        sums = measurements.sums
        squares = {} if sums.squares is None else sums.squares.squares
        self._running.add(sums.factors.factors(totals.weight), squares, totals)
        self._num_updates += 1


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


def _check_parameters_of_state(saved: Sequence[str] | None, names: Sequence[str]) -> None:
    """Require that a saved state, if it contains names, has the same Bayesian parameters."""
    if saved is None or set(saved) == set(names):
        return
    differing = sorted(set(saved) ^ set(names))
    raise ValueError(
        f"{differing[:4]} are parameters of either the state or this object, but not of both. "
        "Use the same model and the same `params=` as when the state was saved."
    )
