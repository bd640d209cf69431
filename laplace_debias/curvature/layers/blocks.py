"""The curvature blocks of the Bayesian parameters, and the order of their entries."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import GENERIC, Block, layer_rule

SHARINGS = ("expand", "reduce")

_PARAMETRIZATIONS = "parametrizations"

# How positions share a weight: one way for all layers, or one for each layer's path.
Sharing = str | Mapping[str, str]


def curvature_blocks(
    model: nn.Module,
    names: Sequence[str],
    joint: bool = False,
    sharing: Sharing = "expand",
    calls: Mapping[str, Sequence[str]] | None = None,
) -> list[Block]:
    """Make the blocks of the named parameters, in the order of the names.

    A parameter that does not belong to a supported layer, or that several modules share, has an
    exact block, which is dense if it is small and diagonal otherwise. `joint` puts a layer's weight
    and bias into one block, `[W, b]`. `sharing` is for weights that several positions share
    (Eschenhagen et al., 2023): one value for all layers, or a mapping from layers' paths (the other
    layers use `"expand"`). `calls` maps parameters that are not measured at their layers to the
    paths of the modules at whose calls they are measured, or to no paths if they are measured at
    operations; see `resolve`.
    """
    modules = dict(model.named_modules())
    _check_sharing(sharing, modules)
    owners = owners_of_parameters(model)
    parameters = dict(model.named_parameters())
    # The modules at whose calls each parameter with an exact block is measured.
    readers = _unsupported_parameters(parameters, names, modules, owners)
    readers |= {name: tuple(paths) for name, paths in (calls or {}).items()}
    blocks: list[Block] = []
    joint_biases: set[str] = set()
    for name in names:
        if name in joint_biases:
            continue
        if name in readers:
            size = parameters[name].numel()
            first_path = owners[id(parameters[name])][0]
            blocks.append(GENERIC.vector_block(name, first_path, size, GENERIC.kind, readers[name]))
            continue
        path, _, key = name.rpartition(".")
        layer = modules[path]
        rule = layer_rule(layer)
        bias = f"{path}.{rule.bias_name}".lstrip(".")
        has_measured_bias = bias in names and bias not in readers
        is_joint = joint and rule.can_be_joint and key == rule.weight_name and has_measured_bias
        if is_joint:
            joint_biases.add(bias)
        layer_sharing = sharing if isinstance(sharing, str) else sharing.get(path, "expand")
        blocks += rule.blocks(layer, path, key, layer_sharing, is_joint)
    return blocks


def _unsupported_parameters(
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str],
    modules: Mapping[str, nn.Module],
    owners: Mapping[int, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Find the named parameters that no layer's rule supports, with the paths of their modules."""
    unsupported: dict[str, tuple[str, ...]] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        layer_paths = owners[id(parameters[name])]
        layer = modules[path]
        # A subclass may compute the same as the layer, which `resolve` checks.
        if len(layer_paths) > 1 or not layer_rule(layer).owns(layer, key):
            unsupported[name] = layer_paths
    return unsupported


def _check_sharing(sharing: Sharing, modules: Mapping[str, nn.Module]) -> None:
    """Require known ways of sharing, and paths of layers that the model has."""
    values = [sharing] if isinstance(sharing, str) else sharing.values()
    for value in values:
        if value not in SHARINGS:
            raise ValueError(f"Unknown sharing={value!r}. Use one of {', '.join(SHARINGS)}.")
    missing = [] if isinstance(sharing, str) else sorted(sharing.keys() - modules.keys())
    if missing:
        layers = [path for path, layer in modules.items() if not layer_rule(layer).is_generic]
        raise ValueError(
            f"`sharing` contains the names {missing}, but the model does not have these layers. "
            f"Use these names: {layers}."
        )


def parameter_order(
    model: nn.Module, names: Sequence[str], blocks: Sequence[Block]
) -> Int[Tensor, " parameters"] | None:
    """Return the positions of the blocks' entries among the flattened parameters.

    The entries are ordered block by block, each block `[*groups, d_out, d_in]` row-major. The
    result is None if the two orders are the same.
    """
    parameters = list(map(model.get_parameter, names))
    in_order = [name for block in blocks for name in block.parameters] == list(names)
    if in_order and all(_keeps_order(model, block) for block in blocks):
        return None
    everything = torch.arange(sum(map(Tensor.numel, parameters)))
    positions = {}
    start = 0
    for name, parameter in zip(names, parameters, strict=True):
        positions[name] = everything[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    # `order` is created only if the entries of some block are not a view of `everything`, because
    # it takes more memory than the parameters of a large model.
    order = None
    start = 0
    for block in blocks:
        entries = entries_of(model, block, positions).flatten()
        span = slice(start, start + len(entries))
        if order is None and entries.data_ptr() != everything[span].data_ptr():
            order = everything.clone()
        if order is not None:
            order[span] = entries
        start = span.stop
    if order is not None:
        return order[:start]
    if start == len(everything):
        return None
    return everything[:start]


def _keeps_order(model: nn.Module, block: Block) -> bool:
    """Whether the entries of a block are the entries of one parameter in the same order."""
    if len(block.parameters) > 1:
        return False
    (name,) = block.parameters
    # The tensor has no values, so that large parameters take no memory here.
    values = torch.empty(model.get_parameter(name).shape, device="meta")
    entries = entries_of(model, block, {name: values})
    is_view = entries.untyped_storage()._cdata == values.untyped_storage()._cdata
    is_whole = entries.numel() == values.numel() and entries.storage_offset() == 0
    return bool(is_view and is_whole and entries.is_contiguous())


def entries_of(
    model: nn.Module, block: Block, values: Mapping[str, Tensor]
) -> Shaped[Tensor, "*groups d_out d_in"]:
    """Arrange tensors that have the shapes of a block's parameters as the block's entries."""
    path, _, _ = block.parameters[0].rpartition(".")
    layer = model.get_submodule(path)
    return block.rule.entries(layer, block, [values[name] for name in block.parameters])


def owners_of_parameters(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the paths of the callable modules that hold each parameter, by its `id`.

    A parameter in a container (`nn.ParameterList`, `nn.ModuleList`, …) or in a parametrisation is
    assigned to the nearest module around it that has a forward pass. A module that is in the model
    twice counts once.
    """
    owners: dict[int, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holder = _nearest_callable(model, path)
            paths = owners.setdefault(id(parameter), ())
            if holder not in paths:
                owners[id(parameter)] = (*paths, holder)
    return owners


def enclosing_module(model: nn.Module, paths: Sequence[str]) -> str | None:
    """Return the path of the innermost module that contains all of these paths, or None."""
    if len(paths) > 1:
        # The names that all paths begin with.
        names_by_level = zip(*(path.split(".") for path in paths), strict=False)
        shared = takewhile(lambda names: len(set(names)) == 1, names_by_level)
        return _nearest_callable(model, ".".join(names[0] for names in shared))
    if not paths[0]:
        return None
    return _nearest_callable(model, paths[0].rpartition(".")[0])


def _nearest_callable(model: nn.Module, path: str) -> str:
    """Return the path itself, or the path of the nearest module around it with a forward pass."""
    outer_path, is_inside, _ = f".{path}.".partition(f".{_PARAMETRIZATIONS}.")
    if is_inside:
        # A parametrisation is part of the module whose parameter it computes.
        path = outer_path.strip(".")
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path
