"""Recorded programs whose linear maps are run many times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.func import functionalize

Tensors = Sequence[Tensor]
Function = Callable[..., tuple[Tensor, ...]]


class UntraceableError(Exception):
    """A function cannot be recorded for other inputs of the same shapes."""


class RecordedMap(NamedTuple):
    """A linear map of a program.

    Attributes:
        function: A function of residuals and of the tensors of a vector.
        residual_indices: The indices of these residuals among the residuals of the program.
    """

    function: Function
    residual_indices: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A recorded function of points and vectors that is linear in each vector.

    Attributes:
        residuals: A function from the points to the values of the recorded function, followed by
            all other tensors that the linear maps need.
        maps: The linear maps, one for each vector.
    """

    residuals: Function
    maps: tuple[RecordedMap, ...]


def trace(
    function: Callable[..., tuple[Tensors, ...]], points: Tensors, vectors: Sequence[Tensors]
) -> Program:
    """Record a function as a program.

    In contrast to `torch.func.linearize`, one program serves all batches of the same shapes, and
    several linear maps (tangents forward, cotangents back) share their residuals.

    Args:
        function: A function that maps points and vectors to values and, for each vector, to a
            sequence of tensors that are linear in this vector.
        points: Example arguments in which the function need not be linear.
        vectors: Example arguments in which the function is linear, each a sequence of tensors.

    Raises:
        UntraceableError: If the recorded operations depend on values, are random or write to their
            arguments, or if an output depends on several vectors.
    """
    # Imported here because the import takes a second, and only products need it.
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # For each output of `flat`, the index of the result of `function` that contains it: 0 for the
    # values, and k + 1 for vector k. It is known once `flat` has been recorded.
    result_indices: list[int] = []

    def flat(*arguments: Tensor) -> tuple[Tensor, ...]:
        """Call the function with separate tensors, which `make_fx` requires."""
        remaining = iter(arguments)
        results = function(*[[next(remaining) for _ in vector] for vector in (points, *vectors)])
        result_indices.clear()
        outputs: list[Tensor] = []
        for index, result in enumerate(results):
            outputs += result
            result_indices.extend([index] * len(result))
        return tuple(outputs)

    # Recording distinguishes tensors by identity, so each argument must be a separate object.
    arguments = [x.detach() for x in points]
    arguments += [torch.zeros_like(x) for vector in vectors for x in vector]
    # A single mode keeps the shapes of all results, because creating a mode for each result would
    # account for half of the time.
    with torch.no_grad(), tracing(TracingContext(FakeTensorMode())):
        graph_module = make_fx(flat)(*arguments)
        if any(_writes(node) for node in graph_module.graph.nodes):
            # Results can be shared and kept only if no operation writes to them. `functionalize` is
            # applied to the recorded graph, because differentiation adds in-place operations.
            graph_module = make_fx(functionalize(graph_module))(*arguments)
    graph = graph_module.graph
    for node in graph.nodes:
        _check_replayable(node)
    _simplify(graph)
    graph.eliminate_dead_code()
    owners: list[int | None] = [None] * len(points)
    for index, vector in enumerate(vectors):
        owners += [index] * len(vector)
    return _split(graph_module, _dependencies(graph, owners), result_indices)


def _check_replayable(node: fx.Node) -> None:
    """Require that an operation can be replayed on other values of the same shapes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    tags = node.target.tags
    depends_on_values = (
        torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    )
    if node.target is torch.ops.aten.index.Tensor:
        # Only the values of a mask, not of integer indices, determine the shape of the result.
        indices: Any = node.args[1]
        integers = (torch.int32, torch.int64)
        depends_on_values = any(
            x is not None and _shape_and_dtype(x)[1] not in integers for x in indices
        )
    if depends_on_values or torch.Tag.nondeterministic_seeded in tags or _writes(node):
        raise UntraceableError(
            f"{node.target} depends on the values of tensors, is random, or works in place"
        )


def _writes(node: fx.Node) -> bool:
    """Whether an operation changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default)
_RESHAPES = (aten.expand.default, aten.reshape.default, aten.t.default, aten.permute.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mul.Tensor, aten.convolution.default)


def _simplify(graph: fx.Graph) -> None:
    """Merge equal operations, and drop additions of zero.

    The recorded passes forward and back repeat the forward pass. The tangent of a first layer has a
    term for its inputs, which have no tangent: a zero of the largest size in the network.
    """
    nodes_by_key: dict[Any, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target is aten.view.default:
            # Views are replaced by reshapes, because batched columns may have a different order in
            # memory.
            node.target = aten.reshape.default
        replacement = _copied_node(node)
        if replacement is None:
            # Equal operations on the same nodes have the same text.
            key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
            equal_node = nodes_by_key.setdefault(key, node)
            if equal_node is not node:
                replacement = equal_node
            elif _is_zero(node, zeros):
                zeros.add(node)
            else:
                replacement = _other_summand(node, zeros)
        if replacement is not None:
            node.replace_all_uses_with(replacement)


def _copied_node(node: fx.Node) -> Any:
    """Return the argument that an operation only copies, or None for other operations."""
    if node.target in (aten.alias.default, aten.detach.default):
        return node.args[0]
    if node.target is aten.copy.default and _has_same_type(node, node.args[1]):
        return node.args[1]
    return None


def _other_summand(node: fx.Node, zeros: set[fx.Node]) -> Any:
    """Return the other summand if one summand of a sum is zero; otherwise, return None."""
    if node.target is aten.add.Tensor and not node.kwargs:
        for zero, summand in (node.args, node.args[::-1]):
            if zero in zeros and _has_same_type(node, summand):
                return summand
    return None


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether a node's result is zero because of the arguments that are known to be zero."""
    if node.target in _ZEROS:
        return True
    if node.target in _RESHAPES:
        return node.args[0] in zeros
    if node.target is aten.convolution.default and node.args[2] is not None:
        return False  # A bias is added, so the result is not zero even if a factor is.
    return node.target in _PRODUCTS and any(factor in zeros for factor in node.args[:2])


def _has_same_type(node: Any, argument: Any) -> bool:
    """Whether two nodes' tensors have the same shape and dtype."""
    return _shape_and_dtype(node) == _shape_and_dtype(argument)


def _shape_and_dtype(node: Any) -> tuple[torch.Size | None, torch.dtype | None]:
    """Return the shape and dtype of a node's tensor, or None for both if it is not a tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return getattr(meta, "shape", None), getattr(meta, "dtype", None)


def _dependencies(graph: fx.Graph, owners: Sequence[int | None]) -> dict[fx.Node, int | None]:
    """Find the index of the vector on which each node depends; None if it depends on no vector.

    Args:
        graph: The graph.
        owners: The index of the vector to which each placeholder belongs; None for the points.
    """
    dependencies: dict[fx.Node, int | None] = {}
    placeholders = iter(owners)
    for node in graph.nodes:
        if node.op == "placeholder":
            dependencies[node] = next(placeholders)
        elif node.op != "output":
            vectors = {dependencies[source] for source in node.all_input_nodes} - {None}
            if len(vectors) > 1:
                raise UntraceableError("an output depends on several vectors")
            dependencies[node] = next(iter(vectors), None)
    return dependencies


def _split(
    graph_module: fx.GraphModule,
    dependencies: dict[fx.Node, int | None],
    result_indices: Sequence[int],
) -> Program:
    """Split a graph into the function of the points and the linear maps.

    Args:
        graph_module: The recorded graph.
        dependencies: Index of the vector on which each node depends, or None if it depends on no
            vector.
        result_indices: For each output, 0 if it is a value, or k + 1 if it must be linear in vector
            k.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    (outputs,) = next(iter(reversed(graph_module.graph.nodes))).args
    results: list[list[fx.Node]] = [[] for _ in range(max(result_indices) + 1)]
    for node, index in zip(outputs, result_indices, strict=True):
        results[index].append(node)
    values, *outputs_by_vector = results
    _check_owners(values, dependencies, None)
    residuals = list(dict.fromkeys(values))
    maps: list[RecordedMap] = []
    for vector, outputs_of_map in enumerate(outputs_by_vector):
        _check_owners(outputs_of_map, dependencies, vector)
        nodes_of_map = [node for node in nodes if dependencies[node] == vector]
        inputs = [source for node in nodes_of_map for source in node.all_input_nodes]
        # An output that does not depend on its vector is zero, and is taken from the residuals.
        sources = [node for node in [*inputs, *outputs_of_map] if dependencies[node] is None]
        sources = list(dict.fromkeys(sources))
        residuals = list(dict.fromkeys([*residuals, *sources]))
        function = _subgraph(graph_module, sources, nodes_of_map, outputs_of_map)
        maps.append(RecordedMap(function, tuple(map(residuals.index, sources))))
    nodes_of_points = [node for node in nodes if dependencies[node] is None]
    return Program(_subgraph(graph_module, [], nodes_of_points, residuals), tuple(maps))


def _check_owners(
    outputs: Sequence[fx.Node], dependencies: dict[fx.Node, int | None], vector: int | None
) -> None:
    """Require that outputs depend on the given vector only, or on no vector."""
    if any(dependencies[node] not in (None, vector) for node in outputs):
        raise UntraceableError("one column of a product depends on a different column")


def _subgraph(
    graph_module: fx.GraphModule,
    sources: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> Function:
    """Build the function that maps the sources and the nodes' placeholders to the results."""
    graph = fx.Graph()
    copies = {source: graph.placeholder(f"residual_{i}") for i, source in enumerate(sources)}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[result] for result in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(graph_module, graph).forward
