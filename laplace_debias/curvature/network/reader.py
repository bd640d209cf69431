"""How batches are read: pairs, and what loaders and collators yield in their place."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    move,
    num_examples,
    take,
    tensors_of,
)
from laplace_debias.curvature.network.shadow import shadow, unwrapped

# From what the data yields to (inputs, targets).
BatchHook = Callable[[Any], tuple[Any, Any]]

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")
"""Entries of a batch with names that are its targets."""

USE_A_HOOK = (
    "pass batch=, a function from a batch to (inputs, targets), such as "
    "batch=lambda batch: (batch[0], batch[1])"
)


class BatchReader:
    """Reads batches as inputs and targets.

    A batch is a pair `(inputs, targets)`, or a mapping or dataclass with an entry that is called as
    `TARGETS` has it. The rest of such a batch are the inputs: passed by name where the model's
    forward pass takes them by name, and a single one of another name by position. A model is never
    given the targets, so it computes no loss. Where a Hugging Face model moves the labels of tokens
    by one position, as causal language models do, so are the targets (see `shifts_labels`).

    Args:
        model: The user's model.
        hook: A function from what the data yields to `(inputs, targets)`, both taken as they are;
            None for the rules above.

    Raises:
        TypeError: If the hook cannot be called.
    """

    def __init__(self, model: nn.Module, hook: BatchHook | None = None) -> None:
        if hook is not None and not callable(hook):
            raise TypeError(
                f"batch must be a function from a batch to (inputs, targets), got "
                f"{type(hook).__name__}: {USE_A_HOOK}."
            )
        self._model = model
        self._hook = hook
        # Found out with the first batch that leaves it open.
        self._shifts: bool | None = None

    @property
    def has_hook(self) -> bool:
        """Whether the user's own function reads batches."""
        return self._hook is not None

    def __call__(self, batch: Any, name: str = "A batch") -> tuple[Inputs, Tensor]:
        """A batch as inputs and targets, with as many targets as inputs.

        Args:
            batch: What the source yields.
            name: What errors call it.

        Raises:
            TypeError: If it is none of the kinds above.
            ValueError: If the numbers of examples differ; if it is not clear which of its entries
                are the targets, or how the model takes the others.
        """
        if self._hook is not None:
            batch = self._hook(batch)
            if not _is_pair(batch):
                raise TypeError(
                    f"The function batch= must return a pair (inputs, targets), got {_kind(batch)}."
                )
        named = None if _is_pair(batch) else _named(batch)
        if named is not None:
            inputs, targets = self._from_names(named)
        elif _is_pair(batch):
            inputs, targets = _plain(batch[0]), batch[1]
        else:
            raise TypeError(
                "Batches must be pairs (inputs, targets), or mappings or dataclasses with the "
                f"targets under {', '.join(map(repr, TARGETS))}; got {_kind(batch)}: {USE_A_HOOK}. "
                "Several inputs go into a tuple or a dict."
            )
        return _checked(inputs, targets, name)

    def inputs(self, x: Any) -> Inputs:
        """The inputs of what a user predicts for: inputs, or a batch with names, targets left out.

        An entry that the forward pass takes under that name is an input, but for `labels`.

        Raises:
            ValueError: If it is not clear how the model takes the entries.
        """
        named = _named(x)
        if named is None:
            return x
        known = self._parameters()
        rest = {
            key: value
            for key, value in named.items()
            if key not in TARGETS or (key != "labels" and key in known)
        }
        return self._placed(rest)

    def _from_names(self, named: dict[str, Any]) -> tuple[Inputs, Any]:
        found = [key for key in TARGETS if key in named]
        if len(found) != 1:
            what = f"several that may be the targets, {found}" if found else "none that is targets"
            raise ValueError(
                f"The batch has the entries {list(named)}, {what}: {USE_A_HOOK}. One entry of "
                f"{', '.join(map(repr, TARGETS))} is taken for the targets."
            )
        targets = named.pop(found[0])
        if isinstance(targets, Tensor) and are_per_token(targets, named):
            if self._shifts is None:
                self._shifts = shifts_labels(unwrapped(self._model), named, targets)
            targets = next_token_targets(targets) if self._shifts else targets
        return self._placed(named), targets

    def _placed(self, named: dict[str, Any]) -> Inputs:
        """Inputs by name; a single one that the forward pass does not know by its name as it is.

        Raises:
            ValueError: If the forward pass has no parameters of these names.
        """
        known = self._parameters()
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        unknown = [key for key in named if key not in known]
        if len(named) == 1 and unknown:
            (value,) = named.values()
            return value
        if unknown and not takes_any:
            raise ValueError(
                f"The model's forward pass has no parameters {unknown}, which are entries of the "
                f"batch besides the targets; it has {list(known)}. Leave them out of the batch, or "
                f"{USE_A_HOOK}."
            )
        return named

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the forward pass; of the model inside, where PEFT passes all on."""
        model = unwrapped(self._model)
        known = inspect.signature(model.forward).parameters
        base = getattr(model, "get_base_model", None)
        if base is not None and all(p.kind in _ANY for p in known.values()):
            return inspect.signature(base().forward).parameters
        return known


_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _checked(inputs: Inputs, targets: Any, name: str) -> tuple[Inputs, Tensor]:
    if not isinstance(targets, Tensor):
        advice = ' (tokenizers and collators give tensors with return_tensors="pt")'
        raise TypeError(
            f"Targets must be a tensor, got {type(targets).__name__}"
            f"{advice if isinstance(targets, list) else ''}."
        )
    if targets.is_nested:
        raise TypeError(
            "Targets are a nested tensor: pad them with torch.nested.to_padded_tensor(y, -100), "
            "which classification ignores."
        )
    size = num_examples(inputs)
    if targets.ndim == 0 or size != len(targets):
        raise ValueError(f"{name} holds {size} inputs but targets of shape {tuple(targets.shape)}.")
    return inputs, targets


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _named(batch: Any) -> dict[str, Any] | None:
    """The entries of a mapping or a dataclass, by name; None for anything else."""
    if isinstance(batch, OneArgument):
        return None  # The model takes it as it is.
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _plain(inputs: Any) -> Any:
    """Inputs of a pair: a dataclass by its names, all else as it is."""
    return inputs if isinstance(inputs, Mapping) else (_named(inputs) or inputs)


def _kind(batch: Any) -> str:
    length = f" of length {len(batch)}" if isinstance(batch, Sized) else ""
    return f"{type(batch).__name__}{length}"


IGNORED = -100
"""The label of a position that does not count, as Hugging Face and `F.cross_entropy` have it."""


def are_per_token(labels: Tensor, inputs: Inputs) -> bool:
    """Whether labels are those of tokens: integers `[B, T]`, as some input has them."""
    if labels.ndim != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return any(x.shape[:2] == labels.shape for x in tensors_of(inputs))


def next_token_targets(labels: Tensor) -> Tensor:
    """Labels `[B, T]` where the outputs that predict them are: each one position earlier."""
    nothing = torch.full_like(labels[:, :1], IGNORED)
    return torch.cat([labels[:, 1:], nothing], dim=1)


@torch.inference_mode(False)
def shifts_labels(model: nn.Module, named: dict[str, Any], labels: Tensor) -> bool:
    """Whether a Hugging Face model moves labels by one position before it compares them.

    Most causal language models do, some of that name do not (those of BART's family), nor do token
    classifiers and masked language models. So the model is asked: of one example, a single position
    is labelled, and the gradient of the model's own loss in its logits tells which of them the
    label belongs to.

    Args:
        model: The model, or one that holds a Hugging Face model (PEFT, a module of the user's).
        named: A batch's inputs by name, without the labels.
        labels: Its labels, integers `[B, T]`.

    Returns:
        False for models that take no `labels`, as those that are not of Hugging Face.

    Raises:
        ValueError: If the loss reads other positions.
    """
    asked = _takes_labels(model)
    if asked is None:
        return False
    twin, last = shadow(asked), labels.shape[1] - 1
    weights = [p.requires_grad_() for p in twin.parameters() if p.is_floating_point()]
    known = inspect.signature(asked.forward).parameters
    some = {name: value for name, value in named.items() if name in known}
    one: Any = take(move(some, weights[0].device, None), slice(0, 1))
    marked = torch.full_like(labels[:1], IGNORED, device=weights[0].device)
    marked[0, last] = 0
    with torch.enable_grad():
        outputs = twin(**one, labels=marked)
    is_tuple = isinstance(outputs, tuple)
    loss, logits = outputs[:2] if is_tuple else (outputs.loss, outputs.logits)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    read = gradient[0].flatten(1).abs().amax(1).nonzero().flatten().tolist()
    if read not in ([last], [last - 1]):
        raise ValueError(
            f"{type(asked).__name__} takes labels, and of the label of position {last} its loss "
            f"reads the logits of {read}. Say with batch=, a function from a batch to (inputs, "
            "targets), which output a label belongs to: the target of a position at that position."
        )
    return read == [last - 1]


def _takes_labels(model: nn.Module) -> nn.Module | None:
    """The outermost model of Hugging Face's that computes a loss."""
    for module in model.modules():
        is_one = any(
            kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
            for kind in type(module).__mro__
        )
        if is_one and "labels" in inspect.signature(module.forward).parameters:
            return module
    return None
