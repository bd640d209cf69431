"""The curvature blocks that the Bayesian parameters make, and where their entries lie."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from laplace_debias.curvature.network.layer_types import (
    CONVOLUTIONS,
    LAYERS,
    NORMS,
    PROJECTIONS,
    TRANSPOSED,
    is_attention,
    is_hugging_face_conv1d,
)

SHARINGS = ("expand", "reduce")
# The exact block of a parameter without layer is dense up to so many entries, and diagonal above.
_DENSE_UP_TO = 1024
WIDE = 8192
"""Of more outputs (or inputs) than this a layer's factor on that side is diagonal.

A dense factor of a vocabulary of 50,000 would be 10 GB in single precision.
"""

_PARAMETRIZATIONS = "parametrizations"

# How positions share a weight: one answer, or one for a layer's path.
Sharing = str | Mapping[str, str]


class Site(NamedTuple):
    """Where blocks are measured: at a layer, at a parameter, or at calls that are run once more.

    At a parameter the path is its name: operations multiply by it, or add it. At calls, `paths` are
    those of the modules whose calls read one parameter: they are run once more, example by example,
    to differentiate them.
    """

    paths: tuple[str, ...]
    is_call: bool = False

    def __str__(self) -> str:
        return " and ".join(path or "the model" for path in self.paths)


@dataclass(eq=False)
class Block:
    """One curvature block: a layer's weight matrix, bias or scale.

    A convolution's groups of channels share no parameter and no output, so the curvature of its
    weight is block-diagonal in itself, with one matrix for each group, all of one shape. They are
    one block here, and are computed all at once.

    Attributes:
        name: The parameter's name, with a number in brackets behind it for query, key and value of
            one projection; both names, with a `+` between them, where the block is a weight's and
            its bias's.
        parameters: The parameters' names in the model: one, or weight and bias.
        layer: The path of the layer that yields the block's inputs and output gradients.
        role: `"weight"`: a matrix, whose block is Kronecker-factored; `"table"`: an embedding's
            weight, whose input factor is diagonal; `"bias"`, or `"scale"` (the weight of a
            normalisation): a vector, whose block is exact; `"depthwise"`: the kernels of a
            convolution with one output channel a group, a vector for each group, whose matrices are
            exact; `"entries"`: any other parameter, as a vector, whose block is exact.
        shape: `(d_out, d_in)`, of one group; what is exact has `d_in = 1`.
        group: Which of query, key and value.
        sharing: `"expand"` or `"reduce"`, for a weight.
        num_groups: How many groups a convolution's weight has.
        calls: For `"entries"` the paths of the modules whose calls read the parameter; none where
            the forward pass multiplies by it, or adds it, entry by entry.
        rank: How many directions of a factor are kept; None for all.
        size: The number of parameters in the block.
        site: Where the block is measured.
        groups: The leading dimension of what there is for every group, `(g,)`; `()` for one group.
        is_exact: Whether the block is that of vectors, and exact, instead of Kronecker-factored.
        is_joint: Whether the bias is the weight matrix's last column.
        has_diagonal_G: Whether only G's diagonal is kept, as a vector: it is wide, or a large exact
            block.
        has_diagonal_A: Whether A is a vector: that of an embedding is diagonal, of a wide one its
            diagonal.
        factor_shapes: The shapes of G and A; that of A is `()` where the block is exact.
        most_rows: More rows of a streamed factor than this are compressed to half as many.
        is_streamed: Whether no matrix is made of G, and of A, which is much wider than `rank`.
    """

    name: str
    parameters: tuple[str, ...]
    layer: str
    role: str
    shape: tuple[int, int]
    group: int = 0
    sharing: str = "expand"
    num_groups: int = 1
    calls: tuple[str, ...] = ()
    rank: int | None = None

    size: int = field(init=False)
    site: Site = field(init=False)
    groups: tuple[int, ...] = field(init=False)
    is_exact: bool = field(init=False)
    is_joint: bool = field(init=False)
    has_diagonal_G: bool = field(init=False)
    has_diagonal_A: bool = field(init=False)
    factor_shapes: tuple[tuple[int, ...], tuple[int, ...]] = field(init=False)
    most_rows: int | None = field(init=False)
    is_streamed: tuple[bool, bool] = field(init=False)

    def __post_init__(self) -> None:
        d_out, d_in = self.shape
        self.size = self.num_groups * d_out * d_in
        self.groups = () if self.num_groups == 1 else (self.num_groups,)
        self.is_exact = self.role in ("bias", "scale", "depthwise", "entries")
        self.is_joint = len(self.parameters) == 2
        self.most_rows = None if self.rank is None else 4 * self.rank
        at = self.name if self.role == "entries" else self.layer
        self.site = Site(self.calls, True) if self.calls else Site((at,))
        wide = math.inf
        if self.most_rows is not None and not self.groups and self.role != "entries":
            wide = 2 * self.most_rows
        self.is_streamed = d_out >= wide, d_in >= wide and self.role != "table"
        self.has_diagonal_G = d_out > WIDE and not self.groups and not self.is_streamed[0]
        self.has_diagonal_A = d_in > WIDE and not self.groups and not self.is_streamed[1]
        if self.role == "entries":
            self.has_diagonal_G = self.size > _DENSE_UP_TO
        if self.role == "table":
            self.has_diagonal_A = True
        G = (d_out,) if self.has_diagonal_G else (*self.groups, d_out, d_out)
        A = (d_in,) if self.has_diagonal_A else (*self.groups, d_in, d_in)
        self.factor_shapes = G, () if self.is_exact else A


def curvature_blocks(
    model: nn.Module,
    names: Sequence[str],
    joint: bool = False,
    sharing: Sharing = "expand",
    calls: Mapping[str, Sequence[str]] | None = None,
) -> list[Block]:
    """The blocks of the named parameters, in the order of the names.

    A parameter that is none of a supported layer's, or shared by several modules, has an exact
    block: dense if it is small, diagonal if not. `joint` makes one block, `[W, b]`, of a layer's
    weight and bias. `sharing` is for weights that several positions share (Eschenhagen et al.,
    2023): one for all, or by the layers' paths (`"expand"` for the others). `calls` has the
    parameters that are measured at calls of modules, whatever layer they belong to, with the
    modules' paths, or at operations, with none; see `resolve`.
    """
    paths = dict(model.named_modules())
    default, of_layers = (sharing, {}) if isinstance(sharing, str) else ("expand", sharing)
    for value in (default, *of_layers.values()):
        if value not in SHARINGS:
            raise ValueError(f"Unknown sharing={value!r}: use one of {', '.join(SHARINGS)}.")
    if missing := sorted(of_layers.keys() - paths.keys()):
        raise ValueError(
            f"sharing names {missing}, which the model does not have. Its layers are "
            f"{[path for path, layer in paths.items() if isinstance(layer, LAYERS)]}."
        )
    owners = owners_of_parameters(model)
    parameters, by_calls = dict(model.named_parameters()), dict(calls or {})
    for name in names:
        path, _, key = name.rpartition(".")
        holders, layer = owners[id(parameters[name])], paths[path]
        # A subclass may compute the same as the layer; `resolve` finds out.
        if isinstance(layer, nn.MultiheadAttention):
            is_of_layer = is_attention(layer) and layer.bias_k is None
        else:
            is_of_layer = key in ("weight", "bias") and (
                isinstance(layer, LAYERS) or is_hugging_face_conv1d(layer)
            )
        if len(holders) > 1 or not is_of_layer:
            by_calls.setdefault(name, holders)
    blocks: list[Block] = []
    merged: set[str] = set()
    for name in names:
        if name in merged:
            continue
        if name in by_calls:
            holder, *_ = owners[id(parameters[name])]
            shape, read_by = (parameters[name].numel(), 1), tuple(by_calls[name])
            blocks.append(Block(name, (name,), holder, "entries", shape, calls=read_by))
            continue
        path, _, key = name.rpartition(".")
        layer = paths[path]
        bias = f"{path}.bias".lstrip(".")
        partner = joint and key == "weight" and bias in names and bias not in by_calls
        partner = partner and not isinstance(layer, NORMS)
        merged.update([bias] if partner else [])
        chosen = of_layers.get(path, default)
        blocks += _blocks_of(name, bias if partner else None, path, layer, chosen)
    return blocks


def parameter_order(
    model: nn.Module, names: Sequence[str], blocks: Sequence[Block]
) -> Int[Tensor, " parameters"] | None:
    """Where the blocks' entries lie among the flattened parameters.

    Entries come one block after the other, each `[*groups, d_out, d_in]` row-major. None if the two
    orders are the same.
    """
    parameters = list(map(model.get_parameter, names))
    everything = torch.arange(sum(map(Tensor.numel, parameters)))
    positions, start = {}, 0
    for name, parameter in zip(names, parameters, strict=True):
        positions[name] = everything[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    # Of a large model these are more bytes than its parameters: most blocks' are views of them.
    order, place = None, 0
    for block in blocks:
        entries = entries_of(model, block, positions).flatten()
        of_block = slice(place, place + len(entries))
        if order is None and entries.data_ptr() != everything[of_block].data_ptr():
            order = everything.clone()
        if order is not None:
            order[of_block] = entries
        place = of_block.stop
    if order is None:
        return None if place == len(everything) else everything[:place]
    return order[:place]


def _blocks_of(
    name: str, bias: str | None, path: str, layer: nn.Module, sharing: str
) -> list[Block]:
    key = name.rpartition(".")[2]
    parameter = layer.get_parameter(key)
    if isinstance(layer, nn.MultiheadAttention):
        # Query, key and value project different inputs in general: a block each.
        inside = f"{path}." if path else ""
        role, d_out = "bias" if key == "in_proj_bias" else "weight", parameter.shape[0]
        d_in = parameter.shape[1:].numel()
        if key.startswith("in_proj"):
            shape, blocks = (d_out // 3, d_in), []
            for group, projection in enumerate(PROJECTIONS):
                of_group = f"{name}[{group}]", (name,), inside + projection, role, shape, group
                blocks.append(Block(*of_group, sharing))
            return blocks
        projection = next(p for p in PROJECTIONS if key.startswith(p[0]))
        return [Block(name, (name,), inside + projection, role, (d_out, d_in), 0, sharing)]
    if isinstance(layer, NORMS) or key == "bias":
        role = "scale" if key == "weight" else "bias"
        return [Block(name, (name,), path, role, (parameter.numel(), 1))]
    role = "table" if isinstance(layer, nn.Embedding) else "weight"
    groups = layer.groups if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) else 1
    d_out, d_in = parameter.shape[0] // groups, parameter.shape[1:].numel()
    if isinstance(layer, TRANSPOSED):
        d_out, d_in = parameter.shape[1], parameter.numel() // (parameter.shape[1] * groups)
    elif role == "table" or not isinstance(layer, LAYERS):  # transformers' `Conv1D`
        d_out, d_in = d_in, d_out
    parameters = (name,) if bias is None else (name, bias)
    shape = (d_out, d_in + len(parameters) - 1)
    if groups > 1 and d_out == 1:
        role, shape = "depthwise", (shape[1], 1)
    return [Block("+".join(parameters), parameters, path, role, shape, 0, sharing, groups)]


def entries_of(
    model: nn.Module, block: Block, values: Mapping[str, Tensor]
) -> Shaped[Tensor, "*groups d_out d_in"]:
    """A block's entries, `[*groups, d_out, d_in]`, of what there is for every parameter's entry."""
    path, _, _ = block.parameters[0].rpartition(".")
    layer = model.get_submodule(path)
    weight = values[block.parameters[0]]
    d_out = block.shape[0]
    rows = slice(block.group * d_out, (block.group + 1) * d_out)
    if block.role in ("bias", "scale", "entries"):
        return weight.flatten()[rows, None]
    bias = values[block.parameters[1]] if block.is_joint else None
    if block.num_groups > 1:
        rows = slice(None)
    if block.role == "table" or not isinstance(layer, LAYERS):  # transformers' `Conv1D`
        matrices = weight.T
    elif isinstance(layer, TRANSPOSED):
        # [C_in, d_out, k_1, …], and the groups divide C_in.
        of_groups = weight.flatten(2).unflatten(0, (*block.groups, -1))
        matrices = of_groups.transpose(-3, -2).flatten(-2)
    else:
        matrices = weight[rows].flatten(1).unflatten(0, (*block.groups, -1))
    if bias is not None:
        last = bias[rows].unflatten(0, (*block.groups, -1)).unsqueeze(-1)
        matrices = torch.cat([matrices, last], dim=-1)
    return matrices.reshape(*block.groups, *block.shape)


def owners_of_parameters(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Paths of the modules that hold a parameter and can be called, by the parameter's `id`.

    A parameter in a container (`nn.ParameterList`, `nn.ModuleList`, …) or in a parametrisation
    belongs to the nearest module around it that has a forward pass. A module that stands in the
    model twice counts once.
    """
    owners: dict[int, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holder = _callable(model, path)
            before = owners.get(id(parameter), ())
            owners[id(parameter)] = before if holder in before else (*before, holder)
    return owners


def around(model: nn.Module, paths: Sequence[str]) -> str | None:
    """The path of the nearest module around all of some; None around the model itself."""
    if len(paths) > 1:
        steps = zip(*(path.split(".") for path in paths), strict=False)
        shared = takewhile(lambda names: len(set(names)) == 1, steps)
        return _callable(model, ".".join(names[0] for names in shared))
    return _callable(model, paths[0].rpartition(".")[0]) if paths[0] else None


def _callable(model: nn.Module, path: str) -> str:
    before, is_inside, _ = f".{path}.".partition(f".{_PARAMETRIZATIONS}.")
    path = before.strip(".") if is_inside else path
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path
