r"""What a fit's blocks cost, by formula: bytes, operations and messages, from shapes alone.

With $d = d_{out}$, $e = d_{in}$, g groups, T positions, K cotangents, in operations (a
multiplication and an addition are two):

| | of an example | of a block, once |
|---|---|---|
| forward pass of a weight | $2gTde$ | |
| one cotangent through it | $2gTde$ | |
| factor G | $2gKTd^2$ | |
| factor A | $2gTe^2$ | |
| magnitudes of EKFAC | $2g(KTd^2 + Te^2 + KTde)$ | |
| eigendecompositions | | $9g(d^3 + e^3)$ |

What is counted for A is an upper bound: a wide A is computed by symmetry, that of a convolution
with stride 1 by displacements (`layers.patches`). An eigendecomposition takes about $9d^3$.

Reference:
    Golub, Van Loan (2013), "Matrix Computations", Section 8.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from laplace_debias.curvature.fits.over_ranks import (
    Shape,
    shape_along_A,
    shape_along_G,
    shape_of_A,
    shape_of_G,
    shape_of_table,
)
from laplace_debias.curvature.layers.blocks import Block

EIGH = 9
"""Operations of an eigendecomposition, in units of d³."""


@dataclass(frozen=True)
class BlockCosts:
    """What one block costs.

    Attributes:
        name: The block.
        positions: T, positions that share it, in one example.
        factors: Bytes of G and A, which sums and then eigenbases take, in `factor_dtype`.
        magnitudes: Bytes of the curvature along every direction, in `factor_dtype`.
        posterior: Bytes of what is kept of it after the fit, in the model's dtype.
        factor_flops: Operations of G and A for one example.
        rotation_flops: Operations of EKFAC's magnitudes for one example.
        eigh_flops: Operations of the eigendecompositions.
        owner: The rank that decomposes it.
    """

    name: str
    positions: int
    factors: int
    magnitudes: int
    posterior: int
    factor_flops: int
    rotation_flops: int
    eigh_flops: int
    owner: int = 0


def numbers(shape: tuple[int, ...] | None) -> int:
    """How many numbers a tensor has; 0 for None."""
    return 0 if shape is None else prod(shape)


def sides(block: Block) -> tuple[int, int]:
    """Numbers of G and of A."""
    return numbers(shape_of_G(block)), numbers(shape_of_A(block))


def table_numbers(block: Block) -> int:
    """Numbers of the curvature along every direction."""
    return numbers(shape_of_table(block))


def posterior_numbers(blocks: Sequence[Block], curvature: str, rank: int | None = None) -> int:
    """Numbers that the curvature of a fitted posterior holds.

    Args:
        blocks: Its blocks.
        curvature: As `Laplace` takes it.
        rank: Directions of `"lowrank"`.
    """
    size = sum(block.size for block in blocks)
    if curvature == "full":
        return size * size + size
    if curvature == "lowrank":
        assert rank is not None
        return min(rank, size) * (size + 1)
    return sum(_posterior_of(block, curvature) for block in blocks)


def _posterior_of(block: Block, curvature: str) -> int:
    if curvature == "diag":
        return block.size
    G, A = sides(block)
    # The one direction of an exact block's inputs, of each group.
    A = block.num_groups if block.is_exact else A
    # Of a diagonal factor the directions are the coordinate axes, which are not stored.
    return block.size + (0 if block.has_diagonal_G else G) + (0 if block.has_diagonal_A else A)


def costs_of(
    block: Block,
    curvature: str,
    positions: int,
    columns: int,
    factor_dtype: torch.dtype,
    dtype: torch.dtype,
    owner: int = 0,
) -> BlockCosts:
    """The costs of one block of a block-diagonal curvature.

    Args:
        block: The block.
        curvature: `"kfac"`, `"ekfac"` or `"diag"`.
        positions: T.
        columns: K, cotangents of an example.
        factor_dtype: In what factors are summed.
        dtype: The model's.
        owner: The rank that decomposes it.
    """
    G, A = sides(block)
    has_factors = curvature != "diag"
    return BlockCosts(
        block.name,
        positions,
        (G + A) * factor_dtype.itemsize if has_factors else 0,
        table_numbers(block) * factor_dtype.itemsize,
        _posterior_of(block, curvature) * dtype.itemsize,
        factor_flops(block, positions, columns) if has_factors else 0,
        0 if curvature == "kfac" else rotation_flops(block, positions, columns, has_factors),
        eigh_flops(block) if has_factors else 0,
        owner,
    )


def factor_flops(block: Block, positions: int, columns: int) -> int:
    """Operations of G and A for one example; of a diagonal factor a product a number."""
    d, e = block.shape
    # An exact block and `reduce` sum over positions first.
    of_G = 1 if block.is_exact or block.sharing == "reduce" else positions
    of_A = 1 if block.sharing == "reduce" else positions
    G = columns * of_G * (d if block.has_diagonal_G else d * d)
    A = 0
    if not block.is_exact and block.role != "table":
        A = of_A * (e if block.has_diagonal_A else e * e)
    return 2 * block.num_groups * (G + A)


def rotation_flops(block: Block, positions: int, columns: int, is_rotated: bool = True) -> int:
    """Operations of the exact curvature along all directions, for one example."""
    d, e = block.shape
    if block.is_exact:
        return 2 * block.num_groups * columns * (d * d if is_rotated else d)
    turned = 0
    if is_rotated:
        turned += 0 if block.has_diagonal_G else columns * positions * d * d
        turned += 0 if block.has_diagonal_A else positions * e * e
    columns_of_A = 1 if block.role == "table" else e
    return 2 * block.num_groups * (turned + columns * positions * d * columns_of_A)


def eigh_flops(block: Block) -> int:
    """Operations of a block's eigendecompositions."""
    return EIGH * block.num_groups * sum(d**3 for d in decomposed(block))


def decomposed(block: Block) -> list[int]:
    """Sizes of the factors that are decomposed, of one group."""
    d, e = block.shape
    sizes = [] if block.has_diagonal_G else [d]
    return sizes if block.is_exact or block.has_diagonal_A else [*sizes, e]


def network_flops(block: Block, positions: int) -> int:
    """Operations of a weight in a forward pass of one example; a cotangent takes as many."""
    is_matrix = block.role in ("weight", "depthwise")
    return 2 * positions * block.size if is_matrix else 0


def message_bytes(
    blocks: Sequence[Block],
    curvature: str,
    mode: str,
    folds: int,
    factor_dtype: torch.dtype,
    replicate: bool = False,
) -> dict[str, int]:
    """Bytes that a fit over several processes sends, by collective; none for a batch.

    Args:
        blocks: The blocks of a block-diagonal curvature.
        curvature: `"kfac"`, `"ekfac"` or `"diag"`.
        mode: As `Laplace.fit` takes it.
        folds: Folds of `"crossfit"`.
        factor_dtype: In what factors are summed.
        replicate: As `Laplace.fit` takes it.

    Returns:
        `"reduce"`: upper triangles of factors, to the owners, and of a sharded posterior the
        curvature along directions; `"broadcast"`: eigenbases, from the owners; `"all_reduce"`:
        curvature along directions, of a sharded posterior the largest of each block.
    """

    def total(of_block: Callable[[Block], int]) -> int:
        return factor_dtype.itemsize * sum(map(of_block, blocks))

    if not replicate:
        return _sharded_bytes(total, len(blocks), curvature, mode, folds)
    if curvature == "diag":
        return {"all_reduce": total(table_numbers)}
    is_crossfit = mode == "crossfit"
    found = {
        "reduce": (folds if is_crossfit else 1) * total(_triangles),
        "broadcast": total(_basis_numbers),
    }
    if curvature == "ekfac":
        found["all_reduce"] = (folds if is_crossfit else 1) * total(table_numbers)
        found["broadcast"] *= 1 + folds if is_crossfit else 1
    elif is_crossfit:
        found["broadcast"] += total(table_numbers)
    elif mode == "debiased":
        found["all_reduce"] = total(lambda b: numbers(shape_along_G(b)) + numbers(shape_along_A(b)))
    return found


def _sharded_bytes(
    total: Callable[[Callable[[Block], int]], int],
    num_blocks: int,
    curvature: str,
    mode: str,
    folds: int,
) -> dict[str, int]:
    """As `message_bytes`, of a posterior that stays with the blocks' owners."""
    passes = folds if mode == "crossfit" else 1
    largest = {"all_reduce": torch.float64.itemsize * num_blocks}
    if curvature == "diag":
        return {"reduce": total(table_numbers), **largest}
    if curvature == "ekfac":
        # Every process measures along the eigenbases of all.
        sent = passes * (total(_triangles) + total(table_numbers))
        return {"reduce": sent, "broadcast": passes * total(_basis_numbers), **largest}
    passes = 2 if mode == "debiased" else passes
    return {"reduce": passes * total(_triangles), **largest}


def _triangles(block: Block) -> int:
    return _triangle(shape_of_G, block) + _triangle(shape_of_A, block)


def _triangle(shape: Shape, block: Block) -> int:
    found = shape(block)
    if found is None:
        return 0
    if len(found) < 2:
        return prod(found)
    d = found[-1]
    return prod(found[:-2]) * (d * (d + 1) // 2)


def _basis_numbers(block: Block) -> int:
    """Eigenvectors and eigenvalues of both sides; of an exact block A is a 1."""
    d, e = block.shape
    G, A = sides(block)
    of_G = d if block.has_diagonal_G else G + block.num_groups * d
    if block.is_exact:
        return of_G + 2 * block.num_groups
    return of_G + (e if block.has_diagonal_A else A + block.num_groups * e)
