"""Outputs at chosen positions alone, such as those of a language model's last token."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from laplace_debias.curvature.network.inputs import (
    Inputs,
    call,
    like,
    logits_of,
    num_examples,
    take,
)
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.system.memory import is_out_of_memory

Positions = int | Sequence[int] | Tensor
"""One position, the same ones for every example `[p]`, or a choice for each of them `[B, p]`."""

# Under which the positions are among the inputs.
_NAME = "_chosen_positions"


@dataclass(frozen=True)
class ChosenPositions:
    """The positions that are asked for, and where they can be chosen.

    The `columns`, `[B, p]`, are their places among the outputs' positions. A single one has no
    dimension in the results. The `head` is the path of the `nn.Linear` whose outputs, `[B, T, C]`,
    are the network's as they came: it needs to see these positions alone.
    """

    columns: Int[Tensor, "batch p"]
    is_single: bool
    head: str | None

    def inputs(self, x: Inputs) -> Inputs:
        """The inputs with the positions among them, for what `network` gives."""
        if isinstance(x, Tensor):
            return (x, self.columns)
        if isinstance(x, Mapping):
            return like(x, {**x, _NAME: self.columns})
        return (*x, self.columns)

    def network(self, model: nn.Module, before_head: bool) -> nn.Module:
        """A `shared_copy` of a model, with outputs `[B, p, C]` of inputs that `inputs` made.

        With `before_head` the head sees the chosen positions alone: nothing of size T·C is made.
        """
        twin, kept = shared_copy(model), list[Tensor]()

        def take_out(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            rest = dict(named)
            if _NAME in rest:
                kept[:] = [rest.pop(_NAME)]
            elif len(args) == 1 and isinstance(args[0], Mapping):
                args = (dict(args[0]),)
                kept[:] = [args[0].pop(_NAME)]
            else:
                *args, columns = args  # type: ignore[assignment]
                kept[:] = [columns]
            return tuple(args), rest

        def choose(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if args:
                return (_at(args[0], *kept), *args[1:]), named
            return args, {**named, "input": _at(named["input"], *kept)}

        twin.register_forward_pre_hook(take_out, prepend=True, with_kwargs=True)
        if before_head:
            assert self.head is not None
            twin.get_submodule(self.head).register_forward_pre_hook(choose, with_kwargs=True)
        else:
            twin.register_forward_hook(lambda _, __, outputs: _at(logits_of(outputs), *kept))
        return twin


def choose_positions(model: nn.Module, x: Inputs, positions: Positions) -> ChosenPositions:
    """Find the positions that are asked for, by running one example.

    Negative ones count from the end: where the inputs hold an `attention_mask` `[B, T]`, from the
    last position that is not padding.
    """
    asked = _as_tensor(positions)
    example = take(x, slice(0, 1))
    twin = shared_copy(model)
    calls = LinearCalls(twin)
    with torch.no_grad():
        outputs = call(twin, example)
    if outputs.ndim != 3:
        raise ValueError(
            f"positions={_shown(positions)} asks for positions of outputs [batch, positions, "
            f"outputs], the model's are [{', '.join(['batch', *map(str, outputs.shape[1:])])}]: "
            "leave positions out."
        )
    mask, size = _mask_of(model, x), num_examples(x)
    columns = _columns(asked.to(outputs.device), mask, size, outputs.shape[1])
    # The linear layer that the outputs come from as they are, if there is one.
    is_head = calls.z is outputs and outputs._version == 0 and calls.counts[calls.path] == 1
    chosen = ChosenPositions(columns, asked.ndim == 0, calls.path)
    if is_head and calls.x.ndim == 3 and _takes_fewer(model, chosen, example, outputs):
        return chosen
    return ChosenPositions(columns, chosen.is_single, None)


def _as_tensor(positions: Positions) -> Int[Tensor, "*shape"]:
    try:
        asked = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"positions must be integers, got {_shown(positions)}.") from error
    if asked.ndim > 2 or asked.numel() == 0:
        raise ValueError(
            "positions must be one integer, some for all examples [p] or some for each [batch, p], "
            f"got shape {tuple(asked.shape)}."
        )
    if asked.is_floating_point() or asked.is_complex() or asked.dtype == torch.bool:
        raise TypeError(
            f"positions must be integers, got {asked.dtype}: where a mask is True is "
            "mask.nonzero()."
        )
    return asked.long()


def _shown(positions: Positions) -> str:
    return f"a tensor {tuple(positions.shape)}" if isinstance(positions, Tensor) else f"{positions}"


def _columns(asked: Tensor, mask: Tensor | None, batch: int, length: int) -> Int[Tensor, "batch p"]:
    """Where positions lie, from the start."""
    if asked.ndim == 2 and len(asked) != batch:
        raise ValueError(
            f"positions of shape {tuple(asked.shape)} are of {len(asked)} examples, the inputs of "
            f"{batch}: pass one row for each, or [p] for all."
        )
    asked = asked.reshape(-1, asked.shape[-1] if asked.ndim else 1).expand(batch, -1)
    if mask is not None and mask.shape != (batch, length):
        if bool((asked < 0).any()):
            raise ValueError(
                f"Negative positions count back from the last one that is not padding, and an "
                f"attention_mask of shape {tuple(mask.shape)} does not tell which that is among "
                f"the {length} positions of the outputs: pass positions from 0 to {length - 1}."
            )
        mask = None
    real = asked.new_ones(batch, length) if mask is None else (mask != 0).long()
    counts = real.sum(1, keepdim=True)
    wrong = (asked >= length) | (asked < -counts)
    if bool(wrong.any()):
        example, which = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Example {example} has no position {int(asked[example, which])}: it has "
            f"{int(counts[example])} that are not padding, of {length}."
        )
    # Padding first, then what is not, each in its order.
    in_order = real.argsort(dim=1, stable=True)
    found = torch.where(asked < 0, in_order.gather(1, asked % length), asked)
    padding = real.gather(1, found) == 0
    if bool(padding.any()):
        example, which = padding.nonzero()[0].tolist()
        raise ValueError(
            f"Position {int(found[example, which])} of example {example} is padding, as the "
            "attention_mask says: ask for others, or count from the end (-1 is the last real one)."
        )
    return found


def _mask_of(model: nn.Module, x: Inputs) -> Tensor | None:
    """The mask of the positions among the inputs; of a decoder's where it has inputs of its own."""
    if isinstance(x, Tensor):
        return None
    if isinstance(x, Mapping):
        named = dict(x)
    else:
        named = dict(zip(inspect.signature(unwrapped(model).forward).parameters, x, strict=False))
    of_decoder = named.get("decoder_input_ids", named.get("decoder_inputs_embeds"))
    mask = named.get("attention_mask" if of_decoder is None else "decoder_attention_mask")
    return mask if isinstance(mask, Tensor) else None


class LinearCalls:
    """The last call of the linear layer `head` (None: of any) in a forward pass of a `shared_copy`.

    Hooks are left on the working copy. The call turned `x`, with its past, into `z`.
    """

    def __init__(self, network: nn.Module, head: str | None = None) -> None:
        self.path, self.x, self.z = "", torch.empty(0), torch.empty(0)
        self.counts: dict[str, int] = {}
        for path, layer in network.named_modules():
            is_plain = type(layer).forward is nn.Linear.forward and not is_parametrized(layer)
            if is_plain and head in (None, path):
                layer.register_forward_hook(partial(self._record, path), with_kwargs=True)

    def _record(
        self, path: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], z: Any
    ) -> None:
        self.path, self.z = path, z
        self.x = args[0] if args else named["input"]
        self.counts[path] = self.counts.get(path, 0) + 1


def _takes_fewer(
    model: nn.Module, chosen: ChosenPositions, example: Inputs, outputs: Tensor
) -> bool:
    """Whether the forward pass lets the head see some positions alone."""
    one = ChosenPositions(chosen.columns[:1], chosen.is_single, chosen.head)
    try:
        with torch.no_grad():
            found = call(one.network(model, before_head=True), one.inputs(example))
    # Whatever a forward pass raises.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    expected = _at(outputs, one.columns)
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-3, 1e-5)


def _at(values: Tensor, columns: Int[Tensor, "batch p"]) -> Tensor:
    """Values `[B, T, d]` at positions, `[B, p, d]`."""
    return values.gather(1, columns.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
