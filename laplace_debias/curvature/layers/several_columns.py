"""Gradients of several columns of cotangents, computed together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# Operations by which Python reads a number from a tensor, as torch's errors name them.
_READING = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense")


def has_python_functions(outputs: Tensor) -> bool:
    """Whether the outputs depend on a `torch.autograd.Function`, whose code may not be vectorised.

    It may read numbers, or, as that of `fully_shard`, call further functions.
    """
    nodes = [outputs.grad_fn]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None:
            following = {function for function, _ in node.next_functions} - visited
            visited |= following
            nodes += following
    return False


@contextmanager
def explained_reading() -> Iterator[None]:
    """Explain the error of a backward pass that reads numbers of several gradients together."""
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in _READING):
            raise
        raise NotImplementedError(
            "The backward pass of the model reads a number from a gradient (`.item()`, or `if`), "
            "in a hook of a tensor or in a `torch.autograd.Function`. This is not supported, "
            "because the gradients of several outputs are computed together. Remove the hook "
            "before the call, or use tensor operations such as `torch.where` in it."
        ) from error


def vmapped(
    differentiate: Callable[[Tensor], Sequence[Tensor | None]], columns: Tensor
) -> list[Tensor | None]:
    """Differentiate for all columns together.

    `torch.autograd.grad(is_grads_batched=True)` would run convolutions column by column.
    """
    is_reached: list[bool] = []

    def reached_gradients(cotangents: Tensor) -> list[Tensor]:
        gradients = differentiate(cotangents)
        is_reached[:] = [gradient is not None for gradient in gradients]
        return [gradient for gradient in gradients if gradient is not None]

    reached = iter(torch.vmap(reached_gradients)(columns))
    return [next(reached) if is_tensor else None for is_tensor in is_reached]


def stacked(by_column: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Stack the gradients of all columns; None where the outputs do not depend on a target."""
    return [
        None if gradients[0] is None else torch.stack(gradients)
        for gradients in zip(*by_column, strict=True)
    ]
