"""The logits among what a model returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laplace_debias.curvature.network.precision import wide


def logits_of(outputs: Any) -> Tensor:
    """The tensor of outputs among what a model returns, at least in single precision.

    That is the tensor itself; `.logits` of an object; the entry `"logits"` of a mapping, or its
    only tensor; the first entry of a tuple or list, or the second where the first is a loss, a
    single number (Hugging Face with `return_dict=False`).

    Args:
        outputs: What the model returned.

    Raises:
        TypeError: If there is no such tensor.
    """
    found = _found(outputs)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"The model must return a tensor or have `.logits`, got {_description(outputs)}: wrap "
            "it so that it returns a tensor, an object with `.logits`, a dict with the entry "
            "'logits', or a tuple that begins with the logits."
        )
    return found.to(wide(found.dtype))


def _found(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if hasattr(outputs, "logits"):
        return outputs.logits
    if isinstance(outputs, Mapping):
        if "logits" in outputs:
            return outputs["logits"]
        tensors = [value for value in outputs.values() if isinstance(value, Tensor)]
        return tensors[0] if len(tensors) == 1 else None
    if isinstance(outputs, (tuple, list)) and outputs:
        first = outputs[0]
        is_loss = isinstance(first, Tensor) and first.ndim == 0 and len(outputs) > 1
        return outputs[1] if is_loss else first
    return None


def _description(outputs: Any) -> str:
    """What came, by its kind and its entries' kinds: they may hold millions of numbers."""
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        return f"a {kind} with the entries {[str(key) for key in outputs]}"
    if hasattr(outputs, "logits"):
        return f"a {kind} whose `.logits` is of type {type(outputs.logits).__name__}"
    if isinstance(outputs, (tuple, list)):
        return f"a {kind} of [{', '.join(type(part).__name__ for part in outputs)}]"
    return kind
