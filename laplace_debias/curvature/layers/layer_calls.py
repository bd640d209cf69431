"""Calls of layers and operations with a parameter in a forward pass, and their recorders."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layer_rules import Site, layer_rule
from laplace_debias.curvature.layers.example_dims import ExampleDims
from laplace_debias.curvature.network.inputs import without_subclass


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """An output's place in the recorded graph, without the output's values, which take memory.

    Attributes:
        edge: The edge of the graph that receives gradients with respect to the output, or None if
            no graph is recorded.
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
            # Convert to a plain tensor, because a subclass would record the view by which torch
            # finds the place of a leaf.
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
        x: The input, `[B, ...]`, or the factor that multiplies the parameter.
        z: The output.
        version: The version of the input's storage, which reveals changes in place.
    """

    layer: str
    x: Tensor
    z: LayerOutput
    version: int

    @property
    def site(self) -> Site:
        """The site of the layer or the parameter."""
        return Site((self.layer,))


def first_argument(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the first argument of a call, which may have been passed by position or by name."""
    return args[0] if args else next(iter(named.values()))


class LayerRecorder:
    """A recorder of the inputs and outputs of layers in one forward pass.

    Args:
        dims: The dimensions of the examples.
        num_examples: The number of examples.
        has_graph: Whether the graph of the forward pass is recorded.

    Attributes:
        layer_calls: The calls so far, in order.
        returned_outputs: The tensor with which the forward pass continued after each layer, by the
            layer's path. The references are weak, so that the tensors take no memory once they have
            been used.
        is_unclear: Whether there is a call in which the dimension of the examples is unclear.
    """

    def __init__(self, dims: ExampleDims, num_examples: int, has_graph: bool) -> None:
        self.layer_calls: list[LayerCall] = []
        self.returned_outputs: dict[str, weakref.ref[Tensor]] = {}
        self.is_unclear = False
        self._dims = dims
        self._num_examples = num_examples
        self._has_graph = has_graph

    def hook(self, path: str, layer: nn.Module) -> list[RemovableHandle]:
        """Hook a layer such that the hook runs before users' hooks, which may replace the output.

        Changes that users' hooks make to the output are part of the forward pass, not of the layer.
        """
        record = partial(self._record, path)
        inside = layer_rule(layer).inner_layer(layer)
        if inside is None:
            return [layer.register_forward_hook(record, prepend=True, with_kwargs=True)]
        return _hook_within(layer, inside, record)

    def _record(
        self,
        path: str,
        _: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> Any:
        """Record a call, and return the output with which the forward pass continues."""
        x = first_argument(inputs, named)
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            # The layer is of a subclass with its own forward pass, such as a router of experts that
            # derives from a linear layer. Its parameters are measured at its calls.
            return output
        if x.ndim == 0:
            x = x.unsqueeze(0)  # A single index, which all examples share.
        if not self._dims.is_clear(path, x.shape, self._num_examples):
            self.is_unclear = True
        elif path in self._dims.shared:
            x = self._copied_for_each_example(x)
            output = self._copied_for_each_example(output)
        if self._has_graph and not output.requires_grad:
            # The recorded graph begins at the output of the first tapped layer.
            output = output.detach().requires_grad_()
        num_merged = self._dims.merged.get(path, 1)
        recorded_x = without_subclass(x.detach())
        z = output
        returned_output = output
        if num_merged > 1 and len(x) == num_merged * self._num_examples:
            # Windows or frames that are merged into the examples count as positions of an example.
            recorded_x = recorded_x.unflatten(0, (self._num_examples, num_merged))
            z = z.unflatten(0, (self._num_examples, num_merged))
            returned_output = z.flatten(0, 1)
        self.layer_calls.append(LayerCall(path, recorded_x, LayerOutput.from_tensor(z), x._version))
        if self._has_graph and (returned_output.is_leaf or returned_output._is_view()):
            # The forward pass may overwrite the tensor, so pass on a copy: a leaf must not be
            # overwritten, and an overwritten view would move to a different place in the graph.
            returned_output = returned_output.clone()
        self.returned_outputs[path] = weakref.ref(returned_output)
        return returned_output

    def _copied_for_each_example(self, shared: Tensor) -> Tensor:
        """Copy a tensor that all examples share, `[T, ...]` or `[1, T, ...]`, for each example."""
        if len(shared) != 1 or shared.ndim == 1:
            shared = shared.unsqueeze(0)
        return shared.expand(self._num_examples, *shared.shape[1:]).clone()


def _hook_within(
    layer: nn.Module, inside: nn.Module, record: Callable[..., Any]
) -> list[RemovableHandle]:
    """Record what a normalisation passes to a layer inside it, such as its activation."""
    # The arguments of the call of the outer layer that has begun; at most one entry.
    begun_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        begun_calls[:] = [(inputs, named)]

    def end(_: nn.Module, args: tuple[Any, ...]) -> Any:
        # Other modules may share the layer inside, and call it while no outer call has begun.
        if not begun_calls or len(args) != 1:
            return None
        inputs, named = begun_calls.pop()
        (output,) = args
        return record(layer, inputs, named, output)

    return [
        layer.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        inside.register_forward_pre_hook(end, prepend=True),
    ]


class _Operand(NamedTuple):
    """An operand, and the tensor or number by which the operation multiplies it."""

    value: Any
    factor: Any


class OperandRecorder(TorchFunctionMode):
    """A recorder of the operations that multiply by a parameter, or add one, entry by entry.

    Args:
        parameters: The parameters to look for, by name.
        layer_calls: A list to which a call is added for each operation, with the parameter's name,
            the factor that multiplies the parameter, and the result, both `[B, positions, size]`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], layer_calls: list[LayerCall]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._layer_calls = layer_calls

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record it if it multiplies by a parameter or adds a parameter."""
        named = {} if kwargs is None else kwargs
        output = func(*args, **named)
        operands: list[_Operand] = []
        match getattr(func, "__name__", ""):
            case "mul" | "multiply" if len(args) == 2 and not named:
                first, second = args
                operands = [_Operand(first, factor=second), _Operand(second, factor=first)]
            case "add" if len(args) == 2 and not named:
                operands = [_Operand(value, factor=1.0) for value in args]
            case "layer_norm" | "rms_norm" if named.get("weight") is not None:
                with torch.no_grad():
                    normalised = func(*args[:2], eps=named["eps"])
                operands = [
                    _Operand(named["weight"], factor=normalised),
                    _Operand(named.get("bias"), factor=1.0),
                ]
        operands = [operand for operand in operands if self._is_parameter(operand.value, output)]
        return self._record_operands(operands, output) if operands else output

    def _is_parameter(self, value: Any, output: Tensor) -> bool:
        """Whether a value is a whole parameter in its own order that all examples share."""
        if not isinstance(value, Tensor) or not value.ndim <= output.ndim > 0:
            return False
        parameter = _viewed_tensor(value)
        is_all = value.numel() == parameter.numel() and value.is_contiguous()
        is_common = value.ndim < output.ndim or value.shape[0] == 1
        return id(parameter) in self._names and is_all and is_common

    def _record_operands(self, operands: list[_Operand], output: Tensor) -> Tensor:
        """Record an operation for each parameter in it; return the output to continue with.

        The recorded tensors are `[B, positions, size]`, with the dimensions of the parameters
        flattened into the last one.

        Args:
            operands: The operands that are parameters.
            output: The output of the operation.
        """
        # All parameters of an operation have the same shape.
        layout = _RowLayout(output.shape, operands[0].value.shape)
        z = layout.to_rows(output)
        if not z.requires_grad:
            z = z.detach().requires_grad_()
        layer_output = LayerOutput.from_tensor(z)
        for parameter, factor in operands:
            if not isinstance(factor, Tensor):
                factor = output.new_full((), factor)
            x = layout.to_rows(without_subclass(factor.detach()).expand(output.shape))
            name = self._names[id(_viewed_tensor(parameter))]
            self._layer_calls.append(LayerCall(name, x, layer_output, x._version))
        # The forward pass continues with a copy, which it may overwrite.
        return layout.from_rows(z.clone())


def _viewed_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor of which a tensor is a view, or the tensor itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


class _RowLayout:
    """The layout of an operation's output as rows, `[B, positions, size]`.

    A row has the entries that one copy of the parameter affects. The parameter is copied along the
    dimensions that it lacks or in which it has size 1, which become the positions.

    Args:
        shape: The shape of the output, whose first dimension is the examples.
        parameter_shape: The shape of the parameter.
    """

    def __init__(self, shape: torch.Size, parameter_shape: torch.Size) -> None:
        num_missing = len(shape) - len(parameter_shape)
        padded_shape = (*(1,) * num_missing, *parameter_shape)
        copied_dims = [dim for dim, size in enumerate(padded_shape) if size <= 1]
        parameter_dims = [dim for dim, size in enumerate(padded_shape) if size > 1]
        self._order = copied_dims + parameter_dims
        self._shape = shape
        self._size = parameter_shape.numel()

    def to_rows(self, x: Tensor) -> Float[Tensor, "batch positions size"]:
        """Rearrange a tensor of the output's shape."""
        return x.permute(self._order).reshape(len(x), -1, self._size)

    def from_rows(self, rows: Float[Tensor, "batch positions size"]) -> Float[Tensor, "*shape"]:
        """Invert `to_rows`."""
        permuted = rows.reshape([self._shape[dim] for dim in self._order])
        inverse_order = sorted(range(len(self._shape)), key=self._order.__getitem__)
        return permuted.permute(inverse_order)
