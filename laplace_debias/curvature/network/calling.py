"""Calls of a model, its outputs as one tensor, and the torch settings with which it runs."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.checkpoints import PlainCheckpoints
from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    tensors_of,
    with_tensors,
    without_subclass,
)
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.replaced_functions import ReplacedFunctions
from laplace_debias.system.threads import SharedSetting


def call(
    model: nn.Module, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Call the model like `returned_outputs`, but return outputs `[B]` as `[B, 1]`.

    Raises:
        ValueError: If the outputs are those of a different number of examples.
    """
    outputs = returned_outputs(model, inputs, parameters)
    batch_shape = tensors_of(inputs)[0].shape[:1]
    if outputs.ndim > 1 and outputs.shape[:1] != batch_shape:
        raise ValueError(
            f"The model returned outputs of shape {tuple(outputs.shape)} for a batch of "
            f"{batch_shape.numel()}, but the first dimension must be the examples. Return one row "
            "per example, for any number of examples."
        )
    return as_columns(outputs, batch_shape)


def as_columns(outputs: Tensor, batch_shape: torch.Size) -> Tensor:
    """Reshape a single output for each example, `[B]`, to outputs `[B, 1]`."""
    return outputs.unsqueeze(1) if outputs.shape == batch_shape else outputs


def returned_outputs(
    model: nn.Module, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Call the model, and return its outputs in their own shape.

    If `parameters` are passed, their values replace the model's, and `torch.func` can differentiate
    the call with respect to them. The model receives copies of the inputs, because in-place
    operations must not change a batch that is used again.

    Raises:
        TypeError: If the model does not return a tensor of real numbers.
    """
    inputs = with_tensors(inputs, map(torch.clone, tensors_of(inputs)))
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        arguments = (inputs,)
    elif isinstance(inputs, OneArgument):
        arguments = (dict(inputs),)
    elif isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        arguments = tuple(inputs)
    try:
        if parameters is None:
            with layer_by_layer():
                return without_subclass(logits_of(model(*arguments, **named)))
        with differentiable(model):
            outputs = functional_call(model, dict(parameters), arguments, named)
            return without_subclass(logits_of(outputs))
    except ValueError as error:
        # torch raises this error if the model computes statistics over a batch with a single
        # example.
        if "more than 1 value per channel" in str(error):
            raise mixing_error() from error
        raise


def mixing_error() -> ValueError:
    """Make the error for a model in which an example's outputs depend on other examples."""
    return ValueError(
        "The outputs of an example change with the other examples of the batch, so the curvature "
        "per example is not defined. Look for statistics over the batch, or attention along the "
        "wrong dimension, and change the model so that the outputs of each example depend only "
        "on this example. If the examples are the nodes of a graph, pass the graph as one example."
    )


@SharedSetting
@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Switch off checkpoints and torch's fused transformer layers, which bypass hooks."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _PLAIN_CHECKPOINTS:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


_PLAIN_CHECKPOINTS = PlainCheckpoints(layer_by_layer.is_made_by_this_thread)


# Disable fused attention kernels, because they have no forward derivative.
_plain_attention = SharedSetting(partial(sdpa_kernel, SDPBackend.MATH))


def _ignoring(category: type[Warning], message: str = "") -> tuple[Any, ...]:
    """Return a filter of warnings, in the format of `warnings.filters`."""
    pattern = re.compile(message, re.IGNORECASE) if message else None
    return ("ignore", pattern, category, None, 0)


_FILTERS_OF_QUIET = [
    _ignoring(FutureWarning),
    _ignoring(Warning, "TF32 acceleration"),
    # An operation that torch does not vectorise runs in a loop, which is slower but gives the same
    # numbers.
    _ignoring(Warning, "There is a performance drop"),
]


@SharedSetting
@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about its own internals.

    The filters are added and removed one by one, so that filters that other threads set in the
    meantime are kept. A thread that leaves `warnings.catch_warnings` later may add them again; they
    are the same objects in every call, so the next call removes them.
    """
    filters: Any = warnings.filters
    filters[:0] = _FILTERS_OF_QUIET
    try:
        yield
    finally:
        added_ids = set(map(id, _FILTERS_OF_QUIET))
        filters = warnings.filters
        filters[:] = [entry for entry in filters if id(entry) not in added_ids]


@SharedSetting
@contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Turn off cuDNN and oneDNN, and with them the fused kernels of recurrent layers."""
    with ExitStack() as stack:
        # These switches also set the TF32 flag, for which torch shows a warning.
        with quiet():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        try:
            yield
        finally:
            with quiet():
                stack.close()


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Make a model differentiable to any order, in forward and in reverse mode."""
    is_recurrent = any(layer_rule(module).is_recurrent for module in model.modules())
    recurrence = _plain_recurrence() if is_recurrent else nullcontext()
    with layer_by_layer(), _plain_attention(), ReplacedFunctions(), recurrence:
        yield


def logits_of(outputs: Any) -> Tensor:
    """Find the outputs in a model's return value, and convert half precision to single precision.

    The outputs are the tensor itself; `.logits` of an object; the entry `"logits"` of a mapping, or
    its only tensor; the first entry of a tuple or list, or the second entry if the first is a loss,
    a single number (Hugging Face with `return_dict=False`).
    """
    logits = _logits_entry(outputs)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"The model returned {_description(outputs)}. Wrap it in a module that returns a "
            "tensor, an object with the attribute `logits`, a dict with the entry 'logits', or a "
            "tuple that begins with the logits."
        )
    if logits.is_nested or logits.is_complex():
        kind = f"complex ({logits.dtype})"
        remedy = "converts them with torch.view_as_real"
        if logits.is_nested:
            kind = "a nested tensor"
            remedy = "pads them"
        raise TypeError(
            f"The model's outputs are {kind}, but a real tensor of shape [batch, ..., outputs] is "
            f"needed. Wrap the model in a module that {remedy}."
        )
    return logits.to(wide(logits.dtype))


def _logits_entry(outputs: Any) -> Any:
    """Return the part of a model's return value that `logits_of` describes, of any type."""
    # This case comes first, because a plain tensor is by far the most common.
    if type(outputs) is Tensor:
        return outputs
    if hasattr(outputs, "logits"):
        return outputs.logits
    if isinstance(outputs, Mapping):
        tensors = tensors_of(outputs)
        only_tensor = tensors[0] if len(tensors) == 1 else None
        return outputs.get("logits", only_tensor)
    if isinstance(outputs, (tuple, list)) and outputs:
        begins_with_loss = isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
        return outputs[1] if begins_with_loss and len(outputs) > 1 else outputs[0]
    return outputs


def _description(outputs: Any) -> str:
    """Describe outputs by their type and their entries' types, because they may be large."""
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        return f"a {kind} with the entries {[str(key) for key in outputs]}"
    if hasattr(outputs, "logits"):
        return f"a {kind} whose `.logits` is of type {type(outputs.logits).__name__}"
    if isinstance(outputs, (tuple, list)):
        return f"a {kind} of [{', '.join(type(entry).__name__ for entry in outputs)}]"
    return kind
