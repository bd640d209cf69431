"""The most memory that a fit holds at once: each of its stages, added up.

What is held for certain (sums, eigenbases, magnitudes) is counted by its shape. A stage's working
memory is that of a chunk (`working`), and of the copies that the code makes of a block's factor.
"""

from collections.abc import Mapping, Sequence

from laplace_debias.curvature.fits.costs import (
    decomposed,
    posterior_numbers,
    sides,
    table_numbers,
)
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.uses import SLICE

# Matrices of a factor's size beside the factor while it is decomposed: its mean, a scaled copy, the
# eigenvectors, and LAPACK's working space of two.
_OF_EIGH = 5
# Jacobian rows of up to so many numbers are made at a time, in three copies.
_OF_SLICE = 3
_KEPT_ROWS = 2**30


def stages(
    problem: Problem,
    curvature: str,
    mode: str,
    working: Working,
    second: Working,
    num_examples: int | None,
    num_batches: int | None,
    folds: int,
    rank: int | None,
) -> dict[str, int]:
    """Bytes at most in every stage of a fit, beyond the model and the data.

    Args:
        problem: The network and its blocks.
        curvature: As `Laplace` takes it.
        mode: As `Laplace.fit` takes it.
        working: A chunk of a pass that sums factors or rows.
        second: A chunk of a pass that measures exact curvature along directions.
        num_examples: How many examples are read; None if it is not known.
        num_batches: How many batches.
        folds: Of `"crossfit"`.
        rank: Directions of `"lowrank"`.
    """
    if curvature in ("full", "lowrank"):
        return _dense(problem, curvature, mode, working, num_examples, rank)
    blocks, wide, narrow = problem.blocks, problem.factor_dtype.itemsize, problem.dtype.itemsize
    table = wide * sum(map(table_numbers, blocks))
    if curvature == "diag":
        return {"curvature along the axes": second.chunk + table + _rows(problem, second)}
    G = wide * sum(sides(block)[0] for block in blocks)
    A = wide * sum(sides(block)[1] for block in blocks)
    factors, held = G + A, 0
    if mode == "crossfit":
        # The factors of the folds before.
        held = (folds - 1) * factors
    one_batch = num_batches == 1
    chunk = working.chunk + working.kept + working.largest
    found = {
        "factors": held
        + max(
            chunk + (G if one_batch else factors) + _measured(blocks, 0, narrow, wide),
            factors + working.kept + _of_input_factor(blocks, working, narrow, wide),
        )
    }
    beside = 2 * factors if mode == "crossfit" and curvature == "ekfac" else 0
    found["eigendecompositions"] = held + beside + factors + wide * _largest_eigh(blocks)
    if curvature == "ekfac":
        rotations = factors * narrow // wide if narrow != wide else 0
        found["magnitudes"] = (
            held
            + beside
            + (factors if mode == "crossfit" else 0)
            + factors
            + rotations
            + table
            + second.chunk
            + _rows(problem, second)
        )
    elif mode == "debiased":
        project = 3 * wide * max(max(sides(block)) for block in blocks)
        found["magnitudes"] = factors + max(
            chunk + _measured(blocks, 0, narrow, wide), working.kept + project
        )
    # Eigenbases are converted to the model's dtype block by block.
    largest = max(sum(sides(block)) + table_numbers(block) for block in blocks)
    found["posterior"] = factors + 2 * table + narrow * largest
    return found


def _dense(
    problem: Problem,
    curvature: str,
    mode: str,
    working: Working,
    num_examples: int | None,
    rank: int | None,
) -> dict[str, int]:
    """Stages of a curvature of all parameters together."""
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    size = sum(block.size for block in problem.blocks)
    rows = working.examples * working.at_once * size * (2 * narrow + wide)
    chunk = working.chunk + rows
    if curvature == "full":
        matrix = wide * size * size
        return {
            "curvature": matrix + chunk,
            "eigendecomposition": matrix * (1 + _OF_EIGH),
            "posterior": matrix + narrow * size * size,
        }
    all_rows = _KEPT_ROWS
    if num_examples is not None:
        all_rows = min(_KEPT_ROWS, num_examples * working.columns * size * wide)
    # Rows are kept, and joined to one matrix; their product with themselves is decomposed.
    count = all_rows // (size * wide)
    gram = wide * min(count, size) ** 2
    assert rank is not None
    directions = wide * posterior_numbers(problem.blocks, curvature, rank)
    return {
        "rows": all_rows + chunk,
        "directions": 2 * all_rows + (1 + _OF_EIGH) * gram + 3 * directions,
    }


def _measured(blocks: Sequence[Block], side: int, narrow: int, wide: int) -> int:
    """One block's new factor in the model's dtype, and converted."""
    largest = max(sides(block)[side] for block in blocks)
    return largest * (narrow + (wide if narrow != wide else 0))


def _of_input_factor(
    blocks: Sequence[Block], working: Working, narrow: int, wide: int
) -> int:
    """One block's A: unfolded inputs, or the products that it is put together from."""
    largest = 0
    for block in blocks:
        if block.is_exact or block.role == "table":
            continue
        unfolded = working.positions[block] * block.shape[1] * block.num_groups
        patches = max(unfolded, min(SLICE, unfolded * working.examples)) * narrow
        A = sides(block)[1]
        largest = max(largest, patches + A * (narrow + (wide if narrow != wide else 0)))
    return largest


def _rows(problem: Problem, working: Working) -> int:
    """Rotated Jacobians of some examples of one block."""
    narrow = problem.dtype.itemsize
    largest = 0
    for block in problem.blocks:
        of_example = working.at_once * block.size
        many = max(of_example, min(SLICE, of_example * working.examples))
        largest = max(largest, many if not block.is_exact else of_example)
    return _OF_SLICE * narrow * largest


def _largest_eigh(blocks: Sequence[Block]) -> int:
    """Numbers beside a factor while it is decomposed, of the block that has most."""
    most = 0
    for block in blocks:
        sizes = decomposed(block)
        if not sizes:
            continue
        d = max(sizes)
        # Sums, means and bases of both sides, and one matrix of a group at a time for LAPACK.
        most = max(most, 2 * sum(sides(block)) + 3 * block.num_groups * d * d + 2 * d * d)
    return most


def peak(of_stages: Mapping[str, int]) -> int:
    """Bytes of the stage that holds most."""
    return max(of_stages.values())
