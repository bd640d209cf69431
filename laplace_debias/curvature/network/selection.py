"""Selects the Bayesian parameters."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.last_layer import is_last_layer, last_layer_parameters
from laplace_debias.curvature.network.precision import wide

SUPPORTED = "supported"
ParameterSelection = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


def select_parameters(
    model: nn.Module, selection: ParameterSelection, example: Inputs | None = None
) -> list[str]:
    """Names of the Bayesian parameters, in the model's order.

    Args:
        model: The model.
        selection: `"all"`; `"weights"` (no biases); `"supported"` (here as `"all"`: which layers
            are known is not known here); `"last_layer"` (the layer that the outputs
            come from, see `last_layer_parameters`); names; or a predicate
            `(name, parameter) -> bool`. Frozen parameters are never Bayesian.
        example: Inputs on the model's device, for `"last_layer"`, which is found by running one of
            them; an `nn.Sequential` of torch's layers needs none.

    Raises:
        ValueError: For an unknown name, or if nothing is selected; as `last_layer_parameters`.
        TypeError: If the selection is not one of these.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"The model ({type(model).__name__}) is frozen: it has no trainable parameter "
            "(requires_grad). Call requires_grad_(True) on it, or on the layers that shall be "
            "Bayesian."
        )
    if selection in ("all", SUPPORTED):
        chosen = set(trainable)
    elif selection == "weights":
        chosen = {name for name in trainable if name.rpartition(".")[2] != "bias"}
    elif is_last_layer(selection):
        chosen = set(last_layer_parameters(model, example))
    elif isinstance(selection, str):
        raise ValueError(
            f"Unknown params={selection!r}: use 'all', 'weights', 'supported', 'last_layer', a "
            "list of parameter names, or a predicate (name, parameter) -> bool."
        )
    elif callable(selection):
        chosen = {name for name, parameter in trainable.items() if selection(name, parameter)}
    elif isinstance(selection, Sequence) and all(isinstance(name, str) for name in selection):
        unknown = [name for name in selection if name not in trainable]
        if unknown:
            raise ValueError(
                f"params names {unknown}, which the model does not have or which are frozen "
                f"(requires_grad=False). It has {list(trainable)}."
            )
        chosen = set(selection)
    else:
        raise TypeError(
            f"params must be a string, a sequence of names or a predicate, got {_kind(selection)}: "
            f"give names, of {list(trainable)}."
        )
    names = [name for name in trainable if name in chosen]
    if not names:
        raise ValueError(
            f"params={selection!r} selects no parameter; trainable ones are {list(trainable)}."
        )
    return names


def is_general(selection: object) -> bool:
    """Whether a selection is a word for parameters of a kind, of which none is meant by name."""
    return isinstance(selection, str) and not is_last_layer(selection)


def _kind(selection: object) -> str:
    # Not the thing itself: it may hold, and would print, every weight.
    kind = type(selection).__name__
    if isinstance(selection, Sequence) and len(selection):
        return f"a {kind} of {type(selection[0]).__name__}"
    return f"a {kind}"


def leaving_out(names: Sequence[str], among: Sequence[str]) -> str:
    """How to leave parameters out, ready to be typed; where all of a module are, by its prefix.

    Args:
        names: The parameters to leave out.
        among: All of them.
    """
    others = [name for name in among if name not in set(names)]
    prefixes: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        candidates = [".".join(parts[:end]) + "." for end in range(1, len(parts))] + [name]
        free = (p for p in candidates if not any(other.startswith(p) for other in others))
        prefix = next(free, None)
        if prefix is None:
            return f"params=lambda name, parameter: name not in {list(names)}"
        prefixes[prefix] = None
    return f"params=lambda name, parameter: not name.startswith({tuple(prefixes)})"


def check_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Require real Bayesian parameters of one device, and of one dtype (`wide` of what they are).

    Raises:
        ValueError: Otherwise.
    """
    unreal = [name for name in names if model.get_parameter(name).is_complex()]
    if unreal:
        raise ValueError(
            f"{unreal[0]} is complex ({model.get_parameter(unreal[0]).dtype}), and curvature is "
            "that of real parameters: hold real and imaginary part, torch.view_as_real, as a "
            "parameter, and make the complex one of it in the forward pass; or freeze all complex "
            "parameters with requires_grad_(False)."
        )
    kinds = {(wide(p.dtype), p.device) for p in map(model.get_parameter, names)}
    if len(kinds) > 1:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise ValueError(f"The Bayesian parameters must share one dtype and device, found {found}.")
    dtype, _ = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"The Bayesian parameters are {dtype}, in which curvature cannot be computed: convert "
            "them with `.float()`."
        )
