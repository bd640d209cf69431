"""Which tensors a posterior file holds of each curvature block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.fits.kinds import DENSE
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.laplace.files.header import Header


@dataclass(frozen=True)
class SavedBlock:
    """A curvature block on disk.

    Attributes:
        name: The block's name.
        parts: Shapes of its tensors by the fields of `EigenKronecker` or `LowRankPlusDiagonal`.
    """

    name: str
    parts: dict[str, tuple[int, ...]]


def kronecker_block(name: str, shape: tuple[int, ...], without: Sequence[str] = ()) -> SavedBlock:
    """What is saved of an `EigenKronecker`.

    Args:
        name: The block's name.
        shape: `(*groups, d_out, d_in)`.
        without: Directions that are the coordinate axes.
    """
    *groups, d_out, d_in = shape
    parts: dict[str, tuple[int, ...]] = {
        "U_G": (*groups, d_out, d_out),
        "U_A": (*groups, d_in, d_in),
    }
    kept = {part: size for part, size in parts.items() if part not in without}
    return SavedBlock(name, {**kept, "magnitudes": shape})


def whole_block(name: str, size: int, rank: int | None) -> SavedBlock:
    """What is saved of one block of all parameters, low-rank or (`rank=None`) full."""
    if rank is None:
        return kronecker_block(name, (size, 1), ("U_A",))
    return SavedBlock(name, {"U": (size, rank), "magnitudes": (rank,)})


def expected_blocks(blocks: Sequence[Block], curvature: str, rank: int | None) -> list[SavedBlock]:
    """What a file of a curvature holds.

    Args:
        blocks: The blocks of the Bayesian parameters.
        curvature: The curvature's name.
        rank: Of a low-rank one.
    """
    if curvature in DENSE:
        return [whole_block(DENSE_BLOCK, sum(block.size for block in blocks), rank)]
    shapes = [(*block.groups, *block.shape) for block in blocks]
    without: dict[Block, tuple[str, ...]]
    if curvature == "diag":
        without = dict.fromkeys(blocks, ("U_G", "U_A"))
    else:
        without = {block: _axes(block) for block in blocks}
    return [
        kronecker_block(block.name, shape, without[block])
        for block, shape in zip(blocks, shapes, strict=True)
    ]


def _axes(block: Block) -> tuple[str, ...]:
    """Which directions of a Kronecker-factored block are the coordinate axes."""
    are_diagonal = {"U_G": block.has_diagonal_G, "U_A": block.has_diagonal_A}
    return tuple(part for part, is_diagonal in are_diagonal.items() if is_diagonal)


def rank_of(header: Header, tensors: Mapping[str, Tensor]) -> int | None:
    """How many directions a file's low-rank curvature has, None for others.

    A full curvature that was cross-fitted on fewer Jacobian rows than parameters is low-rank, too.
    """
    if header.curvature != "lowrank" and not (header.curvature == "full" and "0.U" in tensors):
        return None
    magnitudes = tensors.get("0.magnitudes")
    return 0 if magnitudes is None else magnitudes.numel()
