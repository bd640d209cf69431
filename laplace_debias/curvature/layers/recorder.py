"""Calls of modules and layers in a forward pass, and which dimensions the examples lie in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from laplace_debias.curvature.layers.calls import Call, call_of_network, runner
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.layer_types import is_hugging_face_conv1d

# Dimensions of the examples in a call's arguments, and in its outputs.
Dims = tuple[list[int | None], list[int | None]]


@dataclass
class _Seen:
    """A call as the hooks see it."""

    path: str
    leaves: list[Any]
    structure: Any
    outputs: list[Tensor]


class CallRecorder:
    """Records the calls of some modules.

    `loops` are paths of modules that `vmap` does not run, or, as recurrent layers, in a loop of its
    own; `seen` the calls of modules inside the network since `forget`, in their order.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str]) -> None:
        self.paths, self._network = paths, network
        self._inner = {path: network.get_submodule(path) for path in paths if path}
        self.has_inner = bool(self._inner)
        self.loops: set[str] = set()
        for path in paths:
            parts = network.get_submodule(path).modules()
            if any(isinstance(part, nn.RNNBase) for part in parts):
                self.loops.add(path)
        self._dims: dict[tuple[str, int], Dims] | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of what was recorded."""
        self.seen: list[_Seen] = []
        self._open: list[_Seen] = []

    def hook(self) -> list[RemovableHandle]:
        """Hooks for one forward pass of the network."""
        handles = []
        for path, module in self._inner.items():
            begin, both = partial(self._begin, path), {"prepend": True, "with_kwargs": True}
            handles.append(module.register_forward_pre_hook(begin, **both))
            handles.append(module.register_forward_hook(self._end, **both))
        return handles

    def _begin(self, path: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        leaves, structure = pytree.tree_flatten((args, named))
        # Copies: the call may overwrite what it is given.
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        seen = _Seen(path, copies, structure, [])
        self.seen.append(seen)
        self._open.append(seen)

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

    def learn(self, of_one: Sequence[_Seen], of_two: Sequence[_Seen]) -> None:
        """Find the dimensions of the examples by what `seen` was after one and after two."""
        one, two = _numbered(of_one), _numbered(of_two)
        self._dims = {}
        for key in one.keys() & two.keys():
            first, second = one[key], two[key]
            if len(first.leaves) != len(second.leaves) or len(first.outputs) != len(second.outputs):
                continue
            leaves = [_growing(a, b) for a, b in zip(first.leaves, second.leaves, strict=True)]
            outputs = [_growing(a, b) for a, b in zip(first.outputs, second.outputs, strict=True)]
            if _NO_DIM not in (*leaves, *outputs) and any(d is not None for d in outputs):
                self._dims[key] = (leaves, outputs)

    def calls(self, x: Inputs, outputs: Tensor, batch: int) -> dict[str, list[Call] | None]:
        """The recorded calls by path; None where the examples have no dimension of their own."""
        found: dict[str, list[Call] | None] = {path: [] for path in self.paths}
        if "" in found:
            found[""] = [call_of_network(self._network, x, outputs)]
        for key, seen in _numbered(self.seen).items():
            of_path = found[seen.path]
            dims = (self._dims or {}).get(key)
            if of_path is None or dims is None or not _fits(seen, dims, batch):
                found[seen.path] = None
                continue
            run = runner(self._inner[seen.path], seen.structure)
            of_path.append(Call(seen.path, run, seen.leaves, dims[0], seen.outputs, dims[1]))
        return found


_NO_DIM = -1


def _numbered(seen: Sequence[_Seen]) -> dict[tuple[str, int], _Seen]:
    """Calls by the module's path and their number among its calls."""
    counts: dict[str, int] = {}
    numbered = {}
    for call in seen:
        counts[call.path] = counts.get(call.path, -1) + 1
        numbered[call.path, counts[call.path]] = call
    return numbered


def _growing(one: Any, two: Any) -> int | None:
    """The dimension that has one entry for one example and two for two; `_NO_DIM` if unclear."""
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return None
    if one.ndim != two.ndim:
        return _NO_DIM
    pairs = list(zip(one.shape, two.shape, strict=True))
    dims = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    return dims[0] if len(dims) == 1 and pairs[dims[0]] == (1, 2) else _NO_DIM


def _fits(seen: _Seen, dims: Dims, batch: int) -> bool:
    values = (*seen.leaves, *seen.outputs)
    of_values = (*dims[0], *dims[1])
    return len(values) == len(of_values) and all(
        dim is None or value.shape[dim] == batch
        for value, dim in zip(values, of_values, strict=True)
    )


# Layers that treat whatever stands between examples and features alike.
_WITH_POSITIONS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ExampleDims:
    """The dimensions of examples that inputs for one example and for two tell.

    Attributes:
        common: Paths of embeddings whose input has no dimension for the examples, such as positions
            `[T]`; every example is given a copy.
        merged: Layers whose input has further dimensions merged into that of the examples, behind
            them, such as windows of an image; with their number for each example.
        uncopied: Those of `common` where the forward pass does not let examples have copies.
    """

    common: frozenset[str]
    merged: Mapping[str, int]
    uncopied: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, network: nn.Module, one: Mapping[str, list[int]], two: Mapping[str, list[int]]
    ) -> "ExampleDims":
        """From the leading sizes of all inputs of the layers, for one example and for two."""
        common, merged = set(), {}
        for path in one.keys() & two.keys():
            layer = network.get_submodule(path)
            if isinstance(layer, nn.Embedding):
                if any(n != 1 for n in one[path]) or any(n != 2 for n in two[path]):
                    common.add(path)
            elif isinstance(layer, _WITH_POSITIONS) or is_hugging_face_conv1d(layer):
                sizes = set(one[path])
                if len(sizes) == 1 and two[path] == [2 * n for n in one[path]]:
                    merged[path] = sizes.pop()
        return cls(frozenset(common), {path: n for path, n in merged.items() if n > 1})
