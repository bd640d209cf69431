"""The forms in which the user's data may contain inputs, targets and weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    num_examples,
    without_subclass,
)
from laplace_debias.system.shown import counted

# A function from an item of the data to (inputs, targets).
BatchHook = Callable[[Any], tuple[Any, Any]]

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")
"""Names by which an entry of a batch is recognised as its targets."""

USE_A_HOOK = (
    "pass `batch=`, a function that converts a batch to (inputs, targets), such as `batch=lambda "
    "batch: (batch[0], batch[1])`"
)


@dataclasses.dataclass(frozen=True, eq=False)
class PlainBatch:
    """A batch whose inputs are passed to the model unchanged.

    Attributes:
        inputs: The inputs; a `dict` if they come from a mapping or dataclass.
        targets: The targets, or None if the batch has no targets.
        weights: The weights of the examples, or None if the batch has no weights.
    """

    inputs: Inputs
    targets: Any
    weights: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class NamedBatch:
    """A mapping or dataclass with inputs and targets.

    Attributes:
        entries: The entries by name. Targets of None are left out if the reader needs no targets.
        target_name: The name of the entry with the targets, or None if there are no targets.
    """

    entries: dict[str, Any]
    target_name: str | None


def batch_form(
    batch: Any, name: str, *, needs_targets: bool, takes_weights: bool
) -> PlainBatch | NamedBatch:
    """Determine the form of a batch.

    Args:
        batch: The item that the data yields.
        name: The batch's name in error messages.
        needs_targets: Whether the batch must have targets.
        takes_weights: Whether the batch may have a third entry, one weight per example.

    Raises:
        TypeError: If the batch has none of the supported forms.
        ValueError: If several named entries have a name from `TARGETS`, or none has one although
            targets are needed.
    """
    weights = None
    if isinstance(batch, (tuple, list)) and len(batch) == 3:
        if not takes_weights:
            raise TypeError(
                f"{name} has three entries. Weights of examples as the third entry are not "
                "supported here. Pass pairs (inputs, targets). If the third entry is something "
                f"else, {USE_A_HOOK}. Combine several inputs in a tuple or a dict."
            )
        *batch, weights = batch
    if _is_pair(batch):
        inputs, targets = batch
        return PlainBatch(named_entries(inputs) or inputs, targets, weights)
    named = named_entries(batch)
    if named is not None:
        return _named_batch(named, needs_targets)
    if not needs_targets and _is_inputs_only(batch):
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        return PlainBatch(named_entries(inputs) or inputs, targets=None)
    single = ""
    if isinstance(batch, Tensor):
        single = " If the data are a single batch, pass it in a list, `[(x, y)]`."
    raise TypeError(
        "Batches must be pairs (inputs, targets), or mappings or dataclasses in "
        "which the targets have one of the names "
        f"{', '.join(map(repr, TARGETS))}, got {_type_and_length(batch)}. For other batches, "
        f"{USE_A_HOOK}. Combine several inputs in a tuple or a dict.{single}"
    )


def hook_form(batch: Any) -> PlainBatch:
    """Check that a hook returned a pair (inputs, targets), and wrap the pair."""
    if not _is_pair(batch):
        raise TypeError(
            f"The function `batch=` returned {_type_and_length(batch)}. Return a pair (inputs, "
            "targets)."
        )
    inputs, targets = batch
    return PlainBatch(named_entries(inputs) or inputs, targets)


def named_entries(batch: Any) -> dict[str, Any] | None:
    """Return a dict of the entries of a mapping or a dataclass, or None for any other object."""
    if isinstance(batch, OneArgument):
        return None  # The model receives a `OneArgument` unchanged.
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def checked_batch(inputs: Inputs, targets: Any, weights: Any, name: str) -> Batch:
    """Build a batch from entries of equal size and weights that are finite and nonnegative."""
    if isinstance(targets, int | float):
        raise TypeError(
            f"The target of {name} is one number, {targets!r}, so the data yield single examples. "
            "Pass a DataLoader, such as `DataLoader(dataset, batch_size=128)`, with the collator "
            "of the training if there is one."
        )
    if not isinstance(targets, Tensor):
        advice = ' Or use `return_tensors="pt"` in the tokenizer or collator.'
        raise TypeError(
            f"Targets must be a tensor, got {type(targets).__name__}. Convert an array or a "
            f"list with `torch.as_tensor`.{advice if isinstance(targets, list) else ''}"
        )
    targets = without_subclass(targets)
    if targets.is_nested:
        raise TypeError(
            "Targets are a nested tensor. Pad them with `torch.nested.to_padded_tensor(y, "
            "-100)`. Classification ignores targets of -100."
        )
    size = num_examples(inputs)
    if targets.ndim == 0 or size != len(targets):
        raise ValueError(
            f"{name} contains {counted(size, 'input')}, but its targets have the shape "
            f"{tuple(targets.shape)}. Pass one target per input."
        )
    if weights is None:
        return Batch(inputs, targets)
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise TypeError(
            "The third entry of a batch must be the weights of its examples, as a tensor of "
            "floating-point numbers, but is of type "
            f"{getattr(weights, 'dtype', type(weights).__name__)}. "
            f"Convert the weights. If the third entry is something else, {USE_A_HOOK}."
        )
    if weights.shape != (size,):
        raise ValueError(
            f"{name} contains {counted(size, 'example')}, but weights of shape "
            f"{tuple(weights.shape)}. Pass one weight per example."
        )
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError(
            f"The weights of examples must be finite and at least 0, but {name} "
            "contains other values. Check the third entry of the batches."
        )
    return Batch(inputs, targets, weights)


def _named_batch(named: dict[str, Any], needs_targets: bool) -> NamedBatch:
    """Find the targets among the entries of a batch by their names."""
    if not needs_targets:
        named = {
            key: value for key, value in named.items() if value is not None or key not in TARGETS
        }
    target_names = [key for key in TARGETS if key in named]
    if len(target_names) == 1:
        return NamedBatch(named, target_names[0])
    if not target_names and not needs_targets:
        return NamedBatch(named, None)
    problem = "none of them has a name of targets"
    if target_names:
        problem = f"several of them have names of targets, {target_names}"
    raise ValueError(
        f"The batch has the entries {list(named)}, and {problem}. Rename the "
        f"entries so that exactly one of them has a name from "
        f"{', '.join(map(repr, TARGETS))}, or {USE_A_HOOK}."
    )


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _is_inputs_only(batch: Any) -> bool:
    """Whether a batch that is not a pair consists of inputs without targets."""
    if isinstance(batch, (tuple, list)):
        return len(batch) == 1
    return isinstance(batch, (Tensor, OneArgument))


def _type_and_length(batch: Any) -> str:
    length = f" of length {len(batch)}" if isinstance(batch, Sized) else ""
    return type(batch).__name__ + length
