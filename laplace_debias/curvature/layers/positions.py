r"""The positions that take part in layers whose positions share a weight.

T and the moments of K-FAC include only the positions that take part, example by example. A position
of a layer's output does not take part if its gradient vanishes for every cotangent of the loss, and
one of these conditions holds:

- its target is ignored, or no target of the example contributes to the loss; or
- its token is the `padding_idx` of an embedding; or
- the example does not reach the layer at all, though its batch calls the layer; or
- no output that contributes to the loss depends on the position at all: its gradient vanishes in
  all layers of the same sequence, see `_influence`. This is the case for padding that an attention
  mask or a multiplied mask hides, or that follows the last position that a causal model reads. This
  condition is checked if the inputs can show padding: tokens, masks or lengths, which are integers
  or bools, or several tensors. In a single tensor of features, it is checked only for positions
  whose features are all zero.

A vanishing gradient would not be enough. If a classifier reads only the first token, its last block
has no gradient at any other position, but these positions still belong to the example.

The gradients are computed in a separate pass, for one cotangent with generic numbers at all outputs
that contribute to the loss. Therefore, the result does not depend on how columns, examples or
batches are split. It is also the same if an output is so certain that its own columns vanish. If a
ReLU is dead or a Tanh saturated, the derivative is zero only for these inputs; `_pass_through` lets
the cotangent pass nevertheless.

The pass is needed if some targets do not contribute to the loss, if the inputs may contain padding,
or if the network has a layer that only some examples reach. Otherwise all positions take part, and
the pass is omitted. Layers with one position per example need no pass either: the position takes
part if a target of the example contributes to the loss.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block, LayerRule, Site, layer_rule
from laplace_debias.curvature.layers.gates import POINTWISE
from laplace_debias.curvature.layers.layer_calls import LayerCall, LayerOutput, first_argument
from laplace_debias.curvature.layers.records import Masks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.network.inputs import Inputs, move, tensors_of
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.system.graph import graph_nodes, nodes_in_order

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class PresentPositions:
    """The positions of a batch that take part.

    Attributes:
        masks_by_layer: The positions that take part, by the layer's path, for every call on which
            the outputs depend; empty if all positions take part.
        counted_examples: The examples with a target that contributes to the loss ("counts"); None
            if all examples have such a target.
        single_layers: The layers with one position per example. The position takes part if the
            example counts.
        examined_layers: The layers for which it is known which examples reach them.
    """

    masks_by_layer: Mapping[str, Masks] = field(default_factory=dict)
    counted_examples: Bool[Tensor, " batch"] | None = None
    single_layers: Collection[str] = ()
    examined_layers: Collection[str] = ()

    def masks(self, block: Block, num_calls: int) -> Masks | None:
        """Return a mask for each call of a weight block's layer, or None if nothing is masked."""
        if block.is_vector:
            return None
        if block.layer in self.masks_by_layer:
            return self.masks_by_layer[block.layer]
        if block.layer in self.single_layers and self.counted_examples is not None:
            return [self.counted_examples.unsqueeze(1)] * num_calls
        return None


class PositionFinder:
    """A search, batch by batch, for the positions that take part.

    `layer_calls` and `outputs` are the layer calls and outputs for one example.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[Block],
        cotangents: Cotangents,
        layer_calls: Sequence[LayerCall],
        outputs: Tensor,
    ) -> None:
        self._network = network
        self._cotangents = cotangents
        self._ndim = outputs.ndim
        self._device = outputs.device
        self._weight_blocks = [block for block in blocks if not block.is_vector]
        nums_by_block = {
            block: _nums_positions(block, layer_calls) for block in self._weight_blocks
        }
        with_positions = [block for block, nums in nums_by_block.items() if nums]
        called = {call.layer for call in layer_calls}
        uncalled = [block for block in self._weight_blocks if block.layer not in called]
        # Layers that this example does not call may have several positions for other examples.
        self._position_blocks = [*with_positions, *uncalled]
        self._single_layers = {block.layer for block in self._weight_blocks}
        self._single_layers -= {block.layer for block in self._position_blocks}
        # The classes of outputs come after the positions, or between the examples and the
        # positions.
        nums_of_outputs = {outputs.shape[1:-1].numel(), outputs.shape[2:].numel()}
        nums_of_blocks = set[int]().union(*nums_by_block.values())
        self._is_pooled = outputs.ndim == 2 or not nums_of_blocks <= nums_of_outputs
        # The search for conditional layers and the passes for their positions take turns.
        self._passes: dict[tuple[Block, ...], _Pass] = {}

    def find(self, x: Inputs, y: Tensor, conditional: Collection[Site]) -> PresentPositions:
        """Find the positions of a batch that take part.

        Whether some positions do not take part is decided on the device of inputs and targets. On
        an accelerator, the host waits for the answer, and once more for the result of a pass.

        Args:
            x: The inputs.
            y: The targets.
            conditional: The sites of layers that only some batches call. Whether a batch calls a
                layer for examples that do not reach it depends on the batching of examples.
        """
        if not self._weight_blocks:
            return PresentPositions()
        masks_by_layer: Mapping[str, Masks] = {}
        examined: Collection[str] = ()
        conditional_blocks = [block for block in self._weight_blocks if block.site in conditional]
        counted = self._cotangents.counted(y, self._ndim)
        # On an accelerator, the host would have to wait for the answer whether all outputs count.
        # Layers with one position use the mask directly, so they do not need the answer.
        needs_answer = bool(self._position_blocks or conditional_blocks)
        reads_answer = needs_answer or y.device.type == "cpu"
        if counted is not None and reads_answer and bool(counted.all()):
            counted = None
        may_hold_padding = bool(self._position_blocks) and (
            counted is not None or _may_hold_padding(x, self._is_pooled)
        )
        if may_hold_padding or conditional_blocks:
            masks_by_layer = self._find_by_pass(x, counted, conditional_blocks, may_hold_padding)
            examined = {block.layer for block in (*self._position_blocks, *conditional_blocks)}
        if counted is None:
            return PresentPositions(masks_by_layer, examined_layers=examined)
        counted_examples = counted.flatten(1).any(1).to(self._device, non_blocking=True)
        return PresentPositions(masks_by_layer, counted_examples, self._single_layers, examined)

    def sites_not_reached(self, x: Inputs, y: Tensor) -> set[Site]:
        """Find the sites that some example does not reach although it has a target that counts.

        The outputs of such an example do not depend on the layer, though the batch may call the
        layer for all examples.
        """
        counted = self._cotangents.counted(y, self._ndim)
        masks_by_layer = self._find_by_pass(x, counted, self._weight_blocks, may_hold_padding=False)
        sites: set[Site] = set()
        for block in self._weight_blocks:
            masks = masks_by_layer.get(block.layer, ())
            if masks:
                is_reached = torch.stack([mask.any(1) for mask in masks]).any(0)
                if counted is not None:
                    is_reached |= ~counted.flatten(1).any(1).to(is_reached.device)
                if not bool(is_reached.all()):
                    sites.add(block.site)
        return sites

    def _find_by_pass(
        self,
        x: Inputs,
        counted: Tensor | None,
        conditional_blocks: Sequence[Block],
        may_hold_padding: bool,
    ) -> Mapping[str, Masks]:
        """Find positions by a backward pass; there are no masks if all positions take part.

        Args:
            x: The inputs.
            counted: The mask of the outputs that contribute to the loss; None for all.
            conditional_blocks: The blocks of layers that only some batches call.
            may_hold_padding: Whether the inputs may contain padding.
        """
        blocks = tuple(dict.fromkeys([*self._position_blocks, *conditional_blocks]))
        if blocks not in self._passes:
            # A `_Pass` is created only when it is first needed, because its hooks cost time and
            # most data contain no padding.
            self._passes[blocks] = _Pass(shared_copy(self._network), blocks)
        matrices = [tensor for tensor in tensors_of(x) if tensor.ndim == 2]
        # The numbers of positions T of tokens or masks `[B, T]`.
        sequence_lengths = {
            matrix.shape[1]
            for matrix in matrices
            if not matrix.is_floating_point() or _is_mask(matrix)
        }
        device = self._device
        x = move(x, device, None)
        counted = None if counted is None else counted.to(device, non_blocking=True)
        masks_by_layer = self._passes[blocks].run(x, counted, sequence_lengths, may_hold_padding)
        if not masks_by_layer:
            return {}
        are_full = [mask.all() for masks in masks_by_layer.values() for mask in masks]
        return {} if bool(torch.stack(are_full).all()) else masks_by_layer


def _nums_positions(block: Block, layer_calls: Sequence[LayerCall]) -> set[int]:
    """Return the number of positions in each call of a block's layer that has positions."""
    channels = block.num_groups * block.shape[0]
    return {
        call.z.shape[1:].numel() // channels
        for call in layer_calls
        if call.layer == block.layer and len(call.z.shape) > 2
    }


def _may_hold_padding(x: Inputs, is_pooled: bool) -> bool:
    """Whether inputs may contain positions on which nothing depends, if every output counts.

    `is_pooled` says whether a layer has positions that have no output of their own.
    """
    tensors = tensors_of(x)
    zero_rows = _zero_rows(tensors)
    if zero_rows is not None:
        # For images, `zero_rows` has no positions, so the host need not wait for an answer.
        return is_pooled and zero_rows.shape[1] > 0 and bool(zero_rows.any())
    return is_pooled or any(_is_mask(x) and not _is_constant(x) for x in tensors)


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or (x.ndim == 2 and bool(((x == 0) | (x == 1)).all()))


def _is_constant(x: Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())


def _zero_rows(tensors: Sequence[Tensor]) -> Bool[Tensor, "batch positions"] | None:
    """Find the positions of a single tensor of features, `[B, T, d]`, that are entirely zero.

    The result is None for other inputs, which can show padding: tokens, masks or lengths, or
    several tensors.
    """
    x = tensors[0]
    if len(tensors) > 1 or not x.is_floating_point():
        return None
    if x.ndim != 3:
        return torch.zeros(len(x), 0, dtype=torch.bool, device=x.device)
    return (x == 0).all(-1)


@dataclass(frozen=True, eq=False)
class _RecordedCall:
    """A call of a layer in the pass.

    Attributes:
        path: The path of a layer that has blocks, or None for any other layer.
        layer: The layer.
        x: The input of the layer.
        z: The output of the layer.
        gradient: The cotangent at this output. It is None before the backward pass, and if the
            network's outputs do not depend on this output.
    """

    path: str | None
    layer: nn.Module
    x: Tensor
    z: LayerOutput
    gradient: Tensor | None = None

    @cached_property
    def rule(self) -> LayerRule:
        """The rule of the layer's type."""
        return layer_rule(self.layer)

    @cached_property
    def has_gradient(self) -> Bool[Tensor, "batch positions"]:
        """The positions where the cotangent does not vanish."""
        gradient = self.gradient
        if gradient is None:
            gradient = self.z.new_empty(*self.z.shape).zero_()
        return self.rule.nonzero_positions(gradient)


@dataclass(frozen=True, eq=False)
class _IdlePositions:
    """The reasons why positions with a vanishing gradient do not take part in a call.

    Attributes:
        ignored: The positions of outputs that do not count, or None if all outputs count.
        padding: The positions of padding tokens, by the number of positions.
        reached: The examples that have a gradient at some call of a layer, by the layer's path.
        influence: The positions where a call of the same sequence has a gradient, for each call;
            see `_influence`.
        zero_rows: The positions of the input whose features are all zero; None if the input can
            show padding by tokens, masks or lengths. See `_zero_rows`.
        sequence_lengths: The numbers of positions of tokens or masks.
        may_hold_padding: Whether the inputs may contain padding.
    """

    ignored: Bool[Tensor, "batch _"] | None
    padding: Mapping[int, Bool[Tensor, "batch _"]]
    reached: Mapping[str, Bool[Tensor, " batch"]]
    influence: Mapping[_RecordedCall, Bool[Tensor, "batch _"]]
    zero_rows: Bool[Tensor, "batch _"] | None
    sequence_lengths: Collection[int]
    may_hold_padding: bool

    def in_call(self, call: _RecordedCall) -> Bool[Tensor, "batch positions"]:
        """Return the positions for which there is a reason in a call of a layer."""
        assert call.path is not None
        length = call.has_gradient.shape[1]
        idle = torch.zeros_like(call.has_gradient) | ~self.reached[call.path].unsqueeze(1)
        if self.ignored is not None:
            if self.ignored.shape[1] == length:
                idle |= self.ignored
            else:
                # The layer has other positions than the outputs, so only examples without any
                # output that counts are left out.
                idle |= self.ignored.all(1, keepdim=True)
        if not self.may_hold_padding:
            return idle
        if length in self.padding:
            idle |= self.padding[length]
        # A convolution of images may accidentally have as many positions as a sequence.
        has_length = length in self.sequence_lengths or not call.rule.channels_first
        if has_length and call.rule.has_sequence(call.layer):
            if self.zero_rows is None:
                idle |= ~self.influence[call]
            elif self.zero_rows.shape[1] == length:
                idle |= self.zero_rows & ~self.influence[call]
        return idle


class _Pass:
    """One forward pass, and one backward pass of a generic cotangent.

    The hooks stay on the network.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self._tap = Tap(network, blocks)
        layers = {block.layer for block in blocks}
        # Layers without blocks are also recorded, so that the result does not depend on the choice
        # of blocks.
        self._calls_without_block: list[_RecordedCall] = []
        for path, module in network.named_modules():
            if path not in layers and layer_rule(module).has_sequence(module):
                module.register_forward_hook(self._record, prepend=True, with_kwargs=True)

    def _record(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> Any:
        """Record the call of a layer without blocks; return the output for the rest of the pass."""
        x = first_argument(inputs, named)
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return output
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        self._calls_without_block.append(
            _RecordedCall(None, module, x, LayerOutput.from_tensor(output))
        )
        return output.clone()

    def run(
        self,
        x: Inputs,
        counted: Tensor | None,
        sequence_lengths: Collection[int],
        may_hold_padding: bool,
    ) -> Mapping[str, Masks]:
        """Find the positions that take part in each call of each layer.

        `counted` broadcasts to the outputs, and `sequence_lengths` are the numbers of positions of
        tokens or masks. If the inputs cannot contain padding, padding is not searched for.
        """
        outputs, calls = self._forward(x)
        if not (calls and outputs.requires_grad):
            return {}
        if counted is not None and not _broadcasts(counted, outputs):
            # The loss raises an error about targets of a wrong shape when it receives the outputs.
            return {}
        _pass_through(outputs)
        edges = [call.z.edge for call in calls if call.z.edge is not None]
        cotangent = _generic_cotangent(outputs, counted)
        gradients = torch.autograd.grad(outputs, edges, cotangent, allow_unused=True)
        pairs = zip(calls, gradients, strict=True)
        calls = [replace(call, gradient=gradient) for call, gradient in pairs]
        idle = _IdlePositions(
            ignored=None if counted is None else ~counted.flatten(1),
            padding=_padding(calls),
            reached=_reached_examples(calls),
            influence=_influence(outputs, calls),
            zero_rows=_zero_rows(tensors_of(x)),
            sequence_lengths=sequence_lengths,
            may_hold_padding=may_hold_padding,
        )
        masks_by_layer: dict[str, list[Tensor]] = {}
        for call in calls:
            if call.path is not None and call.gradient is not None:
                mask = call.has_gradient | ~idle.in_call(call)
                masks_by_layer.setdefault(call.path, []).append(mask)
        return masks_by_layer

    def _forward(self, x: Inputs) -> tuple[Tensor, list[_RecordedCall]]:
        """Run the network, and return the outputs and the calls on which they may depend."""
        self._calls_without_block.clear()
        forward_pass = self._tap.forward(x)
        outputs = forward_pass.outputs
        calls: list[_RecordedCall] = []
        for call in forward_pass.layer_calls:
            layer = self._tap.layers[call.site]
            calls.append(_RecordedCall(call.layer, layer, call.x, call.z))
        for call_without_block in self._calls_without_block:
            shape = call_without_block.z.shape
            if len(shape) > 2 and shape[0] == len(outputs):
                calls.append(call_without_block)
        self._calls_without_block.clear()
        return outputs, [call for call in calls if call.z.edge is not None]


def _generic_cotangent(outputs: Tensor, counted: Tensor | None) -> Tensor:
    """Make a cotangent with distinct entries, zero at outputs that do not count."""
    numbers = torch.arange(1, outputs.numel() + 1, dtype=torch.float64, device=outputs.device)
    cotangent = (0.5 + (numbers * _GOLDEN).frac()).to(outputs.dtype).view_as(outputs)
    return cotangent if counted is None else cotangent * counted


def _reached_examples(calls: Sequence[_RecordedCall]) -> dict[str, Bool[Tensor, " batch"]]:
    """Find the examples that have a gradient at some call of a layer, by the layer's path."""
    reached: dict[str, Tensor] = {}
    for call in calls:
        if call.path is not None:
            is_reached = call.has_gradient.any(1)
            reached[call.path] = reached.get(call.path, is_reached) | is_reached
    return reached


def _influence(
    outputs: Tensor, calls: Sequence[_RecordedCall]
) -> dict[_RecordedCall, Bool[Tensor, "batch positions"]]:
    """Find the positions where a call of the same sequence has a gradient, for each call.

    These are the call itself and, among the calls with the same number of positions, those on which
    it depends or whose input is the input of one of them. The calls of a decoder are not among
    those of the encoder, so an encoder's padding has no influence even if both sequences have the
    same length.
    """
    is_related = _related_calls(outputs, calls)
    indices_by_length: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        indices_by_length[call.has_gradient.shape[1]].append(index)
    influence: dict[_RecordedCall, Tensor] = {}
    for indices in indices_by_length.values():
        has_gradient = torch.stack([calls[index].has_gradient for index in indices])
        relations = torch.from_numpy(is_related[np.ix_(indices, indices)].astype(np.float32))
        # The host must not wait for the device.
        relations = relations.to(has_gradient.device, non_blocking=True)
        # A product of matrices takes fewer operations than a disjunction for every pair of calls.
        num_related = relations @ has_gradient.flatten(1).float()
        masks = num_related.view(has_gradient.shape) > 0
        influence |= {calls[index]: mask for index, mask in zip(indices, masks, strict=True)}
    return influence


def _related_calls(
    outputs: Tensor, calls: Sequence[_RecordedCall]
) -> Bool[np.ndarray, "calls calls"]:
    """For each call, mark the calls on which it depends, and those with the same inputs as these.

    Row i marks the calls to which call i is related.
    """
    # The marks are numpy's, because torch takes many times longer for a few hundred booleans.
    marks_by_node: dict[Any, Bool[np.ndarray, " calls"]] = {}

    def mark(node: Any, marks: Bool[np.ndarray, " calls"]) -> None:
        if node in marks_by_node:
            marks = marks_by_node[node] | marks
        marks_by_node[node] = marks

    addresses = np.array([call.x.data_ptr() for call in calls])
    for call, address in zip(calls, addresses, strict=True):
        mark(_node(call), addresses == address)
    for node in nodes_in_order(outputs):
        for source, _ in node.next_functions:
            if source in marks_by_node:
                mark(node, marks_by_node[source])
    return np.stack([marks_by_node[_node(call)] for call in calls])


def _node(call: _RecordedCall) -> Any:
    """Return the node of the graph that computes a call's output."""
    assert call.z.edge is not None
    return call.z.edge.node


def _padding(calls: Sequence[_RecordedCall]) -> dict[int, Bool[Tensor, "batch positions"]]:
    """Find where tokens are padding for some embedding, by the number of positions."""
    padding: dict[int, Tensor] = {}
    for call in calls:
        is_padding = call.rule.padding(call.layer, call.x)
        if is_padding is not None:
            length = is_padding.shape[1]
            padding[length] = padding.get(length, torch.zeros_like(is_padding)) | is_padding
    return padding


def _broadcasts(mask: Tensor, outputs: Tensor) -> bool:
    sizes = zip(mask.shape, outputs.shape, strict=True)
    return mask.ndim == outputs.ndim and all(size in (1, other) for size, other in sizes)


def _pass_through(outputs: Tensor) -> None:
    """Let cotangents pass through nonlinearities as if these had a constant, positive slope.

    Each nonlinearity has its own slope, so that the contributions of different paths do not cancel.
    """
    nonlinearities = [node for node in graph_nodes(outputs) if node.name() in POINTWISE]
    for number, node in enumerate(nonlinearities, start=1):
        node.register_hook(_with_slope(0.5 + (number * _GOLDEN) % 1))


def _with_slope(slope: float) -> Any:
    """Return a hook that replaces the gradient of an elementwise operation by a constant slope."""

    def hook(into: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...]) -> Any:
        (g,) = out
        if g is None or into[0] is None:
            return None
        return (slope * g, *into[1:])

    return hook
