"""The most memory that a fit of all parameters in one matrix holds at once, stage by stage."""

from laplace_debias.curvature.fits.costs import posterior_numbers
from laplace_debias.curvature.fits.dense import KEPT_ROWS
from laplace_debias.curvature.fits.peak import OF_EIGH
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working

# Matrices of the leading directions, while they are made orthonormal: before and after.
_OF_QR = 2


def dense_stages(
    problem: Problem,
    rank: int | None,
    mode: str,
    working: Working,
    num_examples: int | None,
    num_batches: int | None,
    folds: int,
) -> dict[str, int]:
    """Bytes at most in every stage of a fit, beyond the model and the data.

    Args:
        problem: The network and its blocks.
        rank: Directions of `"lowrank"`; None for `"full"`.
        mode: As `Laplace.fit` takes it.
        working: A chunk of a pass over Jacobian rows.
        num_examples: How many examples are read; None if it is not known.
        num_batches: How many batches; None if it is not known.
        folds: Of `"crossfit"`.
    """
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    size = sum(block.size for block in problem.blocks)
    # The rows of a chunk: block by block, joined, and converted.
    of_chunk = working.examples * working.at_once * size
    converted = wide * of_chunk if wide != narrow else 0
    chunk = max(working.chunk, _of_rows(working, narrow))
    matrix = wide * size * size
    is_crossfit = mode == "crossfit"
    through = max(chunk, 2 * narrow * of_chunk + converted)
    if rank is None and not is_crossfit:
        # A second pass holds the directions in the place of the matrix.
        return {
            "curvature": matrix + through,
            "eigendecomposition": OF_EIGH * matrix,
            "posterior": matrix + (narrow * size * size if wide != narrow else 0),
        }
    all_rows = KEPT_ROWS
    if num_examples is not None:
        all_rows = min(KEPT_ROWS, num_examples * working.columns * size * wide)
    # The last chunk's rows are kept, too.
    kept = wide * of_chunk
    found = {"rows": max(all_rows - kept + chunk, all_rows + 2 * narrow * of_chunk)}
    parts = all_rows // folds if is_crossfit else all_rows
    if num_batches != 1 or working.examples < working.batch or working.at_once < working.columns:
        # They are joined to one matrix.
        found["rows"] = max(found["rows"], all_rows + parts)
    if rank is None:
        # All rows, and those of some folds joined; eigenvectors of all while others are found.
        some = all_rows - parts
        most = max(all_rows + OF_EIGH * matrix, matrix + some + OF_EIGH * matrix)
        found["eigendecompositions"] = all_rows + most
        found["posterior"] = matrix + (narrow * size * size if wide != narrow else 0)
        return found
    # The product of rows with themselves is decomposed.
    num_rows = all_rows // (size * wide)
    gram = wide * min(num_rows, size) ** 2
    # There are no more directions than rows.
    directions = wide * posterior_numbers(problem.blocks, "lowrank", min(rank, num_rows))
    # Rows of several folds joined, and the directions of all data while those of others are found.
    joined, of_all = (all_rows, directions) if is_crossfit else (0, 0)
    if mode == "debiased":
        found["magnitudes"] = directions + through
    most = max(OF_EIGH * gram, gram + _OF_QR * directions + of_all)
    found["directions"] = all_rows + joined + most
    return found


def _of_rows(working: Working, narrow: int) -> int:
    """While the rows of a chunk are made: those of blocks before, and one's, joined of slices."""
    most = held_rows = 0
    for block, held in working.measured.items():
        own = narrow * working.examples * working.at_once * block.size
        most = max(most, held + held_rows + 2 * own)
        held_rows += own
    return most
