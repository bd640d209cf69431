"""The most memory that a fit holds at once: each of its stages, added up.

What is held for certain (sums, eigenbases, magnitudes) is counted by its shape. A stage's working
memory is that of a chunk (`working`), and of the copies that the code makes of a block's factor.
"""

from collections.abc import Sequence

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
# eigenvectors, and LAPACK's working space of two or the two that check the result.
_OF_EIGH = 5
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
        return {"curvature along the axes": table + _exact(problem, second)}
    G = wide * sum(sides(block)[0] for block in blocks)
    A = wide * sum(sides(block)[1] for block in blocks)
    factors, held = G + A, 0
    if mode == "crossfit":
        # The factors of the folds before.
        held = (folds - 1) * factors
    copies = _of_gradients(problem, working)
    chunk = working.kept_before + max(working.chunk, working.measured + copies)
    inputs = working.kept + working.joined
    found = {
        "factors": held
        + max(
            chunk + (G if num_batches == 1 else factors),
            inputs + factors + _of_input_factor(blocks, working, narrow, wide),
        )
    }
    beside = 2 * factors if mode == "crossfit" and curvature == "ekfac" else 0
    found["eigendecompositions"] = held + beside + factors + wide * _largest_eigh(blocks)
    if mode == "crossfit" and curvature == "kfac":
        found["eigendecompositions"] = held + factors + wide * _largest_crossfit(blocks, folds)
    if curvature == "ekfac":
        rotations = factors * narrow // wide if narrow != wide else 0
        found["magnitudes"] = (
            held
            + beside
            + (factors if mode == "crossfit" else 0)
            + factors
            + rotations
            + table
            + _exact(problem, second)
        )
    elif mode == "debiased":
        # Factors are projected: a product with the basis, and that with the basis once more.
        of_G, of_A = (2 * wide * max(sides(block)[side] for block in blocks) for side in (0, 1))
        unfolded = _of_input_factor(blocks, working, narrow, wide)
        found["magnitudes"] = factors + max(chunk + of_G, inputs + unfolded + of_A)
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


def _converted(number: int, narrow: int, wide: int) -> int:
    """A new factor in the model's dtype, and converted."""
    return number * (narrow + (wide if narrow != wide else 0))


def _of_input_factor(blocks: Sequence[Block], working: Working, narrow: int, wide: int) -> int:
    """One block's A: unfolded inputs, or the products that it is put together from."""
    largest = 0
    for block in blocks:
        if block.is_exact or block.role == "table":
            continue
        unfolded = working.positions[block] * block.shape[1] * block.num_groups
        patches = max(unfolded, min(SLICE, unfolded * working.examples)) * narrow
        largest = max(largest, patches + _converted(sides(block)[1], narrow, wide))
    return largest


def _of_gradients(problem: Problem, working: Working) -> int:
    """What is made of a block's output gradients for G, beyond those of all blocks.

    Of a weight a copy, or products of each example. A block's gradients are let go of when it is
    measured, before those of the blocks in front of it.
    """
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    most = 0
    for block, behind in _released(problem, working).items():
        made = _converted(sides(block)[0], narrow, wide)
        if not block.is_exact:
            d, T = block.shape[0], working.positions[block]
            columns = working.examples * working.at_once
            made += narrow * columns * block.num_groups * d * min(d, T)
        most = max(most, made - behind)
    return most


def _exact(problem: Problem, working: Working) -> int:
    """A chunk of a pass for exact curvature: rotated Jacobians of some examples of one block."""
    most = 0
    for block, behind in _released(problem, working).items():
        if block.is_exact:
            continue
        jacobian = working.at_once * block.size
        positions = working.positions[block]
        unfolded = positions * block.num_groups * block.shape[1]
        gradients = working.at_once * positions * block.num_groups * block.shape[0]
        if positions > 1:
            # The Jacobians and their squares, what is unfolded, and the gradients.
            examples = min(working.examples, max(1, SLICE // (unfolded + jacobian)))
            made = examples * (2 * jacobian + unfolded + gradients)
        else:
            made = block.size + working.examples * 2 * (unfolded + gradients)
        most = max(most, problem.dtype.itemsize * made - behind)
    return max(working.chunk, working.measured + most)


def _released(problem: Problem, working: Working) -> dict[Block, int]:
    """Bytes of output gradients that are let go of before a block is measured."""
    found: dict[Block, int] = {}
    behind, layer, of_layer = 0, None, 0
    for block in reversed(problem.blocks):
        if block.layer != layer:
            behind += of_layer
        layer = block.layer
        width = block.num_groups * (1 if block.role == "depthwise" else block.shape[0])
        numbers = width * working.positions[block] * working.examples * working.at_once
        of_layer = problem.dtype.itemsize * numbers
        found[block] = behind
    return found


def _largest_eigh(blocks: Sequence[Block]) -> int:
    """Numbers beside the sums while a factor is decomposed, of the block that takes most."""
    most = 0
    for block in blocks:
        sizes = decomposed(block)
        if sizes:
            largest = block.num_groups * max(sizes) ** 2
            # Of the other side there are the mean and the basis.
            most = max(most, 2 * (sum(sides(block)) - largest) + _OF_EIGH * largest)
    return most


def _largest_crossfit(blocks: Sequence[Block], folds: int) -> int:
    """The same where a block's folds are stacked, and decomposed without each of them."""
    most = 0
    for block in blocks:
        sizes = decomposed(block)
        if sizes:
            # The sums of all folds, of one and of the others, beside what is decomposed.
            largest = block.num_groups * max(sizes) ** 2
            most = max(most, (folds + 1) * sum(sides(block)) + (3 + _OF_EIGH - 1) * largest)
    return most
