"""Block-diagonal operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laplace_debias.operators.base import Joined, LinearOperator, unify
from laplace_debias.operators.dispatch import (
    Scalar,
    add,
    multiply,
    named_range,
    scale,
    shift,
)
from laplace_debias.operators.structures.diagonal import Identity
from laplace_debias.system.checks import check_is

Block = TypeVar("Block", bound=LinearOperator)


@dataclass(eq=False, repr=False)
class BlockDiagonal(Joined, Generic[Block]):
    """A matrix with named square blocks along its diagonal.

    `A.blocks[name]` is a block. The name of a block can also be used to index its rows and columns
    in `A`. Blocks without a dtype or device of their own get those of the other blocks.

    Args:
        blocks: The blocks by name, in their order along the diagonal.

    Raises:
        TypeError: If a block is not an operator.
        ValueError: If there are no blocks, a block is not square, or dtypes or devices differ.
    """

    blocks: Mapping[str, Block]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(
                "A block-diagonal operator needs at least one block. Pass a dict with at least "
                "one entry."
            )
        for name, block in self.blocks.items():
            check_is(block, f"the block {name!r}", LinearOperator)
            if block.shape[0] != block.shape[1]:
                raise ValueError(
                    f"The block {name!r} has shape {block.shape}, but blocks must be square. "
                    "Pass square blocks."
                )
        unified: list[Any] = unify(list(self.blocks.values()))
        self.blocks = dict(zip(self.blocks, unified, strict=True))

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, where n is the sum of the sizes of the blocks."""
        return sum(self.sizes), sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of every block, in the order of the blocks."""
        return [block.shape[0] for block in self.blocks.values()]

    @property
    def T(self) -> "BlockDiagonal[Any]":  # noqa: N802
        """The adjoint: the block-diagonal matrix of the blocks' adjoints."""
        return self.map(lambda _, block: block.T)

    def _matmat(self, matrix: Tensor) -> Tensor:
        blocks_and_rows = zip(self.blocks.values(), matrix.split(self.sizes), strict=True)
        return torch.cat([block @ rows for block, rows in blocks_and_rows])

    def map(self, function: Callable[[str, Block], LinearOperator]) -> "BlockDiagonal[Any]":
        """Replace every block by `function(name, block)`."""
        return BlockDiagonal({name: function(name, block) for name, block in self.blocks.items()})


def _pairwise(
    combine: Callable[[LinearOperator, LinearOperator], LinearOperator],
    left: BlockDiagonal[Any],
    right: BlockDiagonal[Any],
) -> LinearOperator | None:
    """Combine blocks pairwise if both operators have the same names and sizes in the same order."""
    if list(left.blocks) != list(right.blocks) or left.sizes != right.sizes:
        return None
    return left.map(lambda name, block: combine(block, right.blocks[name]))


add.register(BlockDiagonal, BlockDiagonal)(partial(_pairwise, add))
multiply.register(BlockDiagonal, BlockDiagonal)(partial(_pairwise, multiply))


@scale.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], scalar: Scalar) -> LinearOperator:
    return operator.map(lambda _, block: scale(block, scalar))


@shift.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], scalar: Scalar) -> LinearOperator | None:
    def shifted(_: str, block: LinearOperator) -> LinearOperator:
        return block + scale(Identity(block.shape[0], block.dtype, block.device), scalar)

    return operator.map(shifted)


@named_range.register(BlockDiagonal)
def _(operator: BlockDiagonal[Any], name: str) -> range:
    if name not in operator.blocks:
        raise KeyError(f"There is no block {name!r}. Use one of the names {list(operator.blocks)}.")
    end = dict(zip(operator.blocks, accumulate(operator.sizes), strict=True))[name]
    return range(end - operator.blocks[name].shape[0], end)
