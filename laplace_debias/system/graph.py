"""The graph of automatic differentiation."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor


def graph_nodes(*tensors: Tensor, excluded: Collection[Any] = ()) -> Iterator[Any]:
    """Yield once each node that tensors depend on, without passing through excluded nodes."""
    visited = {None, *excluded}
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def nodes_in_order(tensor: Tensor) -> Iterator[Any]:
    """Yield once each node that a tensor depends on, after all nodes that this node depends on."""
    finished: set[Any] = {None}
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        node = pending[-1]
        if node in finished:
            pending.pop()
            continue
        sources = [source for source, _ in node.next_functions if source not in finished]
        if sources:
            pending += sources
            continue
        finished.add(node)
        yield node
