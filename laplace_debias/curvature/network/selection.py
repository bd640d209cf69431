"""Selection of the Bayesian parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.quantised import (
    can_require_grad,
    check_can_be_bayesian,
    is_never_copied,
)
from laplace_debias.curvature.network.shared_copy import shared_copy

LAST_LAYER = "last_layer"
# The number of examples that are run if one example does not reach all layers.
_NUM_EXAMPLES = 16
_REMEDY = (
    'Use `params="all"`, or pass the names of the parameters, `params=[...]` (see '
    "model.named_parameters())."
)


def last_layer_parameters(model: nn.Module, example: Inputs | None) -> list[str]:
    """Return the names of the trainable parameters of the layer that computes the outputs.

    The output of every layer is detached from its inputs, so the layer on which the network's
    outputs still depend is the last layer. Operations without parameters (views, a softmax, a
    temperature, pooling) do not count. Normalisations and single numbers such as a learned
    temperature do not count either, because they only rescale the output of the last layer.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f'`params="{LAST_LAYER}"` selects no parameter, because the model has no trainable '
            "parameters. Call requires_grad_(True) on the last layer."
        )
    if example is None:
        raise ValueError(
            f'`params="{LAST_LAYER}"` selects the layer that computes the outputs. '
            f"For a {type(model).__name__}, finding this layer requires running the "
            "model on an example, but no example is available here. Pass the names "
            "of the layer's parameters, `params=[...]`."
        )
    layers, parameters = _sources(model, example)
    if len(layers) == 1 and not parameters:
        return _trainable(model, layers[0])
    titles = [f"{path} ({type(_owner(model, path)).__name__})" for path in layers]
    titles += [f"the parameter {n}, used outside of a layer" for n in parameters]
    inside = tuple(f"{path}." for path in layers)
    names = [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and (n in parameters or n.startswith(inside))
    ]
    chosen = names or "[...]"
    raise ValueError(
        f'`params="{LAST_LAYER}"` needs a model with exactly one last layer, followed by '
        "differentiable operations only, but the model has "
        f'{" and ".join(titles) or "no such layer"}. Pass `params="all"`, or name the parameters: '
        f"`params={chosen}`."
    )


@torch.inference_mode(False)
def _sources(model: nn.Module, inputs: Inputs) -> tuple[list[str], list[str]]:
    """Find the layers that compute the outputs, and the parameters used outside a layer.

    The output of each layer is replaced by a new leaf of the graph. The outputs of the network then
    have gradients only at the leaves and parameters that no later layer follows.
    """
    network = shared_copy(model)
    for module in list(network.modules()):
        layer_rule(module).prepare(module)
    layers = dict(_layers(network))
    leaves: list[tuple[str, Tensor]] = []
    for path, layer in layers.items():
        layer.register_forward_hook(_cutter(leaves, path), prepend=True)
    parameters = _parameters_that_count(network)
    try:
        with torch.enable_grad():
            outputs = call(network, take(inputs, slice(0, 1)))
            called_layers = {path for path, _ in leaves}
            if len(called_layers) < len(layers):
                # Another example may take a different path, as in a mixture of experts.
                leaves.clear()
                outputs = call(network, take(inputs, slice(0, _NUM_EXAMPLES)))
    except RuntimeError as error:
        # The model differentiates through its layers, which are detached here.
        if "not have been used in the graph" not in str(error):
            raise
        raise ValueError(
            f'`params="{LAST_LAYER}"` does not support this model, because its forward pass '
            "differentiates through its layers (torch.autograd.grad), and the search for the last "
            f"layer detaches the layers from each other. {_REMEDY}"
        ) from error
    if not outputs.requires_grad:
        return [], []
    names, tensors = zip(*leaves, *parameters.items(), strict=True)
    ones = torch.ones_like(outputs)
    gradients = torch.autograd.grad(outputs, tensors, ones, allow_unused=True)
    # A layer that is called several times has several leaves.
    sources = dict.fromkeys(
        name for name, gradient in zip(names, gradients, strict=True) if gradient is not None
    )
    source_layers = [name for name in sources if name in layers]
    source_parameters = [name for name in sources if name in parameters]
    return source_layers, source_parameters


def _parameters_that_count(network: nn.Module) -> dict[str, Tensor]:
    """Make parameters require gradients, except single numbers and those that only rescale."""
    rescaling: set[int] = set()
    for module in network.modules():
        if _only_rescales(module):
            rescaling.update(id(parameter) for parameter in module.parameters())
    parameters: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        counts = parameter.numel() > 1 and id(parameter) not in rescaling
        if counts and can_require_grad(parameter):
            parameters[name] = parameter.requires_grad_()
    return parameters


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that directly hold parameters, and reparametrised modules as a whole."""
    reparametrised: list[str] = []
    for path, module in network.named_modules():
        if any(path.startswith(prefix) for prefix in reparametrised):
            continue
        if is_parametrized(module):
            reparametrised.append(f"{path}." if path else "")
        elif len(list(module.parameters(recurse=False))) != len(list(module.parameters())):
            continue
        if any(True for _ in module.parameters()) and not _only_rescales(module):
            yield path, module


def _only_rescales(module: nn.Module) -> bool:
    """Whether a module only rescales its input, as do normalisations and single-number scales."""
    rule = layer_rule(module)
    if rule.only_rescales:
        return True
    sizes = [parameter.numel() for parameter in module.parameters()]
    return bool(sizes) and max(sizes) == 1 and rule.is_generic


def _cutter(leaves: list[tuple[str, Tensor]], path: str) -> Any:
    """Make a forward hook that detaches a layer's output, and adds the new leaf to `leaves`."""

    def cut(value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.is_inference():
            return value
        leaf = value.detach().requires_grad_()
        leaves.append((path, leaf))
        # The forward pass continues with a copy, which it may overwrite.
        return leaf.clone()

    return lambda _, __, output: tree_map_only(Tensor, cut, output)


def _trainable(model: nn.Module, path: str) -> list[str]:
    """Return the names of a layer's trainable parameters; no other layer may share them."""
    layer = _owner(model, path)
    title = f"{path or 'model'} ({type(layer).__name__})"
    parameter_ids = {id(parameter) for parameter in layer.parameters()}
    sharing = [
        f"{module_path}.{key}".lstrip(".")
        for module_path, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if id(parameter) in parameter_ids and not any(module is inner for inner in layer.modules())
    ]
    if sharing:
        raise ValueError(
            f'`params="{LAST_LAYER}"` is not available, because the outputs come from {title}, '
            f"whose parameters are shared with {sharing}. {_REMEDY}"
        )
    names = [n for n, p in model.named_parameters() if id(p) in parameter_ids and p.requires_grad]
    if not names:
        raise ValueError(
            f'`params="{LAST_LAYER}"` is not available, because the outputs come from {title}, '
            f"which is frozen. Unfreeze it with requires_grad_(True). {_REMEDY}"
        )
    return names


def _owner(model: nn.Module, path: str) -> nn.Module:
    """Return the user's module at a path.

    For a layer that a rule added, such as a projection of attention, return the module to which it
    was added.
    """
    parent, _, key = path.rpartition(".")
    above = model.get_submodule(parent)
    is_made = key in layer_rule(above).made_layers and key not in above._modules
    return above if is_made else model.get_submodule(path)


SUPPORTED = "supported"
ParameterSelection = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


def select_parameters(
    model: nn.Module, selection: ParameterSelection, example: Inputs | None = None
) -> list[str]:
    """Return the names of the Bayesian parameters, in the model's order.

    `"weights"` selects all parameters except biases. `"supported"` has the same result as `"all"`,
    because the supported layers are not known here. Frozen parameters are never Bayesian.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"The model ({type(model).__name__}) has no trainable parameters. Call "
            "requires_grad_(True) on it, or on the layers that should be Bayesian."
        )
    if isinstance(selection, str):
        names = _names_of_kind(model, selection, list(trainable), example)
    elif isinstance(selection, Sequence) and all(isinstance(name, str) for name in selection):
        names = _checked_names(selection, list(trainable))
    elif callable(selection) and not isinstance(selection, nn.Module):
        names = [name for name, parameter in trainable.items() if selection(name, parameter)]
    else:
        raise _wrong_selection(selection, trainable)
    if not names:
        raise ValueError(
            f"`params={selection!r}` selects no parameter. Select some of the trainable "
            f"parameters, {list(trainable)}."
        )
    return names


def _names_of_kind(
    model: nn.Module, kind: str, trainable: list[str], example: Inputs | None
) -> list[str]:
    """Return the names of the parameters that a string selects."""
    if kind == LAST_LAYER:
        return last_layer_parameters(model, example)
    if kind == "weights":
        return [name for name in trainable if name.rpartition(".")[2] != "bias"]
    if kind in ("all", SUPPORTED):
        return trainable
    raise ValueError(
        f"Unknown params={kind!r}. Use 'all', 'weights', 'supported', 'last_layer', a "
        "list of parameter names, or a predicate (name, parameter) -> bool."
    )


def _checked_names(names: Sequence[str], trainable: list[str]) -> list[str]:
    """Return names in the model's order, and require that each is a trainable parameter."""
    selected = set(names)
    unknown = sorted(selected - set(trainable))
    if unknown:
        raise ValueError(
            f"`params` contains the names {unknown}, but the model does not have these "
            f"parameters, or they are frozen. Use these names: {trainable}."
        )
    return [name for name in trainable if name in selected]


def _wrong_selection(selection: object, trainable: Mapping[str, nn.Parameter]) -> TypeError:
    """Return the error for a selection of a wrong type.

    The message shows only the type, because the selection may contain every weight.
    """
    expected = "`params` must be a string, a sequence of names or a predicate"
    if isinstance(selection, nn.Module):
        parameter_ids = {id(parameter) for parameter in selection.parameters()}
        own_names = [name for name, p in trainable.items() if id(p) in parameter_ids]
        return TypeError(
            f"{expected}, got a module ({type(selection).__name__}). Pass the names of its "
            f"parameters in the model, such as `params={own_names or list(trainable)}`."
        )
    first = selection[0] if isinstance(selection, Sequence) and selection else None
    if isinstance(selection, DataLoader) or isinstance(first, tuple | list):
        return TypeError(
            f"{expected}, got data ({type(selection).__name__}). The data come before the "
            "parameters: pass (model, loss, data, params)."
        )
    type_name = type(selection).__name__
    if first is not None:
        type_name += f" of {type(first).__name__}"
    return TypeError(f"{expected}, got a {type_name}. Pass names, such as {list(trainable)}.")


def leaving_out(names: Sequence[str]) -> str:
    """Return the code of the argument that leaves parameters out."""
    return f"params=lambda name, parameter: name not in {list(names)}"


def check_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Require real Bayesian parameters of one device and dtype that do not share memory."""
    _check_own_memory(model, names)
    kinds = set()
    for name in names:
        parameter = model.get_parameter(name)
        check_can_be_bayesian(name, parameter)
        if parameter.is_complex():
            raise ValueError(
                f"{name} is complex ({parameter.dtype}), but curvature is only available for "
                "real parameters. Store its real and imaginary parts as one real parameter "
                "(torch.view_as_real), and compute the complex tensor in the forward pass. "
                "Alternatively, freeze all complex parameters with requires_grad_(False)."
            )
        kinds.add((wide(parameter.dtype), parameter.device))
    if len(kinds) > 1:
        listed = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise ValueError(
            f"The Bayesian parameters must have the same dtype and device, got {listed}. Convert "
            "the model, or select parameters with `params=`."
        )
    dtype, _ = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"The Bayesian parameters are {dtype}, and curvature cannot be computed in this "
            "dtype. Convert them with `.float()`."
        )


def _check_own_memory(model: nn.Module, names: Sequence[str]) -> None:
    """Require that no other parameter has the same memory as a Bayesian parameter.

    Training changes such parameters together, but derivatives treat them as independent. A single
    parameter object that several modules share is permitted.
    """
    owners: dict[tuple[torch.device, int, int], str] = {}
    bayesian = {id(model.get_parameter(name)) for name in names}
    # The Bayesian parameters come first, so that all other parameters are compared with them.
    parameters = sorted(model.named_parameters(), key=lambda item: id(item[1]) not in bayesian)
    for name, parameter in parameters:
        if is_never_copied(parameter) or parameter.numel() == 0:
            continue
        address = parameter.data_ptr()
        if not address:
            continue  # Tensors of some subclasses have no memory of their own.
        owner = owners.setdefault((parameter.device, address, parameter.numel()), name)
        if owner != name and id(model.get_parameter(owner)) in bayesian:
            raise NotImplementedError(
                f"{owner} and {name} are two parameters in the same memory, so they always have "
                "the same values, but derivatives treat them as independent parameters. Make "
                "them one parameter (`model.head.weight = model.embedding.weight`), or give one "
                "of them its own memory (`parameter.data = parameter.data.clone()`). For "
                "adapters of PEFT, pass ensure_weight_tying=False to their configuration."
            )
