"""The layer tap, which yields each layer's inputs and output gradients for any forward pass."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layer_rules import Block, Site, layer_rule
from laplace_debias.curvature.layers.call_recorder import CallForms, CallRecorder, RecordedCalls
from laplace_debias.curvature.layers.calls import ModuleCall
from laplace_debias.curvature.layers.example_dims import ExampleDims
from laplace_debias.curvature.layers.forward_pass import ForwardPass, TappedSites
from laplace_debias.curvature.layers.layer_calls import (
    LayerRecorder,
    OperandRecorder,
    first_argument,
)
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take, tensors_of
from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.curvature.network.selection import leaving_out
from laplace_debias.curvature.network.shared_copy import (
    SavedAttributes,
    are_constant,
    preserve_attributes,
    requiring_grad,
)
from laplace_debias.system.memory import suppress_unsupported

# The largest number of rounds in which the forms of calls are learned, with copies of tensors that
# examples share.
_MOST_ROUNDS = 4


class Tap:
    """A tap that records the calls of chosen layers while it runs a network.

    Only the part of the graph after the first tapped layer is recorded, and no gradient with
    respect to a parameter is ever computed. The recording hooks are on the network only while the
    tap runs it.

    Args:
        network: The network.
        blocks: Blocks to attach to.

    Attributes:
        differentiates_one_by_one: Whether cotangents are pushed back one at a time.
    """

    def __init__(self, network: nn.Module, blocks: Iterable[Block] = ()) -> None:
        self.network = network
        self.differentiates_one_by_one = False
        for module in list(network.modules()):
            rule = layer_rule(module)
            self.differentiates_one_by_one |= rule.differentiates_one_by_one(module)
            rule.prepare(module)
        # `prepare` may have added modules.
        self._modules = list(network.modules())
        self._saved_attributes: SavedAttributes | None = None
        # The sites change when the tap is attached to other blocks. The forms of calls that passes
        # have learned remain valid as long as the sites are the same.
        self._blocks = blocks
        self._sites = TappedSites.from_blocks(network, blocks)
        self._calls = _LearnedCalls.at_sites(self._sites)

    @property
    def layers(self) -> Mapping[Site, nn.Module]:
        """The module at each site."""
        return self._sites.layers

    @property
    def learns_dims(self) -> bool:
        """Whether the dimensions of the examples are learned from the first inputs."""
        return self._calls.learns_dims

    @property
    def conditional(self) -> set[Site]:
        """Sites that at least one pass has not called; callers may add further sites."""
        return self._calls.conditional

    def attach(self, blocks: Iterable[Block]) -> "Tap":
        """Attach to the sites of blocks: layers, or modules whose calls are run again."""
        if blocks is self._blocks:
            return self
        self._blocks = blocks
        earlier_names = self._sites.names
        self._sites = TappedSites.from_blocks(self.network, blocks)
        if self._sites.names != earlier_names:
            self._calls = _LearnedCalls.at_sites(self._sites)
        return self

    def save_attributes(self) -> None:
        """Save the modules' attributes, which every later pass restores.

        If this method is not called, each pass saves the attributes itself.
        """
        modules = [] if are_constant(self._modules) else self._modules
        self._saved_attributes = SavedAttributes(modules)

    def forward(self, x: Inputs, graph: bool = True, strict: bool = True) -> ForwardPass:
        """Run the network and record the calls of the tapped layers.

        Args:
            x: The inputs.
            graph: Whether to record the graph. Without a graph, no cotangents can be pushed back.
            strict: Whether to raise the first fault of the pass, if there is any.
        """
        if self.learns_dims and not self._calls.dims.is_known:
            self._learn(x)
        recording = self._run(x, graph)
        if not recording.has_clear_dims:
            # The dimensions may differ for sequences of another length or images of another size.
            self._learn(x)
            recording = self._run(x, graph)
        forward_pass = recording.forward_pass
        forward_pass.faults |= self._faults(recording) | self._read_without_call(x, recording)
        if strict and forward_pass.faults:
            raise next(iter(forward_pass.faults.values()))
        return forward_pass

    def _run(self, x: Inputs, graph: bool) -> "_Recording":
        """Run the network once with hooks on all sites, and restore the attributes it changes."""
        size = num_examples(x)
        recorder = self._calls.recorder
        saved_attributes = self._saved_attributes or SavedAttributes(self._modules)
        handles: list[RemovableHandle] = []
        module_calls: RecordedCalls = {}
        if recorder is not None:
            handles, module_calls = recorder.hook(size)
        layer_recorder = LayerRecorder(self._calls.dims, size, graph)
        for path, layer in self._sites.hooked_layers:
            handles += layer_recorder.hook(path, layer)
        layer_calls = layer_recorder.layer_calls
        at_operands: AbstractContextManager = nullcontext()
        if self._sites.operands:
            at_operands = OperandRecorder(self._sites.operands, layer_calls)
        try:
            with torch.set_grad_enabled(graph), at_operands:
                outputs = call(self.network, x)
        finally:
            for handle in handles:
                handle.remove()
            saved_attributes.restore()
        complete_calls: list[ModuleCall] = []
        if recorder is not None:
            if "" in recorder.paths and not outputs.requires_grad:
                outputs = outputs.detach().requires_grad_()
            complete_calls = recorder.complete(module_calls, x, outputs)
        for layer_call in layer_calls:
            _check_wide(layer_call.layer, layer_call.z.dtype)
        forward_pass = ForwardPass(
            self._sites,
            outputs,
            size,
            layer_calls=layer_calls,
            module_calls=complete_calls,
            returned_outputs=layer_recorder.returned_outputs,
            differentiates_one_by_one=self.differentiates_one_by_one,
        )
        return _Recording(forward_pass, module_calls, layer_recorder.is_unclear)

    def _faults(self, recording: "_Recording") -> dict[Site, Exception]:
        """Collect the faults at the sites of a forward pass."""
        size = recording.forward_pass.num_examples
        faults: dict[Site, Exception] = {}
        uncopied = self._calls.dims.uncopied
        for path in uncopied:
            faults[Site((path,))] = NotImplementedError(
                f"The layers with the parameters {sorted(uncopied)} perform "
                "one lookup for the whole batch, instead of one lookup per example. Pass "
                "separate indices for each example, of shape [batch, positions], or "
                "exclude these parameters with `params=`."
            )
        for layer_call in recording.forward_pass.layer_calls:
            if layer_call.x._version != layer_call.version:
                faults[layer_call.site] = NotImplementedError(
                    f"The forward pass overwrites the input of {layer_call.layer} in place "
                    "(`+=`, `relu_`, ...). Use the out-of-place operation in the forward pass."
                )
            elif len(layer_call.x) != size:
                faults[layer_call.site] = not_batched(layer_call.layer, layer_call.x, size)
        for site in self.layers:
            if site.is_call and recording.merged_paths.intersection(site.paths):
                faults[site] = NotImplementedError(
                    f"The inputs of {site} have no batch dimension. Exclude the parameters of "
                    "this layer with `params=`."
                )
        return faults

    def _read_without_call(self, x: Inputs, recording: "_Recording") -> dict[Site, Exception]:
        """Find sites that were not called, though the outputs depend on their parameters.

        This takes a further forward pass if a site that all earlier passes called is not called.
        """
        forward_pass = recording.forward_pass
        called = {layer_call.layer for layer_call in forward_pass.layer_calls}
        called |= {module_call.path for module_call in forward_pass.module_calls}
        called |= recording.merged_paths
        idle = [
            site
            for site in self.layers
            if called.isdisjoint(site.paths) and site not in self.conditional
        ]
        if not idle:
            return {}
        names_read = self._names_read(x, [n for site in idle for n in self._sites.names[site]])
        faults: dict[Site, Exception] = {}
        for site in idle:
            names = [name for name in self._sites.names[site] if name in names_read]
            if names:
                faults[site] = NotImplementedError(
                    f"The outputs of some examples depend on {names}, although the forward pass "
                    f"does not call {site} for these examples. Exclude these parameters with "
                    f"`{leaving_out(names)}`."
                )
            else:
                self.conditional.add(site)
        return faults

    def _names_read(self, x: Inputs, names: Sequence[str]) -> set[str]:
        """Return the names of those parameters on which the outputs depend."""
        parameters = list(map(self.network.get_parameter, names))
        with requiring_grad(parameters), torch.enable_grad(), preserve_attributes(self._modules):
            outputs = call(self.network, x)
            if not outputs.requires_grad:
                return set()
            ones = torch.ones_like(outputs)
            gradients = torch.autograd.grad(outputs, parameters, ones, allow_unused=True)
        pairs = zip(names, gradients, strict=True)
        return {name for name, gradient in pairs if gradient is not None}

    def _learn(self, x: Inputs) -> None:
        """Find the examples' dimensions in layers' inputs from a batch and a doubled batch."""
        # The two copies of an example are neighbours, because some models need sequences sorted by
        # length.
        doubled_x = take(x, torch.arange(num_examples(x)).repeat_interleave(2))
        calls = self._calls
        recorder = calls.recorder
        calls.dims = ExampleDims()
        earlier_forms: CallForms = {}
        if recorder is not None:
            earlier_forms = recorder.forget_forms()
        once = self._observe(x)
        doubled = self._observe(doubled_x)
        calls.dims = ExampleDims.compare(
            self.network, num_examples(x), once.input_shapes, doubled.input_shapes
        )
        outputs = [(x, once.outputs), (doubled_x, doubled.outputs)]
        if calls.dims.shared and not self._takes_copies(outputs):
            calls.dims = replace(calls.dims, shared=set(), uncopied=calls.dims.shared)
        if recorder is None:
            return
        has_copies = recorder.learn(num_examples(x), once.module_calls, doubled.module_calls)
        takes_copies = True
        if has_copies or calls.dims.shared:
            takes_copies = self._learn_with_copies(recorder, outputs)
        recorder.add_forms(earlier_forms)
        if not takes_copies:
            recorder.forget_copies()

    def _learn_with_copies(
        self, recorder: CallRecorder, outputs: Sequence[tuple[Inputs, Tensor]]
    ) -> bool:
        """Learn the forms of calls again, until they need no further copies.

        Copies for one call change the forms of later calls.

        Args:
            recorder: The recorder of the calls.
            outputs: The inputs of a batch, and of the batch with each example twice, each with the
                outputs without copies of shared tensors.

        Returns:
            Whether the network accepts all copies.
        """
        (x, _), (doubled_x, _) = outputs
        for _ in range(_MOST_ROUNDS):
            if not self._takes_copies(outputs):
                return False
            once = self._observe(x)
            doubled = self._observe(doubled_x)
            if not recorder.learn(num_examples(x), once.module_calls, doubled.module_calls):
                break
        return True

    def _observe(self, x: Inputs) -> "_Observation":
        """Run the network without a graph, and keep only what `_learn` needs."""
        recording = self._run(x, graph=False)
        shapes: dict[str, list[torch.Size]] = {}
        for layer_call in recording.forward_pass.layer_calls:
            if layer_call.layer not in self._sites.operands:
                shapes.setdefault(layer_call.layer, []).append(layer_call.x.shape)
        return _Observation(recording.forward_pass.outputs, shapes, recording.module_calls)

    def _takes_copies(self, outputs: Sequence[tuple[Inputs, Tensor]]) -> bool:
        """Whether outputs stay the same if each example has its own copy of shared tensors.

        Batches of two sizes are run, because the number of positions may equal one of the sizes.
        The copies of the examples would then be broadcast to the positions.
        """
        dims = self._calls.dims
        # With the shapes of the batch itself, it may be unclear whether to copy for these inputs,
        # and nothing would be copied.
        self._calls.dims = replace(dims, shapes={})
        try:
            # A forward pass may raise any error at a dimension that it does not expect.
            with suppress_unsupported(Exception):
                for x, expected in outputs:
                    copied = self._run(x, graph=False).forward_pass.outputs
                    if copied.shape != expected.shape or not torch.allclose(copied, expected):
                        return False
                return True
            return False
        finally:
            self._calls.dims = dims

    def forward_of_last_layer(
        self, x: Inputs
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch d"]] | None:
        """Run the network without a graph, and record only the inputs of its last layer.

        The tap must be attached to a single linear layer. The records and checks of `forward`
        would add 6 % to the time of a small network's prediction.

        Returns:
            The outputs `[B, C]` and the layer's inputs. The result is None unless the network's
            outputs are the layer's outputs, and the forward pass calls the layer once and changes
            neither inputs nor outputs. If the result is None, `forward` may still record the layer,
            or explain why it cannot.
        """
        (layer,) = self.layers.values()
        calls: list[_LastLayerCall] = []

        def record(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> None:
            phi = first_argument(inputs, named)
            calls.append(_LastLayerCall(phi, phi._version, output))

        saved_attributes = self._saved_attributes or SavedAttributes(self._modules)
        handle = layer.register_forward_hook(record, prepend=True, with_kwargs=True)
        try:
            with torch.no_grad():
                outputs = call(self.network, x)
        finally:
            handle.remove()
            saved_attributes.restore()
        if len(calls) != 1 or outputs.ndim != 2 or len(outputs) != len(tensors_of(x)[0]):
            return None
        (last_call,) = calls
        has_same_inputs = last_call.phi._version == last_call.version
        has_same_outputs = outputs is last_call.output and outputs._version == 0
        if not (has_same_inputs and has_same_outputs):
            return None
        return outputs, last_call.phi


@dataclass(eq=False)
class _LearnedCalls:
    """The forms of the calls at the sites of a tap, as far as its passes have learned them.

    Attributes:
        recorder: The recorder of the modules whose calls are run again, which learns the forms of
            these calls; None if there are no such modules.
        learns_dims: Whether the dimensions of the examples are learned from the first inputs.
        dims: The dimensions of the examples in the inputs of layers.
        conditional: Sites that at least one pass has not called.
    """

    recorder: CallRecorder | None
    learns_dims: bool
    dims: ExampleDims = field(default_factory=ExampleDims)
    conditional: set[Site] = field(default_factory=set)

    @classmethod
    def at_sites(cls, sites: TappedSites) -> "_LearnedCalls":
        """Begin to learn about the calls at the given sites."""
        paths = sites.replayed_paths
        recorder = CallRecorder(sites.network, paths) if paths else None
        has_embeddings = any(layer_rule(layer).is_one_hot for layer in sites.layers.values())
        return cls(recorder, learns_dims=has_embeddings or bool(paths))


class _LastLayerCall(NamedTuple):
    """A call of a network's last layer.

    Attributes:
        phi: The inputs, `[B, d]`.
        version: The version of the inputs at the call, which reveals changes in place.
        output: The output.
    """

    phi: Tensor
    version: int
    output: Any


@dataclass(frozen=True, eq=False)
class _Observation:
    """The outputs of a forward pass, the shapes of the layers' inputs, and the module calls."""

    outputs: Tensor
    input_shapes: dict[str, list[torch.Size]]
    module_calls: RecordedCalls


@dataclass(frozen=True, eq=False)
class _Recording:
    """A forward pass, and information on whether the dimensions of the examples are known.

    Attributes:
        forward_pass: The forward pass.
        module_calls: All calls of modules, including calls that cannot be run again.
        is_unclear: Whether there is a call of a layer in which the dimension of the examples is
            unclear.
    """

    forward_pass: ForwardPass
    module_calls: RecordedCalls
    is_unclear: bool

    @property
    def merged_paths(self) -> set[str]:
        """The paths of modules with calls in which the examples have no separate dimension."""
        return {call.path for call in self.module_calls.values() if not call.output_dims}

    @property
    def has_clear_dims(self) -> bool:
        """Whether the dimension of the examples is known in all calls."""
        sizes = {len(layer_call.x) for layer_call in self.forward_pass.layer_calls}
        have_examples_first = sizes <= {self.forward_pass.num_examples}
        return have_examples_first and not self.is_unclear and not self.merged_paths


def _check_wide(layer: str, dtype: torch.dtype) -> None:
    """Require that only layers with parameters in half precision compute in half precision."""
    if dtype in NARROW:
        raise RuntimeError(
            f"The forward pass computes the outputs of {layer} in {dtype}, "
            "although the layer's parameters have a wider dtype. Curvature and predictions must "
            "be computed in the dtype of the parameters. If the forward pass uses torch.autocast, "
            "disable it there in eval mode, or convert the layer's inputs. Or exclude the layer's "
            "parameters with `params=`."
        )


def not_batched(layer: str, x: Tensor, size: int) -> NotImplementedError:
    """Make the error for an input whose first dimension is not the dimension of the examples."""
    return NotImplementedError(
        f"The input of {layer} has shape {tuple(x.shape)} for {size} examples, "
        "but its first dimension must be the examples. Keep positions in a "
        "separate dimension, [batch, positions, features]. For attention, use "
        "`batch_first=True`. For position embeddings, look up the positions "
        "separately for every example. Or exclude the layer's parameters with "
        "`params=`. If the layer processes only some of the examples (as in a "
        "mixture of experts), choose a first batch in which the layer processes "
        "some, but not all, of the examples."
    )
