"""Inputs and targets that Hugging Face and PEFT models derive from labels."""

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.data.forward_arguments import ForwardArguments
from laplace_debias.curvature.network.inputs import Inputs, move, take, tensors_of
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.quantised import can_require_grad
from laplace_debias.curvature.network.shared_copy import shared_copy

IGNORED = -100
"""The label of ignored positions, the same as in Hugging Face and in `F.cross_entropy`."""

_PRETRAINED = r"transformers\..*\.PreTrainedModel|peft\.peft_model\.PeftModel"


def with_decoder_inputs(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Add the decoder inputs that an encoder-decoder model derives from the labels.

    They come from the model itself, or from a model inside a wrapper that passes them on. The other
    entries do not change.
    """
    labels = named.get("labels")
    has_decoder_inputs = not named.keys().isdisjoint(("decoder_input_ids", "decoder_inputs_embeds"))
    if not isinstance(labels, Tensor) or has_decoder_inputs:
        return named
    if not ForwardArguments.of(model).takes("decoder_input_ids"):
        return named
    for module in model.modules():
        decoder_inputs = _decoder_inputs(module, labels)
        if decoder_inputs is not None:
            return {**named, "decoder_input_ids": decoder_inputs}
    return named


def _decoder_inputs(module: nn.Module, labels: Tensor) -> Tensor | None:
    """Return the inputs that a Hugging Face model passes to its decoder, or None for other modules.

    Some models (Whisper, M2M100, Blenderbot) have no method for this purpose, but call a function
    in the file that defines them.
    """
    if hasattr(type(module), "prepare_decoder_input_ids_from_labels"):
        prepare: Any = module.prepare_decoder_input_ids_from_labels
        return prepare(labels=labels)
    config = getattr(module, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    if start is None or padding is None:
        return None
    if "labels" not in inspect.signature(module.forward).parameters:
        return None
    can_generate: Any = getattr(module, "can_generate", None)
    if can_generate is None or not can_generate():
        return None  # The labels of a classifier are not tokens.
    for kind in type(module).__mro__:
        shift = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
        if shift is not None and len(inspect.signature(shift).parameters) == 3:
            return shift(labels, padding, start)
    return None


def are_token_labels(targets: Any, inputs: Inputs) -> bool:
    """Return whether targets are labels of tokens, `[B, T]`, with the shape of some input."""
    if not isinstance(targets, Tensor) or targets.ndim != 2:
        return False
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return False
    return any(x.shape[:2] == targets.shape for x in tensors_of(inputs))


@dataclass(frozen=True)
class LabelPositions:
    """The positions of the outputs that predict the labels `[B, T]` of tokens.

    Attributes:
        num_virtual: The number of positions for a prompt that PEFT inserts before the tokens.
        is_shifted: Whether a label is predicted by the output one position before it.
    """

    num_virtual: int = 0
    is_shifted: bool = False

    def targets(self, labels: Tensor) -> Tensor:
        """Move labels to the outputs that predict them."""
        if self.is_shifted and self.num_virtual == 0:
            return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # If the labels are shifted, the output at the last virtual token predicts the first label.
        num_after = int(self.is_shifted)
        return F.pad(labels, (self.num_virtual - num_after, num_after), value=IGNORED)


@torch.inference_mode(False)
def label_positions(model: nn.Module, named: dict[str, Any], labels: Tensor) -> LabelPositions:
    """Find the outputs that a Hugging Face model's own loss compares with the labels `[B, T]`.

    Most causal language models shift labels by one position, but some models of that name (the BART
    family), token classifiers and masked language models do not, and PEFT's prompts add positions.
    Therefore, a single position of one example is labelled, and the gradient of the model's own
    loss with respect to the logits shows which logits the loss compares with this label.
    """
    model_with_loss = _outermost_with_loss(model)
    if model_with_loss is None:
        return LabelPositions()
    gradient = _gradient_of_last_label(model_with_loss, named, labels)
    positions = gradient.flatten(1).abs().amax(1).nonzero().flatten().tolist()
    last = labels.shape[1] - 1
    num_virtual = max(0, len(gradient) - labels.shape[1])
    if positions not in ([last + num_virtual], [last + num_virtual - 1]):
        raise ValueError(
            f"The labels of {type(model_with_loss).__name__} cannot be matched with its outputs, "
            f"because its loss compares the label at position {last} with the logits of "
            f"{positions}. Pass `batch=`, a function that converts a batch to (inputs, targets), "
            "and shift the targets in it, so that each target has the position of the output that "
            "predicts it."
        )
    return LabelPositions(num_virtual, is_shifted=positions != [last + num_virtual])


def _gradient_of_last_label(
    model: nn.Module, named: dict[str, Any], labels: Tensor
) -> Float[Tensor, "positions *classes"]:
    """Compute the gradient of a model's own loss with respect to the first example's logits.

    Only the last position of the example has a label.
    """
    twin = shared_copy(model)
    weights = [
        parameter.requires_grad_() for parameter in twin.parameters() if can_require_grad(parameter)
    ]
    parameters = inspect.signature(model.forward).parameters
    # Only PEFT's models receive all entries of the batch, because they pass on all arguments. The
    # models of transformers accept arbitrary arguments as well, but entries that are not in their
    # signature may be meant for a user's wrapper.
    takes_any = any(name.startswith("peft.") for name in _class_names(model))
    inputs = {name: value for name, value in named.items() if takes_any or name in parameters}
    example: Any = take(move(inputs, weights[0].device, None), slice(0, 1))
    last_label = torch.full_like(labels[:1], IGNORED, device=weights[0].device)
    last_label[0, -1] = 0
    with torch.enable_grad():
        outputs = twin(**example, labels=last_label)
    if isinstance(outputs, tuple):
        loss, logits = outputs[:2]
    else:
        loss = outputs.loss
        logits = outputs.logits
    # Outputs that are NaN are rejected, because their gradient is NaN even if the loss ignores
    # them.
    check_outputs(logits)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return gradient[0]


def _outermost_with_loss(model: nn.Module) -> nn.Module | None:
    """Find the outermost Hugging Face model that computes a loss."""
    for module in model.modules():
        is_pretrained = any(re.fullmatch(_PRETRAINED, name) for name in _class_names(module))
        if is_pretrained and "labels" in inspect.signature(module.forward).parameters:
            return module
    return None


def _class_names(module: nn.Module) -> list[str]:
    """Return the full names of a module's classes."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
