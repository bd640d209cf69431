"""Groups of curvature blocks that share a prior precision."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS, NORMS, TRANSPOSED
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.fitted import Fitted

PER = ("kind", "block")


@dataclass(frozen=True)
class Group:
    """Blocks with one prior precision.

    Attributes:
        name: The kind of their layers, or the block's name.
        blocks: Their numbers.
    """

    name: str
    blocks: tuple[int, ...]


def groups_of(fitted: Fitted, per: str | None) -> list[Group]:
    """The groups of a fit's blocks, in the order of their first ones.

    Args:
        fitted: The fit.
        per: `"kind"`: those of one kind of layer; `"block"`: each block by itself; None: all.

    Raises:
        ValueError: If `per` is none of these, or if the curvature is one block of all parameters.
    """
    names = fitted.parameters.block_names
    if per is None:
        return [Group("all", tuple(range(len(names))))]
    if per not in PER:
        raise ValueError(f"Unknown per={per!r}: use 'kind', 'block' or None.")
    if fitted.settings.kind.is_dense:
        raise ValueError(
            f"curvature={fitted.settings.kind.name!r} is one block of all parameters, which has "
            f"one prior precision: leave out per={per!r}, or fit with 'kfac', 'ekfac' or 'diag'."
        )
    if per == "block":
        return [Group(name, (index,)) for index, name in enumerate(names)]
    kinds: dict[str, list[int]] = {}
    for index, block in enumerate(fitted.parameters.blocks):
        kinds.setdefault(kind_of(unwrapped(fitted.model), block), []).append(index)
    return [Group(kind, tuple(members)) for kind, members in kinds.items()]


def kind_of(model: nn.Module, block: Block) -> str:
    """What a block's parameters are.

    `"linear"` and `"convolution"` weights (with their biases where they make one block),
    `"embedding"` tables, `"normalisation"` scales and shifts, `"bias"`, or `"other"`.
    """
    if block.role == "entries":
        return "other"
    layer = model.get_submodule(block.parameters[0].rpartition(".")[0])
    if isinstance(layer, NORMS):
        return "normalisation"
    if block.role == "table":
        return "embedding"
    if block.role == "bias":
        return "bias"
    return "convolution" if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) else "linear"


def spread(groups: Sequence[Group], values: Sequence[float]) -> list[float]:
    """The groups' values, one for each block."""
    of_blocks = {
        index: value for group, value in zip(groups, values, strict=True) for index in group.blocks
    }
    return [of_blocks[index] for index in range(len(of_blocks))]
