"""Which output a language model's label belongs to: that of its own position, or the one before."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.inputs import Inputs, move, take, tensors_of
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.out_of_memory import is_out_of_memory

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


def shifts_labels(model: nn.Module, named: dict[str, object], labels: Tensor) -> bool:
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
        ValueError: If the model takes `labels` and it cannot be found out.
    """
    asked = _takes_labels(model)
    if asked is None:
        return False
    known = inspect.signature(asked.forward).parameters
    some = {name: value for name, value in named.items() if name in known}
    last = labels.shape[1] - 1
    try:
        read = _positions_read(asked, some, labels, last)
    # Whatever a forward pass raises.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            _unknown(asked, f"its forward pass with labels fails ({error})")
        ) from error
    if read not in ([last], [last - 1]):
        raise ValueError(
            _unknown(asked, f"of the label of position {last} its loss reads the logits of {read}")
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


@torch.inference_mode(False)
def _positions_read(
    model: nn.Module, named: dict[str, Any], labels: Tensor, last: int
) -> list[int]:
    """Positions whose logits the loss of a label of the last position depends on."""
    twin = shadow(model)
    weights = [p for p in twin.parameters() if p.is_floating_point()]
    for weight in weights:
        weight.requires_grad_()
    device = weights[0].device
    one: Any = take(move(named, device, None), slice(0, 1))
    marked = torch.full_like(labels[:1], IGNORED, device=device)
    marked[0, last] = 0
    with torch.enable_grad():
        outputs = twin(**one, labels=marked)
    loss, logits = (
        (outputs.loss, outputs.logits) if hasattr(outputs, "logits") else tuple(outputs[:2])
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return gradient[0].flatten(1).abs().amax(1).nonzero().flatten().tolist()


def _unknown(model: nn.Module, why: str) -> str:
    return (
        f"{type(model).__name__} takes labels, and it cannot be found out which of its outputs a "
        f"label belongs to: {why}. Say it with batch=, a function from a batch to (inputs, "
        "targets) with the target of a position at that position."
    )
