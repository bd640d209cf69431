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
