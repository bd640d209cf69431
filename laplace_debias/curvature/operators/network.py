"""A network as a function of its parameters, computed on a copy of the user's model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.data.repeatable_data import first_inputs
from laplace_debias.curvature.network.calling import call, differentiable, returned_outputs
from laplace_debias.curvature.network.fingerprints import sum_of_bits
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.curvature.network.module_snapshot import numbers_of
from laplace_debias.curvature.network.outputs import check_outputs, check_repeatable
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.quantised import device_of_model, is_never_copied
from laplace_debias.curvature.network.selection import (
    LAST_LAYER,
    ParameterSelection,
    check_parameters,
    select_parameters,
)
from laplace_debias.curvature.network.sharded import has_units
from laplace_debias.curvature.network.shared_copy import (
    are_constant,
    preserve_attributes,
    refuse_calls,
    requiring_grad,
    shared_copy,
)
from laplace_debias.curvature.network.unwrapping import plain_names, unwrapped
from laplace_debias.curvature.network.validation import validate_model
from laplace_debias.curvature.network.widening import widened
from laplace_debias.operators import ParameterLayout
from laplace_debias.system.checks import check_is, check_no_autocast


class Network:
    """A model as a function of the selected parameters, in the model's order; all others are fixed.

    Tied weights are one parameter under their first name, and derivatives include all uses of it.
    `data` is needed only to find the last layer, by running the model on an example.
    """

    def __init__(
        self,
        model: nn.Module,
        params: ParameterSelection,
        data: Batches | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        check_is(batch, "batch", Callable, type(None))
        self._user_model = model
        self._read = BatchReader(model, batch)
        plain = validate_model(model)
        if has_units(model):
            raise NotImplementedError(
                "fully_shard has split the model over processes. Curvature operators do "
                "not support such a model (`Laplace` does). Get the full state dict with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)). Then, on each process, "
                "build the model without fully_shard and load this state dict."
            )
        if isinstance(params, (list, tuple)) and all(isinstance(name, str) for name in params):
            params = plain_names(model, params)
        example = None
        if data is not None and params == LAST_LAYER:
            example = move(
                first_inputs(self.stream(data, takes_weights=True)), device_of_model(plain), None
            )
        self.names = select_parameters(plain, params, example)
        check_parameters(plain, self.names)
        self.layout = ParameterLayout.of({name: plain.get_parameter(name) for name in self.names})
        self._sizes = self.layout.sizes
        self.num_parameters = self.layout.size
        first = plain.get_parameter(self.names[0])
        self.dtype = wide(first.dtype)
        self.device = first.device
        check_no_autocast(self.device)
        self.refresh()

    def stream(
        self,
        data: Batches,
        generator: torch.Generator | None = None,
        *,
        takes_weights: bool = False,
    ) -> Stream:
        """Read data as batches without moving them; `takes_weights` allows examples' weights."""
        return Stream(data, replace(self._read, takes_weights=takes_weights), generator)

    def working_copy(self) -> nn.Module:
        """Make a new copy of the user's model in single precision or a wider dtype."""
        return widened(shared_copy(unwrapped(self._user_model)), self.names)

    def refresh(self) -> None:
        """Copy the model's current parameters, buffers and numbers."""
        model = self.working_copy()
        self._numbers = numbers_of(unwrapped(self._user_model))
        copies: dict[str, Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # New copies are made, because linearisations that are kept refer to the earlier copies.
            if not is_never_copied(tensor):
                copies[name] = tensor.detach().clone()
        self._copied_state = tuple(copies.values())
        self._sums_of_uncopied = self._sum_uncopied()
        self.parameters = tuple(copies[name] for name in self.names)
        self._fixed_names = tuple(name for name in copies if name not in self.names)
        self.fixed = tuple(copies[name] for name in self._fixed_names)
        self._call = _Call(model)
        modules = list(model.modules())
        self._changing_modules = [] if are_constant(modules) else modules
        self.differentiable = partial(differentiable, model)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The selected parameters, and the rest of the model's state."""
        return (*self.parameters, *self.fixed)

    def is_current(self) -> bool:
        """Whether the model's parameters, buffers and numbers have not changed since it was copied.

        Their contents are compared, because a change through `.data` leaves no other trace.
        """
        if numbers_of(unwrapped(self._user_model)) != self._numbers:
            return False
        state = [tensor for tensor in self._user_state if not is_never_copied(tensor)]
        if len(state) != len(self._copied_state):
            return False
        if self._sum_uncopied() != self._sums_of_uncopied:
            return False
        return all(
            tensor.detach().to(copy.dtype).equal(copy)
            for tensor, copy in zip(state, self._copied_state, strict=True)
        )

    def _sum_uncopied(self) -> list[int]:
        """Sum the bits of each tensor that is not copied, so that a change is noticed."""
        return [sum_of_bits(tensor) for tensor in self._user_state if is_never_copied(tensor)]

    @property
    def user_parameters(self) -> tuple[Tensor, ...]:
        """The selected parameters of the user's model itself, not their copies."""
        plain = unwrapped(self._user_model)
        return tuple(plain.get_parameter(name) for name in self.names)

    @property
    def _user_state(self) -> list[Tensor]:
        return [*self._user_model.parameters(), *self._user_model.buffers()]

    def outputs(
        self,
        parameters: tuple[Tensor, ...],
        inputs: Inputs,
        fixed: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Compute the outputs `[B, ..., C]` as a pure function of the parameters."""
        names = (*self.names, *self._fixed_names)
        values = (*parameters, *(self.fixed if fixed is None else fixed))
        state = {f"model.{name}": value for name, value in zip(names, values, strict=True)}
        # A value that a module keeps between passes would be a constant in the next one.
        with preserve_attributes(self._changing_modules):
            return functional_call(self._call, state, (inputs,))

    def module_gradients(self, inputs: Inputs, cotangents: Tensor) -> tuple[Tensor, ...]:
        """Multiply the transposed Jacobian by cotangents, with the parameters of the module itself.

        Unlike in `outputs`, the module also has these parameters during the backward pass.
        """
        parameters = [self._call.model.get_parameter(name) for name in self.names]
        with (
            preserve_attributes(self._changing_modules),
            self.differentiable(),
            requiring_grad(parameters),
            torch.enable_grad(),
        ):
            return torch.autograd.grad(
                self._call(inputs), parameters, cotangents, materialize_grads=True
            )

    def first_outputs(self, inputs: Inputs, size: int) -> Tensor:
        """Compute the outputs for a batch, and check that they are repeatable and finite."""
        plain = unwrapped(self._user_model)
        with torch.no_grad():
            with refuse_calls(plain, self.names, self._call.model):
                outputs = self.outputs(self.parameters, inputs)
            first_input = take(inputs, slice(0, 1))
            first_output = self.outputs(self.parameters, first_input)
            two_inputs = take(inputs, slice(0, 2))
            once = self.outputs(self.parameters, two_inputs)
            twice = self.outputs(self.parameters, two_inputs)
        if outputs.shape[:1] != (size,) or outputs.dtype != self.dtype:
            raise ValueError(
                f"The model returned {outputs.dtype} outputs of shape {tuple(outputs.shape)} for "
                f"{size} examples. Return {self.dtype} outputs, one row per example."
            )
        check_outputs(outputs, least=0)
        # The outputs need not be bitwise equal: parallel sums on an accelerator may vary in order.
        if not torch.allclose(once, twice, rtol=1e-4, atol=1e-6):
            raise ValueError(
                "Two forward passes of the same examples differ, but curvature needs a "
                "deterministic model. Remove random layers, or make them deterministic in eval "
                "mode."
            )
        check_repeatable(self._call.model, first_input, first_output, outputs[:1])
        return outputs

    def returns_vector(self, inputs: Inputs) -> bool:
        """Whether the model itself returns a single output as `[B]`."""
        with torch.no_grad():
            return returned_outputs(self.working_copy(), take(inputs, slice(0, 1))).ndim == 1

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Split vectors `[..., D]` into one tensor `[..., *shape]` per parameter."""
        flat_tensors = vectors.split(self._sizes, -1)
        return [
            flat.unflatten(-1, shape) if len(shape) else flat.squeeze(-1)
            for flat, shape in zip(flat_tensors, self.layout.shapes, strict=True)
        ]

    def join(self, tensors: Any, batched: bool) -> Tensor:
        """Invert `split`; `batched` says whether vectors have a leading dimension."""
        if batched:
            return torch.cat([x.flatten(1) if x.ndim > 1 else x[:, None] for x in tensors], -1)
        return torch.cat([x.flatten() for x in tensors])


class _Call(nn.Module):
    """A wrapper for `functional_call`, which calls the model with `calling.call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Any:
        return call(self.model, inputs)
