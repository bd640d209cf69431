"""A recorder of the calls of modules in a forward pass, and the forms of these calls."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.layers.calls import ModuleCall
from laplace_debias.curvature.layers.example_dims import has_same_examples_dim
from laplace_debias.curvature.layers.layer_calls import LayerOutput
from laplace_debias.curvature.network.inputs import Inputs

# Takes the place of a dimension of the examples that is unclear; None means that all examples share
# the value.
_UNCLEAR = -1


@dataclass(frozen=True)
class CallForm:
    """The shapes of a call's arguments and outputs, and their batch dimensions.

    Attributes:
        shapes: The shapes of the arguments and the outputs; None for an argument that is not a
            tensor.
        dims: For each argument, the dimension of the examples; None if all examples share the
            argument.
        output_dims: The dimension of the examples in each output.
        copied_outputs: Indices of outputs that all examples share, `[1, ...]`. Each example
            receives a copy, so that gradients at the copy show how the example's own outputs depend
            on the call.
    """

    shapes: list[torch.Size | None]
    dims: list[int | None]
    output_dims: list[int]
    copied_outputs: list[int]

    @classmethod
    def compare(cls, call: ModuleCall, doubled: ModuleCall, num_examples: int) -> "CallForm | None":
        """Derive the form from a call for a batch and a call for the batch with doubled examples.

        The result is None if the dimensions of the examples remain unclear.
        """
        if len(call.leaves) != len(doubled.leaves) or len(call.outputs) != len(doubled.outputs):
            return None
        leaves = zip(call.leaves, doubled.leaves, strict=True)
        dims = [_dim_of_examples(leaf, doubled_leaf, num_examples) for leaf, doubled_leaf in leaves]
        output_dims: list[int] = []
        copied_outputs: list[int] = []
        for index, (z, doubled_z) in enumerate(zip(call.outputs, doubled.outputs, strict=True)):
            dim = _dim_of_examples(z, doubled_z, num_examples)
            if dim is None:
                if z.shape[:1] != (1,):
                    return None
                copied_outputs.append(index)
                dim = 0
            output_dims.append(dim)
        if _UNCLEAR in (*dims, *output_dims) or not output_dims:
            return None
        return cls(_shapes(call), dims, output_dims, copied_outputs)

    def fits(self, call: ModuleCall, num_examples: int) -> bool:
        """Return whether another call has this form, up to the numbers of positions."""
        shapes = _shapes(call)
        if len(shapes) != len(self.shapes):
            return False
        # Before it is copied, an output that all examples share has no dimension of the examples.
        dims_before_copies: list[int | None] = [*self.output_dims]
        for index in self.copied_outputs:
            dims_before_copies[index] = None
        dims = [*self.dims, *dims_before_copies]
        for shape, own_shape, dim in zip(shapes, self.shapes, dims, strict=True):
            if shape is None or own_shape is None:
                if shape is not own_shape:
                    return False
            elif not has_same_examples_dim(shape, own_shape, dim, num_examples):
                return False
        return True


def _shapes(call: ModuleCall) -> list[torch.Size | None]:
    return [_shape(value) for value in (*call.leaves, *call.outputs)]


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor | LayerOutput) else None


def _dim_of_examples(value: Any, doubled: Any, num_examples: int) -> int | None:
    """Return the dimension of the examples, None if all share a value, or `_UNCLEAR`.

    Args:
        value: The value for a batch.
        doubled: The value for a batch of two copies of each example.
        num_examples: The number of examples of the first batch.
    """
    shape = _shape(value)
    doubled_shape = _shape(doubled)
    if shape is None or doubled_shape is None:
        return None if type(value) is type(doubled) else _UNCLEAR
    if shape == doubled_shape:
        return None
    if len(shape) != len(doubled_shape):
        return _UNCLEAR
    sizes = list(zip(shape, doubled_shape, strict=True))
    growing_dims = [dim for dim, (size, doubled_size) in enumerate(sizes) if size != doubled_size]
    if len(growing_dims) > 1 or sizes[growing_dims[0]] != (num_examples, 2 * num_examples):
        return _UNCLEAR
    return growing_dims[0]


# The calls, by the module's path and the index of the call among the module's calls.
RecordedCalls = dict[tuple[str, int], ModuleCall]
CallForms = dict[tuple[str, int], list[CallForm]]


class CallRecorder:
    """A recorder of the calls of selected modules.

    Attributes:
        paths: The modules' paths.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str]) -> None:
        self.paths = paths
        self._network = network
        # Paths of modules that `vmap` cannot run, or would run in a loop.
        self._loops: set[str] = set()
        for path in paths:
            inner_modules = network.get_submodule(path).modules()
            if any(layer_rule(inner).is_recurrent for inner in inner_modules):
                self._loops.add(path)
        self._forms: CallForms = {}

    def hook(self, num_examples: int) -> tuple[list[RemovableHandle], RecordedCalls]:
        """Hook the modules for one forward pass.

        Returns:
            The handles of the hooks, and a record of the calls of modules inside the network, which
            the forward pass fills in.
        """
        handles = []
        calls: RecordedCalls = {}
        num_calls: Counter[str] = Counter()
        # The keys of the calls that have begun but not ended, the innermost last.
        unfinished: list[tuple[str, int]] = []

        def begin(
            path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            leaves, structure = pytree.tree_flatten((args, named))
            # The arguments are copied because the call may overwrite them.
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
            key = path, num_calls[path]
            num_calls[path] += 1
            unfinished.append(key)
            calls[key] = ModuleCall(path, module, copies, structure, self._loops)

        def end(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            # Inner calls end before outer calls, so the call that ends is the last unfinished one.
            key = unfinished.pop()
            return self._record_outputs(calls[key], self._forms.get(key, ()), output, num_examples)

        for path in filter(None, self.paths):
            module = self._network.get_submodule(path)
            handles += [
                module.register_forward_pre_hook(
                    partial(begin, path), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(end, prepend=True, with_kwargs=True),
            ]
        return handles, calls

    def _record_outputs(
        self, call: ModuleCall, forms: Sequence[CallForm], output: Any, num_examples: int
    ) -> Any:
        """Record the outputs of a call that ends, as part of a graph even if they need no gradient.

        Returns:
            The output with which the forward pass continues.
        """
        leaves, structure = pytree.tree_flatten(output)
        is_output = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        outputs: list[Tensor] = list(itertools.compress(leaves, is_output))
        call.outputs = list(map(LayerOutput.from_tensor, outputs))
        form = next((form for form in forms if form.fits(call, num_examples)), None)
        if form is not None:
            call.dims = form.dims
            call.output_dims = form.output_dims
            for index in form.copied_outputs:
                z = outputs[index]
                outputs[index] = z.expand(num_examples, *z.shape[1:])
        # The forward pass continues with copies, which it may overwrite. The gradients are those at
        # the copies: at the outputs themselves, they would include how other outputs of the same
        # call depend on them, which is part of the call.
        copies = [(z if z.requires_grad else z.detach().requires_grad_()).clone() for z in outputs]
        call.outputs = list(map(LayerOutput.from_tensor, copies))
        remaining_copies = iter(copies)
        returned_leaves = [
            next(remaining_copies) if replaced else leaf
            for leaf, replaced in zip(leaves, is_output, strict=True)
        ]
        return pytree.tree_unflatten(returned_leaves, structure)

    def learn(self, num_examples: int, calls: RecordedCalls, doubled: RecordedCalls) -> bool:
        """Learn the forms of calls from a batch and from the same batch with doubled examples.

        Returns:
            Whether further outputs are now copied, which changes the forms of later calls.
        """
        has_more_copies = False
        for key in calls.keys() & doubled.keys():
            forms = self._forms.setdefault(key, [])
            if not any(form.fits(calls[key], num_examples) for form in forms):
                form = CallForm.compare(calls[key], doubled[key], num_examples)
                if form is not None:
                    forms.append(form)
                    has_more_copies |= bool(form.copied_outputs)
        return has_more_copies

    def forget_forms(self) -> CallForms:
        """Forget the forms of calls, and return them.

        As long as a form fits, outputs are copied according to it, and the forms of later calls
        cannot be learned.
        """
        forms = self._forms
        self._forms = {}
        return forms

    def add_forms(self, forms: CallForms) -> None:
        """Add forms of other batches, which are used where no form of this batch fits."""
        for key, forms_of_call in forms.items():
            learned = self._forms.setdefault(key, [])
            learned += [form for form in forms_of_call if form not in learned]

    def forget_copies(self) -> None:
        """Remove the forms of calls whose outputs would be copied."""
        for forms in self._forms.values():
            forms[:] = [form for form in forms if not form.copied_outputs]

    def complete(self, calls: RecordedCalls, x: Inputs, outputs: Tensor) -> list[ModuleCall]:
        """Return the calls of a pass that can be run again, including the network's own call.

        Calls without a dimension of examples cannot be run again.

        Args:
            calls: The recorded calls.
            x: The inputs of the network.
            outputs: The outputs of the network.
        """
        complete_calls = [call for call in calls.values() if call.output_dims]
        if "" in self.paths:
            leaves, structure = pytree.tree_flatten(x)
            dims = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
            network_call = ModuleCall(
                path="",
                module=self._network,
                leaves=leaves,
                structure=structure,
                loops=self._loops,
                outputs=[LayerOutput.from_tensor(outputs)],
                dims=dims,
                output_dims=[0],
            )
            complete_calls.insert(0, network_call)
        return complete_calls
