"""A forward pass of a tapped network whose outputs can be differentiated at the tapped layers."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block, Site
from laplace_debias.curvature.layers.calls import ModuleCall, ReplayedCalls
from laplace_debias.curvature.layers.gates import ungated_nodes
from laplace_debias.curvature.layers.layer_calls import LayerCall
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.several_columns import (
    column_by_column,
    explained_reading,
    has_python_functions,
    vmapped_or_stacked,
)
from laplace_debias.curvature.network.calling import quiet
from laplace_debias.system.memory import is_out_of_memory

# If the network has convolutions on a CPU, output gradients of all columns and layers are computed
# together up to this many bytes.
_MOST_BYTES_TOGETHER = 2**22
# The number of gradients with which a fit checks a network: two columns of two examples. If even
# these gradients are too large to be computed together, no pass computes gradients together,
# because this would not have been checked.
_NUM_CHECKED = 4


@dataclass(frozen=True, eq=False)
class TappedSites:
    """The sites of a network at which output gradients are computed.

    Attributes:
        network: The network.
        blocks: The blocks at each site.
        names: The names of the parameters at each site.
        layers: The module at each site.
        operands: Parameters that are tapped where the forward pass multiplies by them or adds them,
            by name.
    """

    network: nn.Module
    blocks: dict[Site, Sequence[Block]]
    names: dict[Site, Sequence[str]]
    layers: dict[Site, nn.Module]
    operands: dict[str, Tensor]

    @classmethod
    def from_blocks(cls, network: nn.Module, blocks: Iterable[Block]) -> "TappedSites":
        """Collect the sites of blocks."""
        blocks_by_site: dict[Site, Sequence[Block]] = {}
        names: dict[Site, Sequence[str]] = {}
        layers: dict[Site, nn.Module] = {}
        operands: dict[str, Tensor] = {}
        for block in blocks:
            blocks_by_site[block.site] = (*blocks_by_site.get(block.site, ()), block)
            names[block.site] = (*names.get(block.site, ()), *block.parameters)
        for site, parameter_names in names.items():
            path = site.paths[0]
            if path in parameter_names:
                operands[path] = network.get_parameter(path)
                path = path.rpartition(".")[0]
            layers[site] = network.get_submodule(path)
        return cls(network, blocks_by_site, names, layers, operands)

    @property
    def hooked_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The paths and modules of the layers whose inputs and outputs are recorded."""
        for site, layer in self.layers.items():
            if not site.is_call and site.paths[0] not in self.operands:
                yield site.paths[0], layer

    @property
    def replayed_paths(self) -> list[str]:
        """The paths of the modules whose calls are run again."""
        paths = [path for site in self.layers if site.is_call for path in site.paths]
        return list(dict.fromkeys(paths))


class ForwardPass:
    """A forward pass, and the recorded calls of the tapped layers.

    Args:
        sites: The tapped sites.
        outputs: The outputs of the network.
        num_examples: The number of examples.
        layer_calls: The recorded calls of layers, in order.
        module_calls: The recorded calls of modules, which can be run again.
        returned_outputs: The tensor with which the forward pass continued after each layer.
        differentiates_one_by_one: Whether columns are pushed back one at a time.

    Attributes:
        output_bytes: The bytes of the tapped layers' outputs for one example.
        faults: An error for each site that cannot be measured. A site that was not called has no
            error: its Jacobian is zero for these examples.
    """

    def __init__(
        self,
        sites: TappedSites,
        outputs: Tensor,
        num_examples: int,
        *,
        layer_calls: list[LayerCall],
        module_calls: list[ModuleCall],
        returned_outputs: Mapping[str, weakref.ref[Tensor]],
        differentiates_one_by_one: bool,
    ) -> None:
        self.sites = sites
        self.outputs = outputs
        self.num_examples = num_examples
        self.layer_calls = layer_calls
        self.module_calls = module_calls
        self.faults: dict[Site, Exception] = {}
        self._returned_outputs = returned_outputs
        self._differentiates_one_by_one = differentiates_one_by_one
        # The outputs of the calls by their `id`, because the scale and the bias of a norm share an
        # output.
        self._targets = {id(layer_call.z): layer_call.z for layer_call in layer_calls}
        for module_call in module_calls:
            self._targets |= {id(z): z for z in module_call.outputs}
        total_bytes = sum(z.nbytes for z in self._targets.values())
        self.output_bytes = max(1, total_bytes // num_examples)

    def release(self) -> None:
        """Release the recorded calls to free memory; nothing can be pushed back afterwards."""
        self.layer_calls = []
        self.module_calls = []
        self._returned_outputs = {}
        self._targets = {}

    def last_layer(self) -> LayerCall | None:
        """Return the call of the tapped layer whose output is the network's output, or None."""
        if self.outputs._version > 0:
            return None  # The outputs were overwritten, as by `outputs /= temperature`.
        last_calls = []
        for layer_call in self.layer_calls:
            # Only layers hand on a tensor, so operations with a parameter are skipped.
            returned_output = self._returned_outputs.get(layer_call.layer)
            if returned_output is not None and returned_output() is self.outputs:
                last_calls.append(layer_call)
        return last_calls[0] if len(last_calls) == 1 else None

    def gated_layers(self) -> set[str]:
        """Return the paths of the layers whose gradients may vanish for single examples.

        Every path from the layer to the outputs leads through a gate.
        """
        nodes = ungated_nodes(self.outputs)
        edges = [(layer_call.layer, layer_call.z.edge) for layer_call in self.layer_calls]
        ungated = {layer for layer, edge in edges if edge is not None and edge.node in nodes}
        return {layer for layer, _ in edges} - ungated

    def backward(
        self,
        columns: Float[Tensor, "columns batch *outputs"],
        keep_graph: bool = False,
        skipped: Site | None = None,
        tensor: Tensor | None = None,
    ) -> Iterator[BlockRecord]:
        """Push output cotangents back to every tapped layer.

        Sites on which the outputs do not depend are left out, because their Jacobian is zero.

        Args:
            columns: The cotangents.
            keep_graph: Whether further cotangents will follow. If not, the recorded calls are
                released.
            skipped: A site at which no gradient is computed.
            tensor: A tensor within the network that is differentiated instead of the outputs.

        Yields:
            A record for each block, from the last site to the first.
        """
        differentiated = self.outputs if tensor is None else tensor
        records = self._records(self._gradients(differentiated, columns, keep_graph, skipped))
        if not keep_graph:
            # From here on, only the records hold the inputs of layers: each is freed after its use.
            self.release()
        for site in reversed(self.sites.layers):
            if site not in records:
                continue
            record = records.pop(site)
            for block in self.sites.blocks[site]:
                yield record if block is record.block else replace(record, block=block)
            del record

    def _records(self, gradients: Mapping[int, Tensor]) -> dict[Site, BlockRecord]:
        """Return the record of the first block of every site that the gradients reach."""
        reached_calls: dict[Site, list[LayerCall]] = defaultdict(list)
        for layer_call in self.layer_calls:
            if id(layer_call.z) in gradients:
                reached_calls[layer_call.site].append(layer_call)
        records: dict[Site, BlockRecord] = {}
        for site, layer in self.sites.layers.items():
            first_block = self.sites.blocks[site][0]
            if site in reached_calls:
                inputs = [layer_call.x for layer_call in reached_calls[site]]
                output_gradients = [gradients[id(call.z)] for call in reached_calls[site]]
                records[site] = BlockRecord(first_block, layer, inputs, output_gradients)
            replayed = self._replayed_calls(site, gradients)
            if replayed is not None:
                records[site] = BlockRecord(first_block, layer, replayed=replayed)
        return records

    def _replayed_calls(self, site: Site, gradients: Mapping[int, Tensor]) -> ReplayedCalls | None:
        """Return the module calls at a site with the gradients at their outputs, or None.

        A call is left out if the outputs of the network do not depend on it.
        """
        if not site.is_call:
            return None
        pairs = []
        for module_call in self.module_calls:
            call_gradients = [gradients.get(id(z)) for z in module_call.outputs]
            if module_call.path in site.paths and any(g is not None for g in call_gradients):
                pairs.append((module_call, call_gradients))
        if not pairs:
            return None
        names = self.sites.names[site]
        return ReplayedCalls(self.sites.network, pairs, names, self.num_examples)

    def _gradients(
        self, tensor: Tensor, columns: Tensor, keep_graph: bool, skipped: Site | None
    ) -> dict[int, Float[Tensor, "columns batch *outputs"]]:
        """Compute the gradients at the layers' outputs on which a tensor depends, by their `id`.

        Small gradients are computed faster if all cotangents are pushed back together. Large
        gradients do not fit in the processor's cache, so convolutions are faster for one cotangent
        at a time.

        Args:
            tensor: The tensor that is differentiated, in general the outputs of the network.
            columns: The cotangents, `[K, *tensor.shape]`.
            keep_graph: Whether further cotangents will follow.
            skipped: A site at which no gradient is computed.
        """
        targets = self._targets.copy()
        for layer_call in self.layer_calls:
            if layer_call.site == skipped:
                targets.pop(id(layer_call.z), None)
        targets = {target: z for target, z in targets.items() if z.edge is not None}
        if not tensor.requires_grad or not targets:
            return {}
        edges = [z.edge for z in targets.values()]
        differentiate = partial(torch.autograd.grad, tensor, edges, allow_unused=True)
        with quiet():
            gradients: Sequence[Tensor | None]
            if len(columns) == 1:
                # A single column is differentiated without `vmap`, because `vmap` takes longer than
                # a small network.
                column_gradients = differentiate(columns[0], retain_graph=keep_graph)
                gradients = [None if g is None else g.unsqueeze(0) for g in column_gradients]
            elif not self._differentiates_one_by_one:
                runs_python = has_python_functions(tensor)
                try:
                    with explained_reading():
                        gradients = differentiate(
                            columns, retain_graph=keep_graph or runs_python, is_grads_batched=True
                        )
                except RuntimeError as error:
                    # `vmap` supports only some of the code in a `torch.autograd.Function`.
                    if not runs_python or is_out_of_memory(error):
                        raise
                    return column_by_column(differentiate, columns, targets, keep_graph)
            elif self._fits_in_cache(tensor, columns) and not has_python_functions(tensor):
                gradients = vmapped_or_stacked(partial(differentiate, retain_graph=True), columns)
            else:
                return column_by_column(differentiate, columns, targets, keep_graph)
        pairs = zip(targets, gradients, strict=True)
        return {target: gradient for target, gradient in pairs if gradient is not None}

    def _fits_in_cache(self, tensor: Tensor, columns: Tensor) -> bool:
        """Whether the gradients are small, including those with which a fit checks the network."""
        num_gradients = max(len(columns) * len(tensor), _NUM_CHECKED)
        return num_gradients * self.output_bytes <= _MOST_BYTES_TOGETHER
