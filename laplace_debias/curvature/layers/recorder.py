"""Calls and operations in a forward pass, and which dimensions the examples lie in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layers.calls import Call
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.layer_types import is_hugging_face_conv1d


@dataclass(frozen=True)
class Use:
    """One call of a layer: what went in, `[B, ...]`, and its version, and what came out.

    Of an operation with a parameter the latter's name and factor, and the result.
    """

    layer: str
    x: Tensor
    z: Tensor
    version: int


# Dimensions of the examples in a call's arguments, and in its outputs.
Dims = tuple[list[int | None], list[int | None]]


# Calls by the module's path and their number among its calls.
_Calls = dict[tuple[str, int], Call]


class CallRecorder:
    """Records the calls of some modules.

    `loops` are paths of modules that `vmap` does not run, or, as recurrent layers, in a loop of its
    own; `seen` the calls of modules inside the network in the last pass, in their order.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str]) -> None:
        self.paths, self._network = paths, network
        self.loops: set[str] = set()
        for path in paths:
            parts = network.get_submodule(path).modules()
            if any(isinstance(part, nn.RNNBase) for part in parts):
                self.loops.add(path)
        self._dims: dict[tuple[str, int], Dims] = {}
        self.seen: _Calls = {}

    def hook(self) -> list[RemovableHandle]:
        """Hooks for one forward pass of the network."""
        handles = []
        self.seen, self._open = {}, list[Call]()
        self._counts = Counter[str]()
        for path in filter(None, self.paths):
            module, begin = self._network.get_submodule(path), partial(self._begin, path)
            both = {"prepend": True, "with_kwargs": True}
            handles.append(module.register_forward_pre_hook(begin, **both))
            handles.append(module.register_forward_hook(self._end, **both))
        return handles

    def _begin(
        self, path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        leaves, structure = pytree.tree_flatten((args, named))
        # Copies: the call may overwrite what it is given.
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._open.append(Call(path, module, copies, structure))
        self.seen[path, self._counts[path]] = self._open[-1]
        self._counts[path] += 1

    def _end(self, _: nn.Module, __: Any, ___: Any, output: Any) -> Any:
        # A call inside of another ends before it.
        seen = self._open.pop()
        leaves, structure = pytree.tree_flatten(output)
        handed_on = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                z = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                seen.outputs.append(z)
                # The forward pass goes on with a copy, which it may overwrite.
                leaf = z.clone()
            handed_on.append(leaf)
        return pytree.tree_unflatten(handed_on, structure)

    def learn(self, one: _Calls, two: _Calls) -> None:
        """Find the dimensions of the examples by what `seen` was after one and after two."""
        self._dims = {}
        for key in one.keys() & two.keys():
            first, second = one[key], two[key]
            if len(first.leaves) != len(second.leaves) or len(first.outputs) != len(second.outputs):
                continue
            leaves = [_growing(a, b) for a, b in zip(first.leaves, second.leaves, strict=True)]
            outputs = [_growing(a, b) for a, b in zip(first.outputs, second.outputs, strict=True)]
            if _NO_DIM not in (*leaves, *outputs) and any(d is not None for d in outputs):
                self._dims[key] = (leaves, outputs)

    def calls(self, x: Inputs, outputs: Tensor, batch: int) -> tuple[list[Call], set[str]]:
        """The recorded calls, and paths where the examples have no dimension of their own."""
        calls, merged = list[Call](), set[str]()
        if "" in self.paths:
            leaves, structure = pytree.tree_flatten(x)
            dims = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
            calls.append(Call("", self._network, leaves, structure, [outputs], dims, [0]))
        for key, seen in self.seen.items():
            seen.dims, seen.output_dims = self._dims.get(key, ((), ()))
            if _fits(seen, batch):
                calls.append(seen)
            else:
                merged.add(seen.path)
        return calls, merged


_NO_DIM = -1


def _growing(one: Any, two: Any) -> int | None:
    """The dimension that has one entry for one example and two for two; `_NO_DIM` if unclear."""
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return None
    if one.ndim != two.ndim:
        return _NO_DIM
    pairs = list(zip(one.shape, two.shape, strict=True))
    dims = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    return dims[0] if len(dims) == 1 and pairs[dims[0]] == (1, 2) else _NO_DIM


def _fits(seen: Call, batch: int) -> bool:
    """Whether a call is as the dimensions of its examples say."""
    values, dims = (*seen.leaves, *seen.outputs), (*seen.dims, *seen.output_dims)
    return 0 < len(values) == len(dims) and all(
        dim is None or value.shape[dim] == batch for value, dim in zip(values, dims, strict=True)
    )


class OperandRecorder(TorchFunctionMode):
    """Finds where a forward pass multiplies by a parameter, or adds it, entry by entry.

    Args:
        parameters: The parameters that are looked for, by name.
        uses: Takes a use of a name, with the factor that the parameter is multiplied by and the
            result, both `[B, positions, size]`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], uses: list[Use]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._uses = uses

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
                operands = [(of, None) for of in args]
            case "layer_norm" | "rms_norm" if named.get("weight") is not None:
                with torch.no_grad():
                    normalised = func(*args[:2], eps=named["eps"])
                operands = [(named["weight"], normalised), (named.get("bias"), None)]
        known = [pair for pair in operands if self._is_known(pair[0], output)]
        return self._recorded(known, output) if known else output

    def _is_known(self, operand: Any, output: Tensor) -> bool:
        """Whether an operand is all of a parameter, in its order, and the same for all examples."""
        if not isinstance(operand, Tensor) or not operand.ndim <= output.ndim > 0:
            return False
        whole = operand if operand._base is None else operand._base
        is_all = operand.numel() == whole.numel() and operand.is_contiguous()
        is_common = operand.ndim < output.ndim or operand.shape[0] == 1
        return id(whole) in self._names and is_all and is_common

    def _recorded(self, operands: list[tuple[Any, Any]], output: Tensor) -> Tensor:
        like = operands[0][0]
        lead = output.ndim - like.ndim
        kept = [dim for dim in range(lead, output.ndim) if like.shape[dim - lead] > 1]
        order = [dim for dim in range(output.ndim) if dim not in kept] + kept

        def rows(x: Tensor) -> Tensor:
            return x.permute(order).reshape(len(x), -1, like.numel())

        z = rows(output)
        z = z if z.requires_grad else z.detach().requires_grad_()
        for operand, factor in operands:
            if not isinstance(factor, Tensor):
                factor = output.new_full((), 1.0 if factor is None else factor)
            whole = operand if operand._base is None else operand._base
            x = rows(factor.detach().expand(output.shape))
            self._uses.append(Use(self._names[id(whole)], x, z, x._version))
        # The forward pass goes on with a copy, which it may overwrite.
        back = sorted(range(output.ndim), key=order.__getitem__)
        return z.clone().reshape([output.shape[dim] for dim in order]).permute(back)


# Layers that treat whatever stands between examples and features alike.
_WITH_POSITIONS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


@dataclass
class ExampleDims:
    """The dimensions of examples that inputs for one example and for two tell.

    Attributes:
        common: Paths of embeddings whose input has no dimension for the examples, such as positions
            `[T]`; every example is given a copy.
        merged: Layers whose input has further dimensions merged into that of the examples, behind
            them, such as windows of an image; with their number for each example.
        uncopied: Embeddings as in `common`, where the forward pass does not let examples have
            copies.
        is_known: Whether one example and two were run.
    """

    common: set[str] = field(default_factory=set)
    merged: dict[str, int] = field(default_factory=dict)
    uncopied: set[str] = field(default_factory=set)
    is_known: bool = False

    @classmethod
    def of(
        cls, network: nn.Module, one: Mapping[str, list[int]], two: Mapping[str, list[int]]
    ) -> "ExampleDims":
        """From the leading sizes of all inputs of the layers, for one example and for two."""
        dims = cls(is_known=True)
        for path in one.keys() & two.keys():
            layer, (size, *others) = network.get_submodule(path), one[path]
            if isinstance(layer, nn.Embedding):
                if {size, *others} != {1} or set(two[path]) != {2}:
                    dims.common.add(path)
            elif isinstance(layer, _WITH_POSITIONS) or is_hugging_face_conv1d(layer):
                is_double = two[path] == [2 * n for n in one[path]]
                if size > 1 and set(others) <= {size} and is_double:
                    dims.merged[path] = size
        return dims
