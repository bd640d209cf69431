"""Gradients for several columns of cotangents, computed together or one at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from laplace_debias.curvature.layers.layer_calls import LayerOutput
from laplace_debias.system.graph import graph_nodes
from laplace_debias.system.memory import suppress_unsupported

# Operations that read a number from a tensor into Python, by their names in torch's error messages.
_READING = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense")


def has_python_functions(outputs: Tensor) -> bool:
    """Whether the outputs depend on a `torch.autograd.Function`, whose code may not be vectorised.

    The code may read numbers or, as in `fully_shard`, call further functions.
    """
    return any(isinstance(node, BackwardCFunction) for node in graph_nodes(outputs))


@contextmanager
def explained_reading() -> Iterator[None]:
    """Explain the error of a backward pass that reads numbers of several gradients together."""
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in _READING):
            raise
        raise NotImplementedError(
            "A tensor hook in the model reads a number from a gradient (`.item()`, or `if`). This "
            "is not supported, because the gradients of several outputs are computed together. "
            "Remove the hook first, or replace this code with tensor operations such as "
            "`torch.where`."
        ) from error


def column_by_column(
    differentiate: Callable[..., Sequence[Tensor | None]],
    columns: Tensor,
    targets: Mapping[int, LayerOutput],
    keeps_graph: bool,
) -> dict[int, Float[Tensor, "columns batch *outputs"]]:
    """Compute the gradients for one column of cotangents at a time.

    Args:
        differentiate: A function that computes the gradients at all targets for a column of
            cotangents, with an argument `retain_graph`.
        columns: The columns.
        targets: The outputs of layers at which gradients are computed; the keys may be of any kind.
        keeps_graph: Whether the graph is kept after the last column.

    Returns:
        The gradients at the targets on which the outputs depend, by key.
    """
    gradients: dict[int, Tensor] = {}
    # Allocate before the first pass, to avoid fragmented memory. The columns of an example are
    # contiguous, as products of Jacobians require.
    for target, z in targets.items():
        by_example = z.new_empty(z.shape[0], len(columns), *z.shape[1:])
        gradients[target] = by_example.transpose(0, 1)
    for index, cotangents in enumerate(columns):
        is_last = index + 1 == len(columns)
        column_gradients = differentiate(cotangents, retain_graph=keeps_graph or not is_last)
        reached: dict[int, Tensor] = {}
        for target, gradient in zip(targets, column_gradients, strict=True):
            if gradient is None:
                gradients.pop(target, None)
            else:
                reached[target] = gradient
        if reached:
            places = [gradients[target][index] for target in reached]
            torch._foreach_copy_(places, list(reached.values()))
        # Free the memory before the next pass.
        del column_gradients, gradient, reached
    return gradients


def vmapped_or_stacked(
    differentiate: Callable[[Tensor], Sequence[Tensor | None]], columns: Tensor
) -> list[Tensor | None]:
    """Differentiate for all columns together, or one at a time if a tensor's hook reads numbers.

    `torch.vmap` does not support such hooks.
    """
    with suppress_unsupported(RuntimeError):
        return _differentiate_together(differentiate, columns)
    return _stack_columns([differentiate(column) for column in columns])


def _differentiate_together(
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


def _stack_columns(by_column: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Stack the gradients of all columns; None marks targets without influence."""
    return [
        None if gradients[0] is None else torch.stack(gradients)
        for gradients in zip(*by_column, strict=True)
    ]
