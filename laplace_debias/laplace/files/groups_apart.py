"""Earlier posterior files, which have a block for every group of a grouped convolution.

Now all groups make one block. What such a file holds is the same posterior, tensor for tensor: the
groups' parts are stacked. Its blocks of depthwise kernels are Kronecker products, and stay them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.laplace.files.saved_blocks import SavedBlock, expected_blocks

# A depthwise kernel was a matrix of one row, and is a column now.
_OTHER_SIDE = {"U_G": "U_A", "U_A": "U_G", "magnitudes": "magnitudes"}


def blocks_apart(blocks: Sequence[Block], curvature: str) -> list[SavedBlock]:
    """What a file holds that has a block for every group.

    Args:
        blocks: The blocks of the Bayesian parameters, as they are now.
        curvature: The curvature's name; not one of all parameters together.
    """
    apart = []
    for block, saved in zip(blocks, expected_blocks(blocks, curvature, None), strict=True):
        if block.num_groups == 1:
            apart.append(saved)
            continue
        is_turned = block.role == "depthwise"
        parts = {
            _OTHER_SIDE[part] if is_turned else part: shape[:0:-1] if is_turned else shape[1:]
            for part, shape in saved.parts.items()
        }
        apart += [SavedBlock(f"{saved.name}[{g}]", parts) for g in range(block.num_groups)]
    return apart


def joined(tensors: Mapping[str, Tensor], blocks: Sequence[Block]) -> dict[str, Tensor]:
    """The tensors as a file has them now, one block for all groups.

    Args:
        tensors: Those of a file with the blocks of `blocks_apart`.
        blocks: The blocks of the Bayesian parameters, as they are now.

    Raises:
        ValueError: If groups of one convolution have different prior precisions.
    """
    found = {"mean": tensors["mean"]}
    deltas, of_blocks = tensors["prior_precision"], []
    first = 0
    for index, block in enumerate(blocks):
        members = range(first, first + block.num_groups)
        first = members.stop
        is_turned = block.role == "depthwise"
        for part in _OTHER_SIDE:
            of_groups = [tensors.get(f"{member}.{part}") for member in members]
            kept = [of_group for of_group in of_groups if of_group is not None]
            if kept and block.num_groups == 1:
                found[f"{index}.{part}"] = kept[0]
            elif kept:
                stacked = torch.stack(kept)
                name = _OTHER_SIDE[part] if is_turned else part
                found[f"{index}.{name}"] = stacked.mT if is_turned and part == name else stacked
        if deltas.ndim == 1:
            of_blocks.append(_common(deltas[members.start : members.stop], block.name))
    found["prior_precision"] = torch.stack(of_blocks) if of_blocks else deltas
    return found


def _common(deltas: Tensor, block: str) -> Tensor:
    if not bool((deltas == deltas[0]).all()):
        raise ValueError(
            f"The file has a prior precision for every group of {block}, from {deltas.min():g} to "
            f"{deltas.max():g}. All groups of a convolution have one since version 0.2.0: set it "
            "to one number a layer with the version that wrote the file, and save it again."
        )
    return deltas[0]


def has_groups(blocks: Iterable[Block]) -> bool:
    """Whether there is a grouped convolution among the blocks."""
    return any(block.num_groups > 1 for block in blocks)
