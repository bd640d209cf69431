"""Outputs at chosen positions only, such as the outputs at a language model's last token."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.calling import call, logits_of
from laplace_debias.curvature.network.inputs import Inputs, like, num_examples, take
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.system.memory import suppress_unsupported

Positions = int | Sequence[int] | Tensor
"""One position, positions for all examples `[p]`, or positions for each example `[B, p]`."""

# The name of the positions among the inputs.
_NAME = "_chosen_positions"


@dataclass(frozen=True)
class ChosenPositions:
    """The requested positions, and the place in the network at which they can be chosen.

    Attributes:
        columns: The indices of the requested positions in the outputs, `[B, p]`.
        is_single: Whether a single position was requested. Results then have no dimension for
            positions.
        head: The path of the `nn.Linear` whose outputs, `[B, T, C]`, are the outputs of the
            network. Only the inputs at the requested positions need to be passed to it. None if
            there is no such layer.
    """

    columns: Int[Tensor, "batch p"]
    is_single: bool
    head: str | None

    def inputs(self, x: Inputs) -> Inputs:
        """Add the positions to the inputs, in the form that the result of `network` requires."""
        if isinstance(x, Tensor):
            return (x, self.columns)
        if isinstance(x, Mapping):
            return like(x, {**x, _NAME: self.columns})
        return (*x, self.columns)

    def network(self, model: nn.Module, before_head: bool) -> nn.Module:
        """Copy a model so that it returns outputs `[B, p, C]` for the inputs that `inputs` returns.

        With `before_head`, only the chosen positions are passed to the head, so that nothing of
        size T·C is computed.
        """
        copied = shared_copy(model)
        columns = torch.empty(0)

        def take_out(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            """Remove the positions from the arguments, and keep them for the hooks of the head."""
            nonlocal columns
            if _NAME in named:  # The inputs are passed by name.
                columns = named[_NAME]
                return args, {key: value for key, value in named.items() if key != _NAME}
            if len(args) == 1 and isinstance(args[0], Mapping):  # They are a `OneArgument`.
                inputs = dict(args[0])
                columns = inputs.pop(_NAME)
                return (inputs,), named
            *inputs_before, columns = args
            return tuple(inputs_before), named

        def choose_inputs(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if args:
                return (values_at(args[0], columns), *args[1:]), named
            return args, {**named, "input": values_at(named["input"], columns)}

        def choose_outputs(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> Tensor:
            return values_at(logits_of(outputs), columns)

        copied.register_forward_pre_hook(take_out, prepend=True, with_kwargs=True)
        if before_head:
            assert self.head is not None
            head = copied.get_submodule(self.head)
            head.register_forward_pre_hook(choose_inputs, with_kwargs=True)
        else:
            copied.register_forward_hook(choose_outputs)
        return copied


def choose_positions(model: nn.Module, x: Inputs, positions: Positions) -> ChosenPositions:
    """Locate the requested positions, by running one example.

    Negative positions count from the end or, if the inputs contain an `attention_mask` `[B, T]`,
    from the last position that is not padding.
    """
    requested = _as_tensor(positions)
    example = take(x, slice(0, 1))
    copied = shared_copy(model)
    calls = LinearCalls(copied)
    with torch.no_grad():
        outputs = call(copied, example)
    if outputs.ndim != 3:
        shape = ", ".join(["batch", *map(str, outputs.shape[1:])])
        raise ValueError(
            f"`positions={_describe_positions(positions)}` applies only to models with "
            f"outputs [batch, positions, classes]. This model returns [{shape}]. Remove "
            "`positions=`."
        )
    mask = _attention_mask(model, x, outputs.shape[1])
    requested = requested.to(outputs.device)
    columns = _columns(requested, mask, num_examples(x), outputs.shape[1])
    is_single = requested.ndim == 0
    # The head can be applied to only some positions if the model returns its outputs unchanged.
    is_head = calls.z is outputs and outputs._version == 0 and calls.counts[calls.path] == 1
    before_head = ChosenPositions(columns, is_single, head=calls.path)
    if is_head and calls.x.ndim == 3 and _takes_fewer(model, before_head, example, outputs):
        return before_head
    return ChosenPositions(columns, is_single, head=None)


def _as_tensor(positions: Positions) -> Int[Tensor, "*shape"]:
    """Convert positions to a tensor of integers, `[]`, `[p]` or `[batch, p]`."""
    try:
        requested = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"`positions` must be integers, got {_describe_positions(positions)}. Pass an integer "
            "or a tensor."
        ) from error
    if requested.ndim > 2 or requested.numel() == 0:
        raise ValueError(
            f"`positions` has shape {tuple(requested.shape)}. Pass an integer, a tensor [p] for "
            "all examples, or a tensor [batch, p] with positions for each example."
        )
    if requested.is_floating_point() or requested.is_complex() or requested.dtype == torch.bool:
        raise TypeError(
            f"`positions` must be integers, got {requested.dtype}. To pass the positions at which "
            "a mask is True, use mask.nonzero()."
        )
    return requested.long()


def _describe_positions(positions: Positions) -> str:
    """Return positions for an error message; a tensor is described by its shape."""
    return f"a tensor {tuple(positions.shape)}" if isinstance(positions, Tensor) else f"{positions}"


def _columns(
    requested: Tensor, mask: Tensor | None, batch: int, length: int
) -> Int[Tensor, "batch p"]:
    """Compute the positions' indices from the start, `[B, p]`.

    Args:
        requested: The positions, `[]`, `[p]` or `[B, p]`. Negative positions count from the last
            position that is not padding.
        mask: The attention mask; None if there is no padding.
        batch: The number of examples B.
        length: The number of positions T of the outputs.
    """
    requested = _for_each_example(requested, batch)
    is_real = _real_positions(requested, mask, batch, length)
    num_real = is_real.sum(1, keepdim=True)
    is_missing = (requested >= length) | (requested < -num_real)
    if bool(is_missing.any()):
        example, index = is_missing.nonzero()[0].tolist()
        raise ValueError(
            f"Example {example} has no position {int(requested[example, index])}. It has "
            f"{int(num_real[example])} positions that are not padding, of {length} in total. "
            "Pass one of these positions."
        )
    # Padding comes first, followed by the other positions, both in their original order. Position
    # −k is therefore the k-th from the end of this order.
    in_order = is_real.argsort(dim=1, stable=True)
    columns = torch.where(requested < 0, in_order.gather(1, requested % length), requested)
    is_padding = is_real.gather(1, columns) == 0
    if bool(is_padding.any()):
        example, index = is_padding.nonzero()[0].tolist()
        raise ValueError(
            f"Position {int(columns[example, index])} of example {example} is padding according "
            "to the attention_mask. Pass a different position, or count from the end (-1 is the "
            "last position that is not padding)."
        )
    return columns


def _for_each_example(requested: Tensor, batch: int) -> Int[Tensor, "batch p"]:
    """Return one row of positions for each example."""
    if requested.ndim == 2 and len(requested) != batch:
        raise ValueError(
            f"`positions` has shape {tuple(requested.shape)}, which is for "
            f"{len(requested)} examples, but the inputs contain {batch} examples. "
            "Pass one row per example, or a tensor [p] for all examples."
        )
    num_positions = requested.shape[-1] if requested.ndim else 1
    return requested.reshape(-1, num_positions).expand(batch, -1)


def _real_positions(
    requested: Tensor, mask: Tensor | None, batch: int, length: int
) -> Int[Tensor, "batch length"]:
    """Return 1 for positions that are not padding, and 0 for padding.

    A mask of another shape is ignored if no position counts from the end.
    """
    if mask is not None and mask.shape == (batch, length):
        return (mask != 0).long()
    if mask is not None and bool((requested < 0).any()):
        raise ValueError(
            "Negative positions are counted from the end of each sequence. The ends are "
            f"unknown, because the outputs have {length} positions, but the "
            f"attention_mask has shape {tuple(mask.shape)}. Pass positions from 0 to "
            f"{length - 1}."
        )
    return requested.new_ones(batch, length)


def _attention_mask(model: nn.Module, x: Inputs, length: int) -> Tensor | None:
    """Return the attention mask among the inputs, or the mask of a decoder with its own inputs.

    A PEFT prompt comes before the positions of the inputs, and is not padding.
    """
    if isinstance(x, Tensor):
        return None
    if isinstance(x, Mapping):
        named = dict(x)
    else:
        named = dict(zip(inspect.signature(unwrapped(model).forward).parameters, x, strict=False))
    decoder_inputs = named.get("decoder_input_ids", named.get("decoder_inputs_embeds"))
    key = "attention_mask" if decoder_inputs is None else "decoder_attention_mask"
    mask = named.get(key)
    if not isinstance(mask, Tensor):
        return None
    adapter = getattr(unwrapped(model), "active_peft_config", None)
    num_virtual = getattr(adapter, "num_virtual_tokens", None) or 0
    if mask.ndim == 2 and mask.shape[1] + num_virtual == length:
        return F.pad(mask, (num_virtual, 0), value=1)
    return mask


class LinearCalls:
    """A recorder of the last call of a linear layer in a forward pass.

    The call computed `z` from `x`, which keeps its graph. The hooks stay on the working copy.
    """

    def __init__(self, network: nn.Module, head: str | None = None) -> None:
        self.path = ""
        self.x = torch.empty(0)
        self.z = torch.empty(0)
        self.counts: dict[str, int] = {}
        for path, layer in network.named_modules():
            rule = layer_rule(layer)
            is_plain = rule.is_linear and rule.has_plain_forward(layer)
            if is_plain and not is_parametrized(layer) and head in (None, path):
                layer.register_forward_hook(partial(self._record, path), with_kwargs=True)

    def _record(
        self, path: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], z: Any
    ) -> None:
        self.path = path
        self.z = z
        self.x = args[0] if args else named["input"]
        self.counts[path] = self.counts.get(path, 0) + 1


def _takes_fewer(
    model: nn.Module, chosen: ChosenPositions, example: Inputs, outputs: Tensor
) -> bool:
    """Whether passing only some positions to the head works and gives the same outputs."""
    first = ChosenPositions(chosen.columns[:1], chosen.is_single, chosen.head)
    expected = values_at(outputs, first.columns)
    # A forward pass may raise any error.
    with suppress_unsupported(Exception), torch.no_grad():
        at_positions = call(first.network(model, before_head=True), first.inputs(example))
        is_alike = at_positions.shape == expected.shape
        return is_alike and torch.allclose(at_positions, expected, 1e-3, 1e-5)
    return False


def values_at(values: Tensor, columns: Int[Tensor, "batch p"]) -> Tensor:
    """Select positions of values `[B, T, d]`, and return `[B, p, d]`."""
    return values.gather(1, columns.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
