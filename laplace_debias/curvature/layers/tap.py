"""The layer tap: each layer's inputs and output gradients, for any forward pass."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layer_rules import Block, Site, layer_rule
from laplace_debias.curvature.layers.calls import ModuleCall, ReplayedCalls
from laplace_debias.curvature.layers.recorder import (
    CallRecorder,
    ExampleDims,
    LayerCall,
    LayerOutput,
    OperandRecorder,
    RecordedCalls,
)
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.several_columns import (
    column_by_column,
    explained_reading,
    has_python_functions,
    vmapped_or_stacked,
)
from laplace_debias.curvature.network.calling import call, quiet
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take, without_subclass
from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.curvature.network.selection import leaving_out
from laplace_debias.curvature.network.shared_copy import (
    SavedAttributes,
    are_constant,
    preserve_attributes,
    requiring_grad,
)
from laplace_debias.system.memory import is_out_of_memory

# Rounds in which the forms of calls are learned, with copies of what examples have in common.
_MOST_ROUNDS = 4
# Output gradients up to so many bytes, of all columns and layers, are computed together although
# the network has convolutions on a CPU.
_MOST_BYTES_TOGETHER = 2**22
# The number of gradients with which a fit checks a network: two columns of two examples. If even
# these are too large to be computed together, no pass computes any together, because that would
# not have been checked.
_NUM_CHECKED = 4
# In the place of a size, where it is not clear which dimension has the examples.
_UNCLEAR = -1


class Tap:
    """A tap that runs a network and yields the output gradients of chosen layers.

    Only the part of the graph behind the first tapped layer is recorded, and no gradient with
    respect to a parameter is ever computed. Hooks that record are on the network while it is run
    here. `layer_calls` are those in the last `forward`, in its order, and `output_bytes` are of the
    tapped layers' outputs for one example of it. `conditional` are sites that some pass has not
    called.
    """

    def __init__(self, network: nn.Module, blocks: Iterable[Block] = ()) -> None:
        self.network = network
        self.one_by_one = False
        for module in list(network.modules()):
            rule = layer_rule(module)
            self.one_by_one |= rule.differentiates_one_by_one(module)
            rule.prepare(module)
        self._modules = list(network.modules())
        self._saved_attributes: SavedAttributes | None = None
        self._names: dict[Site, list[str]] = {}
        self._attached: Iterable[Block] | None = None
        self._batch = 0
        self._has_graph = True
        self.attach(blocks)

    def attach(self, blocks: Iterable[Block]) -> "Tap":
        """Attach to the sites of blocks: layers, or modules whose calls are run again."""
        if blocks is self._attached:
            return self
        self._attached = blocks
        names: dict[Site, list[str]] = {}
        self._blocks: dict[Site, list[Block]] = {}
        for block in blocks:
            names.setdefault(block.site, []).extend(block.parameters)
            self._blocks.setdefault(block.site, []).append(block)
        # The examples' dimensions stay the same at the same sites.
        if names and names == self._names:
            return self
        self._names = names
        called = dict[str, None]()
        self.layers: dict[Site, nn.Module] = {}
        self._operands: dict[str, Tensor] = {}
        self._needs_dims = False
        for site, parameter_names in names.items():
            path = site.paths[0]
            if path in parameter_names:
                self._operands[path] = self.network.get_parameter(path)
                path = path.rpartition(".")[0]
            self.layers[site] = self.network.get_submodule(path)
            self._needs_dims |= layer_rule(self.layers[site]).is_one_hot
            called |= dict.fromkeys(site.paths if site.is_call else ())
        self._needs_dims |= any(called)
        self._recorder = CallRecorder(self.network, list(called)) if called else None
        self._dims = ExampleDims()
        self.conditional: set[Site] = set()
        self.forget()
        return self

    def forget(self) -> None:
        """Release the calls of the last `forward`."""
        self.layer_calls: list[LayerCall] = []
        # The outputs of the calls by their `id`: a norm's scale and bias have one.
        self._targets: dict[int, LayerOutput] = {}
        self._sizes: set[int] = set()
        # The tensors that the forward pass goes on with. They take no memory once they were used.
        self._handed_on: dict[str, weakref.ref[Tensor]] = {}
        self._calls: list[ModuleCall] = []
        # Modules with calls whose examples have no dimension of their own.
        self._merged_calls: set[str] = set()
        if self._recorder is not None:
            self._recorder.forget_calls()

    @property
    def learns_dims(self) -> bool:
        """Whether the dimensions of the examples are learned from the first inputs."""
        return self._needs_dims

    def save_attributes(self) -> None:
        """Save the modules' attributes, to which every pass from now on restores them.

        Without it each pass saves them anew.
        """
        modules = [] if are_constant(self._modules) else self._modules
        self._saved_attributes = SavedAttributes(modules)

    def start_anew(self) -> None:
        """Forget the calls of the last `forward`, and which sites were not called."""
        self.forget()
        self.conditional.clear()

    def forward(self, x: Inputs, graph: bool = True, strict: bool = True) -> Tensor:
        """Run the network and record the calls of the tapped layers.

        Nothing can be pushed back without the graph. `faults` has an error for each site that
        cannot be measured; the first is raised if `strict`. A site that is not called is none: its
        Jacobian is zero for these examples.
        """
        self._has_graph = graph
        if self._needs_dims and not self._dims.is_known:
            self._learn(x)
        outputs = self._run(x)
        if self._merged_calls or not self._sizes <= {self._batch}:
            # Sequences of another length, or images of another size, have other dimensions.
            self._learn(x)
            outputs = self._run(x)
        self.faults = self._faults() | self._read_without_call(x)
        if strict and self.faults:
            raise next(iter(self.faults.values()))
        return outputs

    def _run(self, x: Inputs) -> Tensor:
        self.forget()
        self._batch = num_examples(x)
        saved_attributes = self._saved_attributes or SavedAttributes(self._modules)
        handles = [] if self._recorder is None else self._recorder.hook(self._batch)
        for site, layer in self.layers.items():
            if not site.is_call and site.paths[0] not in self._operands:
                # Before any hook of the user's that may replace the output: what they do to it is
                # part of the forward pass, not of the layer.
                record = partial(self._record, site.paths[0])
                inside = layer_rule(layer).inner_layer(layer)
                if inside is None:
                    hook = layer.register_forward_hook(record, prepend=True, with_kwargs=True)
                    handles.append(hook)
                else:
                    handles += _hook_within(layer, inside, record)
        at_operands: AbstractContextManager = nullcontext()
        if self._operands:
            at_operands = OperandRecorder(self._operands, self.layer_calls)
        try:
            with torch.set_grad_enabled(self._has_graph), at_operands:
                outputs = call(self.network, x)
        finally:
            for handle in handles:
                handle.remove()
            saved_attributes.restore()
        if self._recorder is not None:
            if "" in self._recorder.paths and not outputs.requires_grad:
                outputs = outputs.detach().requires_grad_()
            self._calls, self._merged_calls = self._recorder.recorded(x, outputs)
        for layer_call in self.layer_calls:
            _check_wide(layer_call.layer, layer_call.z.dtype)
            self._targets[id(layer_call.z)] = layer_call.z
            self._sizes.add(len(layer_call.x))
        for module_call in self._calls:
            self._targets |= {id(z): LayerOutput.from_tensor(z) for z in module_call.outputs}
        total = sum(map(attrgetter("nbytes"), self._targets.values()))
        self.output_bytes = max(1, total // self._batch)
        return outputs

    def _record(
        self,
        path: str,
        _: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        output: Tensor,
    ) -> Tensor:
        x = inputs[0] if inputs else next(iter(named.values()))
        if not self._dims.is_clear(path, x.shape, self._batch):
            self._sizes.add(_UNCLEAR)
        elif path in self._dims.common:
            # A copy for each example of what all have in common, `[T, ...]` or `[1, T, ...]`.
            x, output = (t if len(t) == 1 and t.ndim > 1 else t.unsqueeze(0) for t in (x, output))
            x, output = (t.expand(self._batch, *t.shape[1:]).clone() for t in (x, output))
        if self._has_graph and not output.requires_grad:
            # The first tapped layer's output is where the recorded graph begins.
            output = output.detach().requires_grad_()
        merged = self._dims.merged.get(path, 1)
        is_merged = merged > 1 and len(x) == merged * self._batch
        recorded_x = without_subclass(x.detach())
        z = output
        if is_merged:
            # Windows or frames that are merged into the examples are positions of them.
            recorded_x = recorded_x.unflatten(0, (self._batch, merged))
            z = z.unflatten(0, (self._batch, merged))
        self.layer_calls.append(LayerCall(path, recorded_x, LayerOutput.from_tensor(z), x._version))
        handed_on = z.flatten(0, 1) if is_merged else z
        if self._has_graph and (handed_on.is_leaf or handed_on._is_view()):
            # The forward pass may overwrite the copy: a leaf must not be overwritten, and a view
            # that is overwritten gets another place in the graph.
            handed_on = handed_on.clone()
        self._handed_on[path] = weakref.ref(handed_on)
        return handed_on

    def _faults(self) -> dict[Site, Exception]:
        """The faults at the sites, for the last forward pass."""
        faults: dict[Site, Exception] = {}
        for path in self._dims.uncopied:
            faults[Site((path,))] = NotImplementedError(
                f"The layers with the parameters {sorted(self._dims.uncopied)} perform "
                "one lookup for the whole batch, instead of one lookup per example. Pass "
                "separate indices for each example, of shape [batch, positions], or "
                "exclude these parameters with `params=`."
            )
        for layer_call in self.layer_calls:
            if layer_call.x._version != layer_call.version:
                faults[Site((layer_call.layer,))] = NotImplementedError(
                    f"The forward pass overwrites the input of {layer_call.layer} in place "
                    "(`+=`, `relu_`, ...). Use the out-of-place operation in the forward pass."
                )
            elif len(layer_call.x) != self._batch:
                faults[Site((layer_call.layer,))] = not_batched(
                    layer_call.layer, layer_call.x, self._batch
                )
        for site in self.layers:
            if site.is_call and self._merged_calls.intersection(site.paths):
                faults[site] = NotImplementedError(
                    f"The inputs of {site} have no batch dimension. Exclude the parameters of "
                    "this layer with `params=`."
                )
        return faults

    def _read_without_call(self, x: Inputs) -> dict[Site, Exception]:
        """Find sites that were not called, though the outputs depend on their parameters.

        It takes a forward pass for each set of sites that were called in all passes before.
        """
        called = {layer_call.layer for layer_call in self.layer_calls} | self._merged_calls
        called.update(call.path for call in self._calls)
        idle = [site for site in self.layers if called.isdisjoint(site.paths)]
        idle = [site for site in idle if site not in self.conditional]
        if not idle:
            return {}
        parameters = [self.network.get_parameter(n) for site in idle for n in self._names[site]]
        with requiring_grad(parameters), torch.enable_grad(), preserve_attributes(self._modules):
            outputs = call(self.network, x)
            gradients: Sequence[Tensor | None] = [None] * len(parameters)
            if outputs.requires_grad:
                ones = torch.ones_like(outputs)
                gradients = torch.autograd.grad(outputs, parameters, ones, allow_unused=True)
        pairs = zip(parameters, gradients, strict=True)
        read = {id(parameter) for parameter, gradient in pairs if gradient is not None}
        faults: dict[Site, Exception] = {}
        for site in idle:
            names = [n for n in self._names[site] if id(self.network.get_parameter(n)) in read]
            if names:
                faults[site] = NotImplementedError(
                    f"The outputs of some examples depend on {names}, although the forward pass "
                    f"does not call {site} for these examples. Exclude these parameters with "
                    f"`{leaving_out(names)}`."
                )
            else:
                self.conditional.add(site)
        return faults

    def _learn(self, x: Inputs) -> None:
        """Find which inputs of the layers have examples, from a batch and each example twice."""
        has_graph = self._has_graph
        self._has_graph = False
        # Neighbours: some models need sequences in the order of their lengths.
        doubled = take(x, torch.arange(num_examples(x)).repeat_interleave(2))
        self._dims = ExampleDims()
        earlier_forms = {} if self._recorder is None else self._recorder.forget_forms()
        expected, shapes, calls = self._run_both(x, doubled)
        self._dims = ExampleDims.compare(self.network, num_examples(x), *shapes)
        if self._dims.common and not self._takes_copies(doubled, expected):
            self._dims = replace(self._dims, common=set(), uncopied=self._dims.common)
        if self._recorder is not None:
            has_copies = self._recorder.learn(num_examples(x), *calls) or bool(self._dims.common)
            takes_copies = True
            for _ in range(_MOST_ROUNDS):
                if not has_copies:
                    break
                takes_copies = self._takes_copies(doubled, expected)
                if not takes_copies:
                    break
                # Copies for one call change the forms of those behind it.
                *_, calls = self._run_both(x, doubled)
                has_copies = self._recorder.learn(num_examples(x), *calls)
            self._recorder.add_forms(earlier_forms)
            if not takes_copies:
                self._recorder.forget_copies()
        self._has_graph = has_graph

    def _run_both(
        self, x: Inputs, doubled: Inputs
    ) -> tuple[Tensor, list[dict[str, list[torch.Size]]], list[RecordedCalls]]:
        """Outputs of the second inputs, and shapes of layers' inputs and calls for both."""
        shapes: list[dict[str, list[torch.Size]]] = []
        calls: list[RecordedCalls] = []
        for inputs in (x, doubled):
            outputs = self._run(inputs)
            shapes.append({})
            for layer_call in self.layer_calls:
                if layer_call.layer not in self._operands:
                    shapes[-1].setdefault(layer_call.layer, []).append(layer_call.x.shape)
            if self._recorder is not None:
                calls.append(self._recorder.calls)
        return outputs, shapes, calls

    def _takes_copies(self, x: Inputs, expected: Tensor) -> bool:
        """Whether outputs stay the same with a copy for each example of what all have in common."""
        dims = self._dims
        # With the shapes of the batch itself, it may be unclear whether to copy for these inputs,
        # and then nothing is copied.
        self._dims = replace(dims, shapes={})
        try:
            outputs = self._run(x)
        # A forward pass may raise anything if it meets a dimension that it does not expect.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        finally:
            self._dims = dims
        return outputs.shape == expected.shape and torch.allclose(outputs, expected)

    def forward_of_last_layer(
        self, x: Inputs
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch d"]] | None:
        """Run the network without a graph, and record only the inputs of its last layer.

        The tap must be attached to a single linear layer.

        Returns:
            The outputs `[B, C]` and the layer's inputs. It is None unless the outputs are those of
            the layer, and the forward pass calls it once and changes neither. Then `forward` may
            still record the layer, or explain why it cannot.
        """
        (layer,) = self.layers.values()
        calls: list[tuple[Any, int, Any]] = []

        def record(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            phi = inputs[0] if inputs else None
            calls.append((phi, 0 if phi is None else phi._version, output))

        handle = layer.register_forward_hook(record, prepend=True)
        saved_attributes = self._saved_attributes or SavedAttributes(self._modules)
        try:
            with torch.no_grad():
                outputs = call(self.network, x)
        finally:
            handle.remove()
            saved_attributes.restore()
        if len(calls) != 1 or outputs.ndim != 2 or len(outputs) != num_examples(x):
            return None
        phi, version, output = calls[0]
        is_unchanged = outputs is output and outputs._version == 0
        if phi is None or phi._version != version or not is_unchanged:
            return None
        return outputs, phi

    def last_layer(self, outputs: Tensor) -> LayerCall | None:
        """The call of the tapped layer whose output is that of the network, if there is one."""
        if outputs._version > 0:
            return None  # Overwritten since: `outputs /= temperature`.
        last_calls = []
        for layer_call in self.layer_calls:
            # An operation with a parameter hands nothing on.
            handed_on = self._handed_on.get(layer_call.layer)
            if handed_on is not None and handed_on() is outputs:
                last_calls.append(layer_call)
        return last_calls[0] if len(last_calls) == 1 else None

    def backward(
        self,
        outputs: Float[Tensor, "batch *outputs"],
        columns: Float[Tensor, "columns batch *outputs"],
        keep_graph: bool = False,
        skipped: Site | None = None,
    ) -> Iterator[BlockRecord]:
        """Push output cotangents back to every tapped layer.

        Yields a record for each block, from the last site to the first. Sites that the outputs do
        not depend on are left out: their Jacobian is zero. With `keep_graph` the graph is kept for
        further cotangents. No gradient is computed at a `skipped` site.
        """
        reached = self._reached(outputs, columns, keep_graph, skipped)
        if not keep_graph:
            # The graph is a circle of references, which would keep all of it for long.
            self.forget()
        for site in reversed(self.layers):
            if site not in reached:
                continue
            record = reached.pop(site)
            for block in self._blocks[site]:
                yield record if block is record.block else replace(record, block=block)
            del record

    def _reached(
        self, outputs: Tensor, columns: Tensor, keep_graph: bool, skipped: Site | None
    ) -> dict[Site, BlockRecord]:
        """For every site that is reached the record of its first block."""
        targets = self._targets.copy()
        for layer_call in self.layer_calls:
            if Site((layer_call.layer,)) == skipped:
                targets.pop(id(layer_call.z), None)
        gradients = self._gradients(outputs, targets, columns, keep_graph)
        inputs: dict[Site, list[Tensor]] = {}
        output_gradients: dict[Site, list[Tensor]] = {}
        for layer_call in self.layer_calls:
            if id(layer_call.z) in gradients:
                site = Site((layer_call.layer,))
                inputs.setdefault(site, []).append(layer_call.x)
                output_gradients.setdefault(site, []).append(gradients[id(layer_call.z)])
        reached: dict[Site, BlockRecord] = {}
        for site, layer in self.layers.items():
            first_block = self._blocks[site][0]
            if site in inputs:
                reached[site] = BlockRecord(
                    first_block, layer, inputs[site], output_gradients[site]
                )
            replayed = self._replayed(site, gradients)
            if replayed is not None:
                reached[site] = BlockRecord(first_block, layer, replayed=replayed)
        return reached

    def _replayed(self, site: Site, gradients: dict[int, Tensor]) -> ReplayedCalls | None:
        """The module calls at a site with the gradients at their outputs; None if there are none.

        A call is left out if the outputs of the network do not depend on it.
        """
        if not site.is_call or self._recorder is None:
            return None
        pairs = []
        for module_call in self._calls:
            call_gradients = [gradients.get(id(z)) for z in module_call.outputs]
            if module_call.path in site.paths and any(g is not None for g in call_gradients):
                pairs.append((module_call, call_gradients))
        if not pairs:
            return None
        names = self._names[site]
        return ReplayedCalls(self.network, pairs, names, self._batch, self._recorder.loops)

    def _gradients(
        self, outputs: Tensor, targets: dict[int, LayerOutput], columns: Tensor, keep_graph: bool
    ) -> dict[int, Float[Tensor, "columns batch *outputs"]]:
        """The gradients at targets, by their `id`, where the outputs depend on them.

        Few numbers take less time if all cotangents are pushed back together. Many leave the
        processor's cache, where convolutions take less time for one cotangent after the other.
        """
        if not outputs.requires_grad or not targets:
            return {}
        edges = [z.edge for z in targets.values() if z.edge is not None]
        differentiate = partial(torch.autograd.grad, outputs, edges, allow_unused=True)
        with quiet():
            gradients: Sequence[Tensor | None]
            if len(columns) == 1:
                # It needs no `vmap`, which takes longer than a small network.
                column_gradients = differentiate(columns[0], retain_graph=keep_graph)
                gradients = [None if g is None else g.unsqueeze(0) for g in column_gradients]
            elif not self.one_by_one:
                with explained_reading():
                    gradients = differentiate(
                        columns, retain_graph=keep_graph, is_grads_batched=True
                    )
            elif self._fits_in_cache(outputs, columns) and not has_python_functions(outputs):
                gradients = vmapped_or_stacked(partial(differentiate, retain_graph=True), columns)
            else:
                return column_by_column(differentiate, columns, targets, keep_graph)
        pairs = zip(targets, gradients, strict=True)
        return {target: gradient for target, gradient in pairs if gradient is not None}

    def _fits_in_cache(self, outputs: Tensor, columns: Tensor) -> bool:
        """Whether the gradients are small, also those with which a fit checks the network."""
        num_gradients = max(len(columns) * len(outputs), _NUM_CHECKED)
        return num_gradients * self.output_bytes <= _MOST_BYTES_TOGETHER


def _hook_within(layer: nn.Module, inside: nn.Module, record: Any) -> list[RemovableHandle]:
    """Record what a normalisation gives to a layer inside of it, such as its activation."""
    began: list[tuple[Any, ...]] = []

    def begin(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        began[:] = [(layer, inputs, named)]

    def end(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        # The layer inside may be one of others, too.
        return record(*began.pop(), *inputs) if began and len(inputs) == 1 else None

    return [
        layer.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        inside.register_forward_pre_hook(end, prepend=True),
    ]


def _check_wide(layer: str, dtype: torch.dtype) -> None:
    """Require that a layer does not compute in half precision, which its parameters are not in."""
    if dtype in NARROW:
        raise RuntimeError(
            f"The forward pass computes the outputs of {layer} in {dtype}, "
            "although the layer's parameters have a wider dtype. Curvature and predictions must "
            "be computed in the dtype of the parameters. If the forward pass uses torch.autocast, "
            "disable it there in eval mode, or convert the layer's inputs. Or exclude the layer's "
            "parameters with `params=`."
        )


def not_batched(layer: str, x: Tensor, batch: int) -> NotImplementedError:
    """Make the error for an input whose leading dimension is not the examples."""
    return NotImplementedError(
        f"The input of {layer} has shape {tuple(x.shape)} for {batch} examples, "
        "but its first dimension must be the examples. Keep positions in a "
        "separate dimension, [batch, positions, features]. For attention, use "
        "`batch_first=True`. For position embeddings, look up the positions "
        "separately for every example. Or exclude the layer's parameters with "
        "`params=`. If the layer processes only some of the examples (as in a "
        "mixture of experts), choose a first batch in which the layer processes "
        "some, but not all, of the examples."
    )
