"""Programs whose linear part is run many times: traced once, the rest evaluated once a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

Tensors = Sequence[Tensor]
Function = Callable[..., tuple[Tensor, ...]]


class UntraceableError(Exception):
    """A function has no program that would be right for other inputs of the same shapes."""


@dataclass(frozen=True)
class Program:
    """A function of points and vectors, linear in each vector, split by what depends on which.

    From the points `at` makes the residuals: values, then whatever else the linear maps need. Of
    each map there is its function, and the numbers of the residuals that it takes first.
    """

    at: Function
    maps: tuple[tuple[Function, tuple[int, ...]], ...]


def trace(
    function: Callable[..., tuple[Tensors, ...]], points: Tensors, vectors: Sequence[Tensors]
) -> Program:
    """Record a function as a program.

    As `torch.func.linearize` does, but split in three, so that a program serves every batch of one
    shape, and several linear maps (tangents forward, cotangents back) share what they keep. The
    function returns values and, one sequence for each vector, what is linear in it.
    """
    # It takes a second to import, which those who never multiply need not wait for.
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    groups: list[int] = []

    def flat(*arguments: Tensor) -> tuple[Tensor, ...]:
        cut = iter(arguments)
        parts = [[next(cut) for _ in vector] for vector in (points, *vectors)]
        results = function(*parts)
        groups[:] = [k for k, result in enumerate(results) for _ in result]
        return tuple(x for result in results for x in result)

    # Recording tells tensors apart by identity: each argument must be an object of its own.
    arguments = [x.detach() for x in points]
    arguments += [torch.zeros_like(x) for vector in vectors for x in vector]
    # The shapes of all results are kept in one mode: a mode for each takes half of the time.
    with torch.no_grad(), tracing(TracingContext(FakeTensorMode())):
        graph_module = make_fx(flat)(*arguments)
        if any(_writes(node) for node in graph_module.graph.nodes):
            # Results can be shared and kept only where nothing is written to. Afterwards, because
            # derivatives too are made in place.
            graph_module = make_fx(functionalize(graph_module))(*arguments)
    graph = graph_module.graph
    for node in graph.nodes:
        _check_replayable(node)
    _simplify(graph)
    graph.eliminate_dead_code()
    owners = [-1] * len(points)
    for k, vector in enumerate(vectors):
        owners += [k] * len(vector)
    return _split(graph_module, _dependencies(graph, owners), groups)


def _check_replayable(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    tags = node.target.tags
    by_value = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    if node.target is torch.ops.aten.index.Tensor:
        # Only a mask makes the shape depend on values.
        indices: Any = node.args[1]
        integers = (torch.int32, torch.int64)
        by_value = any(x is not None and _kind(x)[1] not in integers for x in indices)
    if by_value or torch.Tag.nondeterministic_seeded in tags or _writes(node):
        raise UntraceableError(f"{node.target} depends on values, is random, or writes")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default)
_RESHAPES = (aten.expand.default, aten.reshape.default, aten.t.default, aten.permute.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mul.Tensor, aten.convolution.default)


def _simplify(graph: fx.Graph) -> None:
    """Merge equal operations, and drop sums with zero.

    The sweeps that were recorded share their forward pass; and the tangent of a first layer has a
    term for its inputs, which have no tangent: a zero of the largest size in the network.
    """
    seen: dict[Any, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target is aten.view.default:
            # Side by side, columns may lie in memory in another order.
            node.target = aten.reshape.default
        source: Any = None
        if node.target in (aten.alias.default, aten.detach.default):
            source = node.args[0]
        elif node.target is aten.copy.default and _kind(node) == _kind(node.args[1]):
            source = node.args[1]
        if source is not None:
            # A mere copy.
            node.replace_all_uses_with(source)
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if seen.setdefault(key, node) is not node:
            node.replace_all_uses_with(seen[key])
        elif _is_zero(node, zeros):
            zeros.add(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            for term, other in (node.args, node.args[::-1]):
                if term in zeros and _kind(other) == _kind(node):
                    node.replace_all_uses_with(other)  # type: ignore[arg-type]
                    break


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.convolution.default and node.args[2] is not None:
        return False  # a bias
    factors = node.args[: 2 if node.target in _PRODUCTS else 1]
    through = node.target in _RESHAPES or node.target in _PRODUCTS
    return node.target in _ZEROS or (through and any(x in zeros for x in factors))


def _kind(node: Any) -> tuple[torch.Size | None, torch.dtype | None]:
    """Shape and dtype of a node's tensor; None of anything else."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return getattr(meta, "shape", None), getattr(meta, "dtype", None)


def _dependencies(graph: fx.Graph, owners: Sequence[int]) -> dict[fx.Node, int]:
    """For every node the vector that it depends on, −1 for none."""
    dependencies: dict[fx.Node, int] = {}
    placeholders = iter(owners)
    for node in graph.nodes:
        if node.op == "placeholder":
            dependencies[node] = next(placeholders)
        elif node.op != "output":
            found = {dependencies[source] for source in node.all_input_nodes} - {-1}
            if len(found) > 1:
                raise UntraceableError("an output depends on several vectors")
            dependencies[node] = found.pop() if found else -1
    return dependencies


def _split(
    graph_module: fx.GraphModule, dependencies: dict[fx.Node, int], groups: Sequence[int]
) -> Program:
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    (outputs,) = next(iter(reversed(graph_module.graph.nodes))).args
    results: list[list[fx.Node]] = [[] for _ in range(max(groups) + 1)]
    for node, group in zip(outputs, groups, strict=True):
        if dependencies[node] not in (-1, group - 1):
            raise UntraceableError("an output depends on a vector that it should not depend on")
        results[group].append(node)
    parts = [[n for n in nodes if dependencies[n] == k] for k in range(-1, len(results) - 1)]
    # What is linear in a vector and does not depend on it is zero: a residual like any other.
    used = [
        [s for s in [*(s for n in part for s in n.all_input_nodes), *result] if dependencies[s] < 0]
        for part, result in zip(parts[1:], results[1:], strict=True)
    ]
    used = [list(dict.fromkeys(sources)) for sources in used]
    residuals = list(dict.fromkeys([*results[0], *(s for sources in used for s in sources)]))
    maps = [
        (
            _subgraph(graph_module, sources, part, result),
            tuple(residuals.index(source) for source in sources),
        )
        for sources, part, result in zip(used, parts[1:], results[1:], strict=True)
    ]
    return Program(_subgraph(graph_module, [], parts[0], residuals), tuple(maps))


def _subgraph(
    graph_module: fx.GraphModule,
    sources: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> Function:
    """The function from sources, and the placeholders among the nodes, to results."""
    graph = fx.Graph()
    copies = {source: graph.placeholder(f"residual_{i}") for i, source in enumerate(sources)}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[result] for result in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(graph_module, graph).forward
