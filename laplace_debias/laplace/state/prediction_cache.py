"""Working copies of a model and weights of its posterior, kept between predictions."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.resolve import differing_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.frozen_tensors import versions
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.module_snapshot import ModuleSnapshot
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.curvature.network.shared_copy import are_constant, refuse_calls
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.posterior import GaussianPosterior

# The largest number of idle copies that are kept for predictions in several threads.
_MOST_IDLE = 4
# The largest size in bytes of a posterior mean for which weights are kept. The weights need as much
# memory as the posterior, in every thread.
_MOST_KEPT = 2**26
# The largest number of chunk sizes that are kept, since inputs may have many shapes.
_MOST_SIZES = 64

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class _CachedValues:
    """Values that were computed from a posterior, and are valid as long as it is unchanged.

    Attributes:
        posterior: The posterior.
        tensors: The posterior's tensors. As long as they are kept, no new tensor can reuse one of
            their ids.
        ids_and_versions: The ids of these tensors, and how often each was changed in place.
        values: The values by their keys.
    """

    posterior: GaussianPosterior
    tensors: list[Tensor]
    ids_and_versions: list[int | None]
    values: dict[Hashable, Any] = field(default_factory=dict)

    def is_of(self, posterior: GaussianPosterior, ids_and_versions: list[int | None]) -> bool:
        """Whether the values belong to a posterior with these tensors."""
        return posterior is self.posterior and ids_and_versions == self.ids_and_versions


class PreparedModel:
    """A working copy of a model, used by one prediction at a time.

    Attributes:
        tap: The tap, which records the activations and gradients of the copy's layers.
        snapshot: A snapshot of the user's modules that were copied; None if it could miss changes.
        sizes: The chunk sizes of earlier inputs, keyed by all values that determine the chunk size.
        is_new: Whether no prediction has used the copy yet.
    """

    def __init__(
        self, spec: ModelSpec, parameters: ParameterBlocks, snapshot: ModuleSnapshot | None
    ) -> None:
        self.snapshot = snapshot
        self.tap = Tap(spec.network(parameters.names), parameters.blocks)
        is_narrow = any(parameter.dtype in NARROW for parameter in spec.plain_model.parameters())
        self._copy_snapshot: ModuleSnapshot | None = None
        self._is_constant = are_constant(self.tap.network.modules())
        # A copy of a half-precision model does not share the model's values, so it is not kept.
        if not (self.tap.learns_dims or is_narrow or snapshot is None):
            self._copy_snapshot = ModuleSnapshot.of(self.tap.network)
            self.tap.save_attributes()
        self.is_new = True
        self.sizes: dict[Hashable, Any] = {}
        self._ends_in_layer = True
        self._cached: _CachedValues | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether changes to the copy can be detected, and no forward pass has changed it."""
        if self._copy_snapshot is None:
            return False
        return self._is_constant or self._copy_snapshot.is_current(self.tap.network)

    def refresh_buffers(self) -> None:
        """Restore the buffers, which forward passes may overwrite, from the user's buffers."""
        assert self.snapshot is not None
        assert self._copy_snapshot is not None
        if self._copy_snapshot.buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._copy_snapshot.buffers, self.snapshot.buffers)

    def compute_once(
        self, posterior: GaussianPosterior, key: Hashable, compute: Callable[[], Value]
    ) -> Value:
        """Compute a value that depends on the posterior, such as its weights, unless it is cached.

        The value is computed again if the posterior is replaced, for example because the prior
        precision or the temperature was set, or if its tensors were changed in place.
        """
        if posterior.mean.nbytes > _MOST_KEPT:
            return compute()
        tensors = _tensors(posterior)
        ids_and_versions = list(map(id, tensors)) + versions(tensors)
        if None in ids_and_versions:
            # torch does not count the changes of tensors created in inference mode, so no value is
            # kept.
            return compute()
        cached = self._cached
        if cached is None or not cached.is_of(posterior, ids_and_versions):
            cached = self._cached = _CachedValues(posterior, tensors, ids_and_versions)
        if key not in cached.values:
            cached.values[key] = compute()
        return cached.values[key]

    def forward_of_last_layer(
        self, x: Inputs
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch d"]] | None:
        """Run a network whose only Bayesian layer is linear.

        Returns:
            The outputs and the inputs of the layer, or None if the layer's result is not the output
            of the network. In that case, later calls skip the forward pass.

        Raises:
            ValueError: If the outputs are not finite.
        """
        if not self._ends_in_layer:
            return None
        recorded = self.tap.forward_of_last_layer(x)
        self._ends_in_layer = recorded is not None
        if recorded is not None:
            check_outputs(recorded[0])
        return recorded

    def keep_size(self, key: Hashable, size: Any) -> None:
        """Keep a chunk size in `sizes` for later predictions."""
        if len(self.sizes) >= _MOST_SIZES:
            self.sizes.clear()
        self.sizes[key] = size


class PredictionCache:
    """The idle working copies of a model, and its default links.

    Threads cannot share the hooks of a tap, so each prediction borrows a working copy and returns
    it after the last pass. A copy shares the user's parameters, and its buffers are refreshed
    before every prediction. It is dropped if the user's modules have changed: an attribute, a hook,
    a submodule, or the memory address of a tensor. If a module contains anything else that may
    change, the model is copied for every prediction. A copied or unpickled `PredictionCache` is
    empty.

    Args:
        verified: A snapshot of the modules with which the blocks were verified; None if the blocks
            are not verified again.

    Attributes:
        default_links: The default links of a softmax likelihood, keyed by the numbers of dimensions
            of the input tensors, which determine the number of dimensions of the outputs.
    """

    def __init__(self, verified: ModuleSnapshot | None = None) -> None:
        self.default_links: dict[tuple[int, ...], Link | None] = {}
        self._idle: list[PreparedModel] = []
        self._verified = verified

    def __reduce__(self) -> tuple[Any, ...]:
        return PredictionCache, ()

    @contextmanager
    def borrow(
        self, spec: ModelSpec, parameters: ParameterBlocks, snapshot: ModuleSnapshot | None
    ) -> Iterator[PreparedModel]:
        """Yield a working copy with a tap on the blocks, for the exclusive use of the caller.

        Args:
            spec: The model.
            parameters: The Bayesian parameters and their blocks.
            snapshot: A snapshot of the model's current modules, if there is one.
        """
        prepared = self._take_current(snapshot)
        if prepared is None:
            prepared = PreparedModel(spec, parameters, snapshot)
        else:
            prepared.tap.attach(parameters.blocks)
        yield prepared
        # If the caller raises an exception, the code below does not run, and the copy is dropped,
        # because its state is unknown.
        prepared.tap.conditional.clear()
        prepared.is_new = False
        if prepared.is_reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append(prepared)

    @contextmanager
    def first_use(
        self,
        spec: ModelSpec,
        parameters: ParameterBlocks,
        snapshot: ModuleSnapshot | None,
        network: nn.Module,
        x: Inputs,
    ) -> Iterator[None]:
        """Check a new working copy while it is used for the first time.

        If the modules have changed since the blocks were verified, the blocks are verified again on
        two examples.

        Args:
            spec: The model.
            parameters: The Bayesian parameters and their blocks.
            snapshot: A snapshot of the model's current modules, if there is one.
            network: The copy.
            x: The inputs of the prediction.

        Raises:
            NotImplementedError: If the copy calls the user's own modules.
            RuntimeError: If the outputs no longer depend on the parameters in the same way as at
                the fit.
        """
        with refuse_calls(spec.plain_model, parameters.names, network):
            if self._verified is not None and self._verified is not snapshot:
                current = spec.network(parameters.names)
                differing = differing_blocks(current, parameters.blocks, parameters.names, x)
                if differing:
                    raise RuntimeError(
                        "The model has changed since the fit. Its outputs now depend on "
                        f"{list(differing[0].parameters)} in another way, for example through "
                        "another forward pass of the layer or a second use of its weights, so the "
                        "posterior is no longer valid. Undo the change, or fit again."
                    )
                self._verified = snapshot
            yield

    def _take_current(self, snapshot: ModuleSnapshot | None) -> PreparedModel | None:
        """Take an idle, up-to-date copy of the model, and drop copies that are out of date."""
        while True:
            try:
                prepared = self._idle.pop()
            except IndexError:
                return None
            if prepared.snapshot is snapshot:
                prepared.refresh_buffers()
                return prepared


def _tensors(posterior: GaussianPosterior) -> list[Tensor]:
    """List the tensors from which weights are computed."""
    tensors: list[Tensor] = [posterior.prior_precision]
    for block in posterior.curvature.blocks.values():
        tensors += [value for value in vars(block).values() if isinstance(value, Tensor)]
    return tensors
