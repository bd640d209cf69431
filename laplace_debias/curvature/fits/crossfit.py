"""Cross-fitted magnitudes: every example serves directions and magnitudes, never both at once.

Two batches waste each half of the data on one of the two roles. Cross-fitting takes the directions
from all examples, and measures how much smaller (and, at the other end, larger) magnitudes are on
examples that the directions do not know: for each of K folds the eigenbasis of the other folds is
measured on the fold, and the K lists of curvatures, each in the order of its own eigenvalues, are
averaged. In the statistics of covariance matrices this is cross-validated shrinkage of the
eigenvalues (Bartz, 2016, "Advances in high-dimensional covariance matrix estimation"); the two
batches are the split-sample estimator (Lam, 2016, "Nonparametric eigenvalue-regularized precision
or covariance matrix estimator").
"""

import operator
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis, eigh, outer, pooled
from laplace_debias.curvature.fits.kfac import FITS, assemble, exact_sums, fit_diagonal
from laplace_debias.curvature.fits.magnitudes import directional_curvature
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.fits.sums import FactorSums, Sums, add_to, eigenbases, factor_sums
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import Inputs, join, take

Fold = tuple[Inputs, Tensor]
# Eigenvalues, descending, and eigenvectors; of a diagonal factor its entries and None.
FactorEigenpairs = tuple[Tensor, Tensor | None]
# From what ratio of rank and size on a factor's range is worth changing coordinates for.
_MUCH_SMALLER = 0.7


def fit_crossfit(problem: Problem, data: Pairs, num_folds: int, curvature: str) -> CurvatureFit:
    """Directions from all examples at hand, magnitudes out of fold.

    K-FAC takes one pass over the data, EKFAC two. Both hold the factors of all folds. A factor of
    full rank is decomposed K + 1 times; one of rank r, as few examples of a linear layer give it,
    once, and then K matrices `[r, r]` are. The diagonal's directions are the coordinate axes,
    whatever the data: out of fold or not, its magnitudes are the same.

    Args:
        problem: The network and its blocks.
        data: Pairs `(x, y)`; example i belongs to fold i mod K.
        num_folds: K, at least 2.
        curvature: `"kfac"`, `"ekfac"` or `"diag"`.

    Raises:
        ValueError: For another curvature; if there are fewer examples than folds; as `sweep`.
    """
    if curvature not in FITS:
        raise ValueError(f"Unknown curvature={curvature!r}: use one of {', '.join(FITS)}.")
    folds = split_folds(data, num_folds)
    if curvature == "diag":
        return fit_diagonal(problem, folds, None)
    starts = list(accumulate((len(y) for _, y in folds), initial=0))
    passes = [
        factor_sums(problem, [fold], first) for fold, first in zip(folds, starts, strict=False)
    ]
    of_folds = [sums for sums, _ in passes]
    seen = reduce(operator.add, (seen for _, seen in passes))
    del passes
    bases: dict[Block, Eigenbasis] = {}
    table: Sums = {}
    if curvature == "ekfac":
        bases = eigenbases({b: _total(of_folds, b) for b in problem.blocks}, seen.num_examples)
        table = exact_crossfit(problem, folds, starts, of_folds, bases)
        table = {block: bases[block].pooled(table[block], problem.dtype) for block in table}
        return CurvatureFit(assemble(problem, bases, table), seen)
    device = problem.model.get_parameter(problem.blocks[0].parameters[0]).device
    sizes = torch.tensor([len(y) for _, y in folds]).to(device)
    for block in problem.blocks:
        # A block's factors are freed once it is done with.
        sides = zip(*(sums.pop(block) for sums in of_folds), strict=True)
        G, A = (torch.stack(factors) for factors in sides)
        basis = eigenbasis(G.sum(0) / seen.num_examples, A.sum(0) / seen.num_examples, block.name)
        along_G, along_A = (
            crossfit_magnitudes(factors, sizes, known, problem.dtype)
            for factors, known in zip((G, A), _eigenpairs(basis), strict=True)
        )
        bases[block] = basis
        table[block] = basis.pooled(outer(along_G, along_A), problem.dtype)
    return CurvatureFit(assemble(problem, bases, table), seen)


def crossfit_magnitudes(
    factors: Float[Tensor, "folds *groups d d"] | Float[Tensor, "folds d"],
    sizes: Tensor,
    known: FactorEigenpairs | None = None,
    precision: torch.dtype | None = None,
) -> Float[Tensor, "*groups d"]:
    """Out-of-fold curvature of one Kronecker factor, along directions of descending curvature.

    What is measured along directions that the other folds do not determine, those without
    curvature there above all, is averaged over their space; see `directions.pooled`.

    A diagonal factor's directions are the coordinate axes, whatever the data: out of fold or not,
    its magnitudes are its entries.

    Args:
        factors: The factor of each fold, summed over its examples, `[K, *groups, d, d]`; `[K, d]`
            for a diagonal one.
        sizes: Examples in each fold, `[K]`.
        known: Eigenvalues, descending, and eigenvectors of the mean factor, if they are known.
        precision: What the factors were computed in, which says what counts as no curvature; their
            own dtype if None.

    Returns:
        `[*groups, d]`: entry i is the mean over folds, weighed by their sizes, of the fold's own
        mean curvature along the i-th eigenvector of the other folds.
    """
    num_examples = sizes.sum()
    total = factors.sum(0)
    if factors.ndim == 2:
        return total / num_examples
    precision = factors.dtype if precision is None else precision
    values, U = eigh(total / num_examples) if known is None else known
    within = _Within(values, U, precision)
    magnitudes = torch.zeros_like(values)
    for factor, size in zip(factors, sizes, strict=True):
        own = within.projected(factor)
        others = within.projected(total) - own
        of_others, basis = eigh(others / (num_examples - size))
        rest = (0, values.shape[-1] - of_others.shape[-1])
        measured = F.pad(directional_curvature(own, basis), rest)
        # `factor` is a sum over the fold: dividing by all examples weighs the fold by its size.
        magnitudes += pooled(measured, F.pad(of_others, rest), precision) / num_examples
    return magnitudes


def numerical_rank(values: Float[Tensor, " d"], precision: torch.dtype | None = None) -> int:
    """How many eigenvalues of a matrix are above the rounding of what it was computed in.

    Args:
        values: Eigenvalues, descending.
        precision: The dtype of the computation; that of `values` if None.
    """
    if not len(values):
        return 0
    computed = torch.finfo(values.dtype if precision is None else precision).eps
    # Sums of rounded products are off by few units of rounding of the largest eigenvalue, of which
    # a decomposition in double precision is off by a few times the square root of the size.
    decomposed = 4 * len(values) ** 0.5 * torch.finfo(torch.float64).eps
    return int((values > max(8 * computed, decomposed) * values[0]).sum())


class _Within:
    """The space in which all folds of a factor have curvature, if it is much the smaller one.

    Every fold's factor is at most the sum of all: it vanishes where that does. So eigenbases of
    others' factors are eigenbases of matrices `[r, r]` in coordinates of the sum's range.

    Args:
        values: Eigenvalues of the mean factor, descending.
        U: Its eigenvectors. The factors of groups are small, of different ranks, and stay as they
            are.
        precision: What the factors were computed in.
    """

    def __init__(
        self, values: Tensor, U: Float[Tensor, "*groups d d"] | None, precision: torch.dtype | None
    ) -> None:
        assert U is not None
        if U.ndim > 2:
            self.basis = None
            return
        rank = max(1, numerical_rank(values, precision))
        self.basis = U[:, :rank] if rank <= _MUCH_SMALLER * len(values) else None
        self.rest = U[:, rank:]

    def projected(self, factor: Float[Tensor, "*groups d d"]) -> Float[Tensor, "*groups r r"]:
        """A factor in coordinates of the space."""
        return factor if self.basis is None else self.basis.T @ factor @ self.basis

    def lifted(self, basis: Float[Tensor, "*groups r r"]) -> Float[Tensor, "*groups d d"]:
        """An orthonormal basis of the space, and behind it one of the rest."""
        return basis if self.basis is None else torch.cat([self.basis @ basis, self.rest], dim=1)


def exact_crossfit(
    problem: Problem,
    folds: Sequence[Fold],
    starts: Sequence[int],
    of_folds: list[FactorSums],
    of_all: dict[Block, Eigenbasis],
) -> Sums:
    """EKFAC's magnitudes of every fold along the eigenbases of the others, averaged.

    Args:
        problem: The network and its blocks.
        folds: The examples of each fold.
        starts: Position of each fold's first example in all data of the fit.
        of_folds: Each fold's factors.
        of_all: The eigenbases of all folds together.

    Returns:
        `[*groups, d_out, d_in]` of each block.
    """
    num_examples = sum(len(y) for _, y in folds)
    totals = {block: _total(of_folds, block) for block in problem.blocks}
    table: Sums = {}
    for fold, first, own in zip(folds, starts, of_folds, strict=False):
        bases: dict[Block, Eigenbasis] = {}
        for block in problem.blocks:
            sides = zip(totals[block], own[block], _eigenpairs(of_all[block]), strict=True)
            (along_G, U_G), (along_A, U_A) = (
                _basis_of_others(total, mine, known, num_examples - len(fold[1]), problem.dtype)
                for total, mine, known in sides
            )
            bases[block] = Eigenbasis(U_G, U_A, along_G, along_A)
        for block, squares in exact_sums(problem, bases, [fold], first)[0].items():
            add_to(table, block, bases[block].pooled(squares, problem.dtype) / num_examples)
    return table


def _basis_of_others(
    total: Tensor, own: Tensor, known: FactorEigenpairs, num_others: int, precision: torch.dtype
) -> FactorEigenpairs:
    """Eigenvalues and eigenvectors of the mean factor of the other folds."""
    if total.ndim == 1:
        return (total - own) / num_others, None
    within = _Within(*known, precision)
    values, basis = eigh((within.projected(total) - within.projected(own)) / num_others)
    assert basis is not None
    return F.pad(values, (0, total.shape[-1] - values.shape[-1])), within.lifted(basis)


def _eigenpairs(basis: Eigenbasis) -> tuple[FactorEigenpairs, FactorEigenpairs]:
    return (basis.along_G, basis.U_G), (basis.along_A, basis.U_A)


def _total(of_folds: list[FactorSums], block: Block) -> tuple[Tensor, Tensor]:
    G, A = zip(*(sums[block] for sums in of_folds), strict=True)
    return reduce(torch.add, G), reduce(torch.add, A)


def split_folds(data: Pairs, num_folds: int) -> list[Fold]:
    """Cut the examples into folds.

    Raises:
        ValueError: If there are fewer examples than folds, or fewer than two folds.
    """
    batches = list(data)
    if not batches:
        raise ValueError("The data holds no example: pass at least one batch.")
    x, y = join([x for x, _ in batches]), torch.cat([y for _, y in batches])
    if not 2 <= num_folds <= len(y):
        raise ValueError(
            f"Cross-fitting {len(y)} examples takes 2 to {len(y)} folds, got {num_folds}."
        )
    return [(take(x, slice(k, None, num_folds)), y[k::num_folds]) for k in range(num_folds)]
