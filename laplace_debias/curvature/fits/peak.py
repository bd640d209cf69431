"""The most memory that a fit of blocks holds at once: each of its stages, added up.

What is held for certain (sums, eigenbases, magnitudes) is counted by its shape, block after block
as the fit goes through them. A pass' working memory is that of a chunk (`working`), and of the
copies that the code makes of a block's factor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laplace_debias.curvature.fits.costs import decomposed, sides, table_numbers
from laplace_debias.curvature.fits.peak_of_pass import of_exact_pass, of_factor_pass
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.layers.blocks import Block

# Matrices of a factor's size while it is decomposed, it included: a scaled copy, the eigenvectors,
# and LAPACK's working space of two or the two that check the result.
OF_EIGH = 5
# While magnitudes are averaged over directions that data cannot tell apart: weights of all pairs.
_OF_POOLING = 3


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a block's parts in `factor_dtype`.

    Attributes:
        G: The factor G, or its eigenvectors.
        A: The factor A.
        table: Magnitudes.
        decomposed: The largest matrices that are decomposed on the sides of G and A, 0 for none.
        narrow: All three in the model's dtype; 0 if that is the same, and nothing is copied.
    """

    G: int
    A: int
    table: int
    decomposed: tuple[int, int]
    narrow: int

    @property
    def factors(self) -> int:
        """Both factors."""
        return self.G + self.A

    def eigenbasis(self, of_mean: int = 1) -> int:
        """While both sides are decomposed, beside the sums: the means, and what `eigh` takes."""
        of_G, of_A = self.decomposed
        held = of_mean * self.factors
        return held + max((OF_EIGH - 1) * of_G, self.G + (OF_EIGH - 1) * of_A)

    @property
    def pooling(self) -> int:
        """While the table is averaged over directions, beside the table."""
        return _OF_POOLING * max(self.decomposed) + 2 * self.table


def stages(
    problem: Problem,
    curvature: str,
    mode: str,
    working: Working,
    second: Working,
    num_batches: int | None,
    folds: int,
) -> dict[str, int]:
    """Bytes at most in every stage of a fit, beyond the model and the data.

    Args:
        problem: The network and its blocks.
        curvature: `"kfac"`, `"ekfac"` or `"diag"`.
        mode: As `Laplace` takes it.
        working: A chunk of a pass that sums factors.
        second: A chunk of a pass that measures exact curvature along directions.
        num_batches: How many batches are read; None if it is not known.
        folds: Of `"crossfit"`.
    """
    blocks = [_bytes_of(block, problem) for block in problem.blocks]
    table = sum(b.table for b in blocks)
    if curvature == "diag":
        measured = of_exact_pass(problem, second, table, num_batches)
        return {"curvature along the axes": measured, "posterior": _assembled(blocks, False)}
    factors = sum(b.factors for b in blocks)
    is_crossfit = mode == "crossfit"
    # The factors of the folds before.
    before = (folds - 1) * factors if is_crossfit else 0
    found = {"factors": before + of_factor_pass(problem, working, num_batches)}
    rotations = factors * problem.dtype.itemsize // problem.factor_dtype.itemsize
    rotations = 0 if problem.dtype == problem.factor_dtype else rotations
    if is_crossfit and curvature == "kfac":
        found["eigendecompositions and magnitudes"] = max(_crossfit(blocks, folds))
    elif is_crossfit:
        of_others = max(_of_others(list(reversed(blocks))))
        largest = max(b.eigenbasis() for b in blocks)
        # The folds' factors; the eigenbases of all together, and those of the others.
        held = folds * factors + factors
        found["eigendecompositions"] = held + max(largest, of_others)
        # The sums of one fold come beside those of the folds before.
        of_pass = of_exact_pass(problem, second, table, num_batches)
        found["magnitudes"] = held + factors + max(rotations + table + of_pass, _pooled(blocks))
    else:
        found["eigendecompositions"] = factors + max(b.eigenbasis() for b in blocks)
        if curvature == "ekfac":
            of_pass = rotations + of_exact_pass(problem, second, table, num_batches)
            found["magnitudes"] = factors + max(of_pass, _pooled(blocks))
        elif mode == "debiased":
            # Factors are projected: a product with the basis, and that with the basis once more.
            of_pass = of_factor_pass(problem, working, num_batches, projected=2)
            found["magnitudes"] = factors + max(of_pass, _pooled(blocks))
    found["posterior"] = _assembled(blocks, True)
    return found


def _bytes_of(block: Block, problem: Problem) -> _Bytes:
    wide, narrow = problem.factor_dtype.itemsize, problem.dtype.itemsize
    G, A = sides(block)
    table = table_numbers(block)
    sizes = decomposed(block)
    of_G = 0 if block.has_diagonal_G else sizes[0]
    of_A = sizes[-1] if len(sizes) == 2 or (sizes and block.has_diagonal_G) else 0
    each = tuple(wide * block.num_groups * d * d for d in (of_G, of_A))
    converted = 0 if problem.dtype == problem.factor_dtype else narrow * (G + A + table)
    return _Bytes(wide * G, wide * A, wide * table, (each[0], each[1]), converted)


def _pooled(blocks: Sequence[_Bytes]) -> int:
    """While magnitudes are averaged, beside the eigenbases."""
    return sum(b.table for b in blocks) + max(b.pooling for b in blocks)


def _assembled(blocks: Sequence[_Bytes], has_bases: bool) -> int:
    """While eigenbases and magnitudes are converted to the model's dtype, block by block."""

    def of(b: _Bytes) -> int:
        return b.table + (b.factors if has_bases else 0)

    held = most = sum(map(of, blocks))
    for b in blocks:
        converted = b.narrow * of(b) // (b.table + b.factors)
        most = max(most, held + converted)
        held += converted - (of(b) if converted else 0)
    return most


def _crossfit(blocks: Sequence[_Bytes], folds: int) -> Iterator[int]:
    """K-FAC: the folds' factors are stacked, decomposed and freed block by block."""
    held = folds * sum(b.factors for b in blocks)
    for b in blocks:
        stacked = folds * b.factors
        yield held + folds * max(b.G, b.A)
        yield held + b.eigenbasis()
        # Beside both bases the others' mean factor is decomposed, first G, then A.
        of_G, of_A = (OF_EIGH * of_side for of_side in b.decomposed)
        yield held + b.factors + max(of_G, of_A - folds * b.G)
        held += b.factors - stacked
        yield held + b.table + b.pooling
        held += b.table


def _of_others(blocks: Sequence[_Bytes]) -> Iterator[int]:
    """EKFAC: eigenbases of the other folds, block by block, from sums that are made anew."""
    held = 0
    for b in blocks:
        of_G, of_A = b.decomposed
        yield held + b.factors + max(OF_EIGH * of_G, b.G + OF_EIGH * of_A)
        held += b.factors
