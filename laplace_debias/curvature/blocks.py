"""Which parameters are Bayesian, and the curvature blocks that they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
LAYERS = (nn.Linear, *CONVOLUTIONS, *NORMS)

ParameterSelection = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Block:
    """One curvature block: a layer's weight matrix (of one group of channels), bias or scale.

    Attributes:
        name: The parameter's name, with `[group]` behind it where there are several groups.
        parameter: The parameter's name in the model.
        layer: The layer's path in the model.
        role: `"weight"`: a matrix, whose block is Kronecker-factored; `"bias"`, or `"scale"` (the
            weight of a normalisation): a vector, whose block is exact.
        shape: `(d_out, d_in)`; a vector has `d_in = 1`.
        group: Which group of a grouped convolution, 0 otherwise.
    """

    name: str
    parameter: str
    layer: str
    role: str
    shape: tuple[int, int]
    group: int = 0

    @property
    def is_vector(self) -> bool:
        """Whether the block is that of a bias or a scale."""
        return self.role != "weight"

    @property
    def size(self) -> int:
        """The number of parameters in the block."""
        return self.shape[0] * self.shape[1]


def select_parameters(model: nn.Module, selection: ParameterSelection) -> list[str]:
    """Names of the Bayesian parameters, in the model's order.

    Args:
        model: The model.
        selection: `"all"`; `"weights"` (no biases); `"last_layer"` (the last layer with
            parameters in the order of registration); names; or a predicate
            `(name, parameter) -> bool`. Frozen parameters are never Bayesian.

    Raises:
        ValueError: For an unknown name, or if nothing is selected.
        TypeError: If the selection is none of these.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if selection == "all":
        chosen = set(trainable)
    elif selection == "weights":
        chosen = {name for name in trainable if name.rpartition(".")[2] != "bias"}
    elif selection == "last_layer":
        paths = [name.rpartition(".")[0] for name in trainable]
        chosen = {name for name in trainable if name.rpartition(".")[0] == paths[-1]}
    elif isinstance(selection, str):
        raise ValueError(
            f"Unknown params={selection!r}: use 'all', 'weights', 'last_layer', a list of "
            "parameter names, or a predicate (name, parameter) -> bool."
        )
    elif callable(selection):
        chosen = {name for name, parameter in trainable.items() if selection(name, parameter)}
    elif isinstance(selection, Sequence):
        unknown = [name for name in selection if name not in trainable]
        if unknown:
            raise ValueError(
                f"params names {unknown}, which the model does not have or which are frozen "
                f"(requires_grad=False). It has {list(trainable)}."
            )
        chosen = set(selection)
    else:
        raise TypeError(
            f"params must be a string, a sequence of names or a predicate, got {selection!r}."
        )
    names = [name for name in trainable if name in chosen]
    if not names:
        raise ValueError(
            f"params={selection!r} selects no parameter; trainable ones are {list(trainable)}."
        )
    return names


def check_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Require Bayesian parameters of one device and one dtype that is wide enough.

    Raises:
        ValueError: Otherwise.
    """
    kinds = {(p.dtype, p.device) for p in map(model.get_parameter, names)}
    if len(kinds) > 1:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise ValueError(f"The Bayesian parameters must share one dtype and device, found {found}.")
    dtype, _ = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"The Bayesian parameters are {dtype}, too narrow for curvature: convert them with "
            "`.float()`."
        )


def curvature_blocks(model: nn.Module, names: Sequence[str]) -> list[Block]:
    """The blocks of the named parameters, in the order of the names.

    Args:
        model: The model.
        names: Parameter names as `select_parameters` gives them.

    Raises:
        NotImplementedError: If a parameter belongs to a layer that has no Kronecker form here, or
            is shared by several modules; names path and parameters.
    """
    blocks: list[Block] = []
    _check_untied(model, names)
    for name in names:
        path, _, role = name.rpartition(".")
        layer = model.get_submodule(path)
        if not is_supported(layer) or role not in ("weight", "bias"):
            left_out = [n for n in names if n.rpartition(".")[0] == path]
            supported = ", ".join(kind.__name__ for kind in LAYERS)
            raise NotImplementedError(
                f"{path or 'model'} ({type(layer).__name__}) has no curvature here, which would "
                f"leave out {left_out}. Supported layers: {supported}. Leave these parameters out "
                "on purpose with params=lambda name, parameter: ..., or freeze them with "
                "requires_grad_(False)."
            )
        blocks += _blocks_of(name, path, role, layer)
    return blocks


def is_supported(layer: nn.Module) -> bool:
    """Whether a layer is one of `LAYERS` and computes what that layer computes.

    A subclass with a forward pass of its own (weight standardisation, adapters, ...) does not.
    """
    own = type(layer)
    return any(
        isinstance(layer, kind)
        and own.forward is kind.forward
        and getattr(own, "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        for kind in LAYERS
    )


def _blocks_of(name: str, path: str, role: str, layer: nn.Module) -> list[Block]:
    parameter = layer.get_parameter(role)
    if isinstance(layer, NORMS) and role == "weight":
        role = "scale"
    if role in ("bias", "scale"):
        return [Block(name, name, path, role, (parameter.numel(), 1))]
    groups = layer.groups if isinstance(layer, CONVOLUTIONS) else 1
    shape = (parameter.shape[0] // groups, parameter[0].numel())
    if groups == 1:
        return [Block(name, name, path, role, shape)]
    return [Block(f"{name}[{g}]", name, path, role, shape, g) for g in range(groups)]


def _check_untied(model: nn.Module, names: Sequence[str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in names:
        shared = owners[id(model.get_parameter(name))]
        if len(shared) > 1:
            raise NotImplementedError(
                f"{' and '.join(shared)} are one parameter. Curvature of tied weights is not "
                "supported: leave it out with params=lambda name, parameter: ..., or untie them."
            )
