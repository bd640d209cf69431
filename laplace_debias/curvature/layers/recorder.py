"""Recorders of the calls and operations in a forward pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.layers.calls import ModuleCall
from laplace_debias.curvature.network.inputs import Inputs, without_subclass


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """An output's place in the recorded graph, without the values, which take memory.

    Attributes:
        edge: The node of the graph to which gradients with respect to the output come; None if no
            graph is recorded.
        shape: The shape of the output.
        dtype: The dtype of the output.
        device: The device of the output.
    """

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, z: Tensor) -> "LayerOutput":
        """Return the place of a tensor in the graph."""
        edge = None
        if z.requires_grad:
            # A subclass of tensors would record the view by which torch finds the place of a leaf.
            with torch._C.DisableTorchFunctionSubclass():
                edge = get_gradient_edge(z)
        return cls(edge, z.shape, z.dtype, z.device)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values."""
        return self.dtype.itemsize * self.shape.numel()

    def new_empty(self, *shape: int) -> Tensor:
        """Allocate a tensor with the dtype and the device of the output."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in a forward pass, or one operation with a parameter.

    Attributes:
        layer: The path of the layer, or the name of the parameter.
        x: The input, `[B, ...]`, or the factor that the parameter is multiplied by.
        z: The output.
        version: The version of the input's storage, by which a change in place is noticed.
    """

    layer: str
    x: Tensor
    z: LayerOutput
    version: int


@dataclass(frozen=True)
class CallForm:
    """The shapes of a call, and the dimension in which the examples lie.

    Attributes:
        shapes: Shapes of the arguments and the outputs; None for an argument that is no tensor.
        dims: For each argument the dimension of the examples; None if all have it in common.
        output_dims: The dimension of the examples in each output.
        copied_outputs: Indices of outputs that all examples have in common, `[1, ...]`. Each
            example is given a copy: what its own outputs owe to the call is seen there.
    """

    shapes: list[torch.Size | None]
    dims: list[int | None]
    output_dims: list[int]
    copied_outputs: list[int]

    @classmethod
    def compare(cls, call: ModuleCall, doubled: ModuleCall, batch: int) -> "CallForm | None":
        """Derive the form from a call for some examples and a call for each of them twice."""
        if len(call.leaves) != len(doubled.leaves) or len(call.outputs) != len(doubled.outputs):
            return None
        dims = [_growing(a, b, batch) for a, b in zip(call.leaves, doubled.leaves, strict=True)]
        output_dims: list[int] = []
        copied_outputs: list[int] = []
        for index, (z, doubled_z) in enumerate(zip(call.outputs, doubled.outputs, strict=True)):
            dim = _growing(z, doubled_z, batch)
            if dim is None:
                if z.shape[:1] != (1,):
                    return None
                copied_outputs.append(index)
                dim = 0
            output_dims.append(dim)
        if _NO_DIM in (*dims, *output_dims) or not output_dims:
            return None
        return cls(_shapes(call), dims, output_dims, copied_outputs)

    def fits(self, call: ModuleCall, batch: int) -> bool:
        """Return whether another call has this form, up to its numbers of positions."""
        shapes = _shapes(call)
        if len(shapes) != len(self.shapes):
            return False
        dims: list[int | None] = [*self.dims, *self.output_dims]
        for index in self.copied_outputs:
            dims[len(self.dims) + index] = None
        for shape, own_shape, dim in zip(shapes, self.shapes, dims, strict=True):
            if shape is None or own_shape is None:
                if shape is not own_shape:
                    return False
            elif not has_form(shape, own_shape, dim, batch):
                return False
        return True


def has_form(shape: torch.Size, own_shape: torch.Size, dim: int | None, batch: int) -> bool:
    """Return whether the examples of two tensors surely lie in the same dimension."""
    if len(shape) != len(own_shape):
        return False
    if dim is not None:
        return shape[dim] == batch
    # An argument that was common to all examples may have become one for each example.
    sizes = zip(shape, own_shape, strict=True)
    return batch == 1 or not any(size == batch != own_size for size, own_size in sizes)


def _shapes(call: ModuleCall) -> list[torch.Size | None]:
    values = (*call.leaves, *call.outputs)
    return [value.shape if isinstance(value, Tensor) else None for value in values]


_NO_DIM = -1


def _growing(value: Any, doubled: Any, batch: int) -> int | None:
    """The dimension that the examples lie in; None if there is none, `_NO_DIM` if unclear."""
    if not isinstance(value, Tensor) or not isinstance(doubled, Tensor):
        return None if type(value) is type(doubled) else _NO_DIM
    if value.shape == doubled.shape:
        return None
    if value.ndim != doubled.ndim:
        return _NO_DIM
    sizes = list(zip(value.shape, doubled.shape, strict=True))
    dims = [dim for dim, (size, doubled_size) in enumerate(sizes) if size != doubled_size]
    return dims[0] if len(dims) == 1 and sizes[dims[0]] == (batch, 2 * batch) else _NO_DIM


# Calls by the module's path and their number among its calls.
RecordedCalls = dict[tuple[str, int], ModuleCall]
CallForms = dict[tuple[str, int], list[CallForm]]


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """A forward pass whose calls are recorded.

    Attributes:
        batch: The number of examples.
        calls: The calls so far, in their order.
        unfinished: The keys of the calls that have begun and not ended, the innermost last.
        num_calls: The number of calls so far, by the module's path.
    """

    batch: int
    calls: RecordedCalls = field(default_factory=dict)
    unfinished: list[tuple[str, int]] = field(default_factory=list)
    num_calls: Counter[str] = field(default_factory=Counter)


class CallRecorder:
    """A recorder of the calls of selected modules.

    Attributes:
        paths: The modules' paths.
        loops: Paths of modules that `vmap` does not run, or, as recurrent layers, in a loop of its
            own.
        calls: The calls of modules inside the network in the last pass, in their order.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str]) -> None:
        self.paths = paths
        self._network = network
        self.loops: set[str] = set()
        for path in paths:
            inner_modules = network.get_submodule(path).modules()
            if any(layer_rule(inner).is_recurrent for inner in inner_modules):
                self.loops.add(path)
        self._forms: CallForms = {}
        self.calls: RecordedCalls = {}

    def hook(self, batch: int) -> list[RemovableHandle]:
        """Hook the modules for one forward pass."""
        handles = []
        forward_pass = _ForwardPass(batch)
        self.calls = forward_pass.calls
        end = partial(self._end, forward_pass)
        for path in filter(None, self.paths):
            module = self._network.get_submodule(path)
            begin = partial(self._begin, forward_pass, path)
            handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(end, prepend=True, with_kwargs=True))
        return handles

    def _begin(
        self,
        forward_pass: _ForwardPass,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        leaves, structure = pytree.tree_flatten((args, named))
        # Copies: the call may overwrite what it is given.
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        key = path, forward_pass.num_calls[path]
        forward_pass.unfinished.append(key)
        forward_pass.calls[key] = ModuleCall(path, module, copies, structure)
        forward_pass.num_calls[path] += 1

    def _end(self, forward_pass: _ForwardPass, _: nn.Module, __: Any, ___: Any, output: Any) -> Any:
        # A call inside of another ends before it.
        key = forward_pass.unfinished.pop()
        call = forward_pass.calls[key]
        leaves, structure = pytree.tree_flatten(output)
        is_output = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        call.outputs = [
            leaf for leaf, is_tensor in zip(leaves, is_output, strict=True) if is_tensor
        ]
        form = next((f for f in self._forms.get(key, ()) if f.fits(call, forward_pass.batch)), None)
        if form is not None:
            call.dims = form.dims
            call.output_dims = form.output_dims
            for index in form.copied_outputs:
                z = call.outputs[index]
                call.outputs[index] = z.expand(forward_pass.batch, *z.shape[1:]).clone()
        call.outputs = [z if z.requires_grad else z.detach().requires_grad_() for z in call.outputs]
        # The forward pass goes on with copies, which it may overwrite.
        outputs = iter([z.clone() for z in call.outputs])
        handed_on = [
            next(outputs) if is_tensor else leaf
            for leaf, is_tensor in zip(leaves, is_output, strict=True)
        ]
        return pytree.tree_unflatten(handed_on, structure)

    def learn(self, batch: int, calls: RecordedCalls, doubled: RecordedCalls) -> bool:
        """Learn the forms of calls from those for a batch, and for each of its examples twice.

        Returns:
            Whether outputs are copied now that were not before, which changes further calls' forms.
        """
        has_more_copies = False
        for key in calls.keys() & doubled.keys():
            forms = self._forms.setdefault(key, [])
            if not any(form.fits(calls[key], batch) for form in forms):
                form = CallForm.compare(calls[key], doubled[key], batch)
                if form is not None:
                    forms.append(form)
                    has_more_copies |= bool(form.copied_outputs)
        return has_more_copies

    def forget_calls(self) -> None:
        """Release the calls of the last pass."""
        self.calls = {}

    def forget_forms(self) -> CallForms:
        """Forget the forms of calls, and return them.

        As long as one of them fits, outputs are copied according to it, and the forms of the calls
        behind it cannot be learned.
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
        """Remove the form of calls whose outputs would be copied."""
        for forms in self._forms.values():
            forms[:] = [form for form in forms if not form.copied_outputs]

    def recorded(self, x: Inputs, outputs: Tensor) -> tuple[list[ModuleCall], set[str]]:
        """Return the recorded calls, and the paths of calls without a dimension of examples."""
        calls = list[ModuleCall]()
        without_form = set[str]()
        if "" in self.paths:
            leaves, structure = pytree.tree_flatten(x)
            dims = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
            calls.append(ModuleCall("", self._network, leaves, structure, [outputs], dims, [0]))
        for call in self.calls.values():
            if call.output_dims:
                calls.append(call)
            else:
                without_form.add(call.path)
        return calls, without_form


class OperandRecorder(TorchFunctionMode):
    """A recorder of the operations that multiply by a parameter, or add it, entry by entry.

    Args:
        parameters: The parameters that are looked for, by name.
        layer_calls: The list that gets a call for each operation, under the parameter's name, with
            the factor that the parameter is multiplied by and the result, both
            `[B, positions, size]`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], layer_calls: list[LayerCall]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._layer_calls = layer_calls

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record it if it is of this kind."""
        named = {} if kwargs is None else kwargs
        output = func(*args, **named)
        operands: list[tuple[Any, Any]] = []
        match getattr(func, "__name__", ""):
            case "mul" | "multiply" if len(args) == 2 and not named:
                operands = [args, args[::-1]]
            case "add" if len(args) == 2 and not named:
                operands = [(operand, None) for operand in args]
            case "layer_norm" | "rms_norm" if named.get("weight") is not None:
                with torch.no_grad():
                    normalised = func(*args[:2], eps=named["eps"])
                operands = [(named["weight"], normalised), (named.get("bias"), None)]
        parameters = [pair for pair in operands if self._is_parameter(pair[0], output)]
        return self._recorded(parameters, output) if parameters else output

    def _is_parameter(self, operand: Any, output: Tensor) -> bool:
        """Whether an operand is all of a parameter, in its order, and the same for all examples."""
        if not isinstance(operand, Tensor) or not operand.ndim <= output.ndim > 0:
            return False
        parameter = operand if operand._base is None else operand._base
        is_all = operand.numel() == parameter.numel() and operand.is_contiguous()
        is_common = operand.ndim < output.ndim or operand.shape[0] == 1
        return id(parameter) in self._names and is_all and is_common

    def _recorded(self, operands: list[tuple[Any, Any]], output: Tensor) -> Tensor:
        like = operands[0][0]
        lead = output.ndim - like.ndim
        parameter_dims = [dim for dim in range(lead, output.ndim) if like.shape[dim - lead] > 1]
        order = [dim for dim in range(output.ndim) if dim not in parameter_dims] + parameter_dims

        def rows(x: Tensor) -> Tensor:
            return x.permute(order).reshape(len(x), -1, like.numel())

        z = rows(output)
        z = z if z.requires_grad else z.detach().requires_grad_()
        layer_output = LayerOutput.from_tensor(z)
        for operand, factor in operands:
            if not isinstance(factor, Tensor):
                factor = output.new_full((), 1.0 if factor is None else factor)
            parameter = operand if operand._base is None else operand._base
            x = rows(without_subclass(factor.detach()).expand(output.shape))
            name = self._names[id(parameter)]
            self._layer_calls.append(LayerCall(name, x, layer_output, x._version))
        # The forward pass goes on with a copy, which it may overwrite.
        back = sorted(range(output.ndim), key=order.__getitem__)
        return z.clone().reshape([output.shape[dim] for dim in order]).permute(back)


@dataclass
class ExampleDims:
    """The dimension of the examples in the inputs of each layer.

    Attributes:
        common: Paths of embeddings whose input has no dimension for the examples, such as positions
            `[T]`; every example is given a copy.
        merged: Layers whose input has further dimensions merged into that of the examples, behind
            them, such as windows of an image; with their number for each example.
        uncopied: Embeddings as in `common`, where the forward pass does not let examples have
            copies.
        shapes: The shapes of all inputs of the embeddings.
        is_known: Whether some examples were run, once and twice each.
    """

    common: set[str] = field(default_factory=set)
    merged: dict[str, int] = field(default_factory=dict)
    uncopied: set[str] = field(default_factory=set)
    shapes: dict[str, list[torch.Size]] = field(default_factory=dict)
    is_known: bool = False

    @classmethod
    def compare(
        cls,
        network: nn.Module,
        batch: int,
        inputs: Mapping[str, list[torch.Size]],
        doubled: Mapping[str, list[torch.Size]],
    ) -> "ExampleDims":
        """Compare the shapes of layers' inputs for a batch and for a batch of doubled examples."""
        dims = cls(is_known=True)
        for path in inputs.keys() & doubled.keys():
            rule = layer_rule(network.get_submodule(path))
            sizes = [shape[0] for shape in inputs[path]]
            sizes_of_doubled = [shape[0] for shape in doubled[path]]
            if rule.is_one_hot:
                dims.shapes[path] = inputs[path]
                if set(sizes) != {batch} or set(sizes_of_doubled) != {2 * batch}:
                    dims.common.add(path)
            elif not rule.channels_first:
                # The layer treats whatever is between examples and features alike.
                is_double = sizes_of_doubled == [2 * size for size in sizes]
                num_merged, remainder = divmod(sizes[0], batch)
                if num_merged > 1 and not remainder and len(set(sizes)) == 1 and is_double:
                    dims.merged[path] = num_merged
        return dims

    def is_clear(self, path: str, shape: torch.Size, batch: int) -> bool:
        """Return whether the examples of an embedding's input lie in the expected dimension."""
        dim = None if path in self.common else 0
        shapes = self.shapes.get(path)
        return shapes is None or any(has_form(shape, earlier, dim, batch) for earlier in shapes)
