"""Inputs of a model: one tensor, several tensors, or named tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from laplace_debias.curvature.network.fingerprints import digest_of
from laplace_debias.system.ranks import Ranks

# One tensor [B, ...]; a tuple or list of several inputs, passed by position; or a mapping, passed
# by name or as a whole (`OneArgument`). An entry that is not a tensor (None, a flag) applies to
# every example.
Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@runtime_checkable
class Record(Protocol):
    """A dataclass whose fields are inputs by name, and possibly targets."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class OneArgument(dict[str, Any]):
    """A mapping that is passed as one argument: `model(batch)`, not `model(**batch)`.

    Use it wherever inputs are expected: `[(OneArgument(x), y) for x, y in loader]`, and
    `la.predict(OneArgument(x))`. The model receives a plain `dict`. All tensors of examples in it
    must have the same leading dimension.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, OneArgument
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = nn.Linear(2, 3)
        ...     def forward(self, batch):
        ...         return self.head(batch["image"])
        >>> batch = OneArgument(image=torch.randn(6, 2))
        >>> la = Laplace(Model()).fit_batches([(batch, torch.randint(3, (6,)))])
        >>> la.predict(batch).probs.shape
        torch.Size([6, 3])
    """


def like(inputs: Mapping[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Wrap other named values in the type of `inputs`."""
    return OneArgument(named) if isinstance(inputs, OneArgument) else named


def num_examples(inputs: Inputs) -> int:
    """Return B, the leading dimension of every tensor among the inputs."""
    shapes = []
    sizes = set()
    for x in tensors_of(inputs):
        if x.is_nested:
            raise TypeError(
                "Inputs contain a nested tensor, whose examples have different shapes. Pad it "
                "with `torch.nested.to_padded_tensor(x, 0.0)`, and pass a mask that marks the "
                "padding."
            )
        shapes.append(tuple(x.shape))
        sizes.add(x.shape[:1])
    if not shapes:
        raise TypeError(
            "Inputs must be a tensor, or a tuple or mapping of tensors, got "
            f"{type(inputs).__name__}. Convert an array or a list with `torch.as_tensor`. Pass the "
            "inputs of one batch instead of a loader."
        )
    size = max(shapes[0][:1], default=0)
    if size == 0 or sizes != {(size,)}:
        raise ValueError(
            "Inputs must contain at least one example, and the same number in every tensor, got "
            f"{shapes}. Check the batches."
        )
    return size


def example_shapes(inputs: Inputs) -> tuple[torch.Size, ...]:
    """Return the shape of each tensor for one example."""
    return tuple(x.shape[1:] for x in tensors_of(inputs))


def take(inputs: Inputs, examples: slice | Tensor) -> Inputs:
    """Select examples by a slice or by their indices."""
    return with_tensors(inputs, map(itemgetter(examples), tensors_of(inputs)))


def join(batches: Sequence[Inputs]) -> Inputs:
    """Concatenate the examples of several inputs."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))  # type: ignore[arg-type]
    if any(type(batch) is not type(first) or len(batch) != len(first) for batch in batches):
        raise TypeError(
            "The inputs of the batches have different types. Pass all of them in the same form."
        )
    keys: Any = first if isinstance(first, Mapping) else range(len(first))
    joined = {
        key: torch.cat([batch[key] for batch in batches])
        if isinstance(first[key], Tensor)
        else first[key]
        for key in keys
    }
    return like(first, joined) if isinstance(first, Mapping) else tuple(joined.values())


def move(
    inputs: Any,
    device: torch.device | None,
    dtypes: Collection[torch.dtype] | None,
    *,
    keeps_graph: bool = False,
) -> Inputs:
    """Move inputs to a device, and require that floating-point inputs have one of the dtypes.

    Gradients flow back to the inputs only if `keeps_graph`.
    """
    num_examples(inputs)  # Reject inputs that are not a batch.
    moved = []
    for x in tensors_of(inputs):
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise TypeError(
                "Inputs are transformed by torch.func (vmap, grad, jacrev, ...), which predictions "
                "and curvature do not support. Call them outside of the transform. For gradients "
                "in the inputs, use torch.autograd and `predict(x, differentiable=True)`."
            )
        if dtypes is not None and x.is_floating_point() and x.dtype not in dtypes:
            raise dtype_error(x.dtype, dtypes)
        # Tensors that were created in inference mode cannot be differentiated.
        if x.is_inference():
            x = x.clone()
        elif not keeps_graph:
            x = x.detach()
        moved.append(x.to(device or x.device, non_blocking=True))
    return with_tensors(inputs, moved)


def gather_batches(ranks: Ranks, batches: Sequence[Inputs], device: torch.device) -> list[Inputs]:
    """Return the inputs of all processes on a device, in the order of the processes' ranks."""
    if ranks.size == 1:
        return list(batches)
    by_rank = ranks.exchange([move(inputs, torch.device("cpu"), None) for inputs in batches])
    return [move(inputs, device, None) for batches_of_rank in by_rank for inputs in batches_of_rank]


def dtype_error(dtype: torch.dtype, dtypes: Collection[torch.dtype]) -> TypeError:
    """Make the error for inputs whose dtype no parameter has."""
    return TypeError(
        f"Inputs have dtype {dtype}, but the model's parameters have "
        f"{', '.join(map(str, dtypes))}. Convert one of them."
    )


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors among the inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    elif not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    return list(filter(torch.is_tensor, inputs))


def without_subclass(tensor: Tensor) -> Tensor:
    """Convert a tensor of a subclass, such as an image of a data library, to a plain tensor.

    Subclasses that define how operations are computed, such as distributed tensors, are kept.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def digest_of_examples(inputs: Inputs, targets: Tensor, weights: Tensor | None = None) -> str:
    """Return a string that changes if any entry or the order of the examples changes."""
    tensors = [*tensors_of(inputs), targets]
    if weights is not None:
        tensors.append(weights)
    return digest_of(tensors)


def with_tensors(inputs: Any, tensors: Iterable[Tensor]) -> Any:
    """Replace the tensors among the inputs by the given tensors, in the same order."""
    replacements = iter(tensors)
    if isinstance(inputs, Tensor):
        return next(replacements)
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    placed = [next(replacements) if isinstance(x, Tensor) else x for x in values]
    if isinstance(inputs, Mapping):
        return like(inputs, dict(zip(inputs, placed, strict=True)))
    return tuple(placed)
