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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Eigenpairs,
    Factor,
    Rows,
    directional_curvature,
    eigh,
    left_by,
    moments,
    numerical_rank,
    outer,
    pooled,
    resolution,
)
from laplace_debias.curvature.fits.kfac import assemble, exact_sums, fit_diagonal
from laplace_debias.curvature.fits.sums import (
    FactorSums,
    Sums,
    add_to,
    eigenbases,
    factor_sums,
    owners_of,
    shared_bases,
)
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.batches import Fold, Pairs, weight_of
from laplace_debias.curvature.network.inputs import join, take
from laplace_debias.curvature.network.shards import first_places
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.operators.structures.eigen_kronecker import is_thin
from laplace_debias.system.ranks import Ranks


def split_folds(ranks: Ranks, data: Pairs, num_folds: int) -> list[Fold]:
    """Cut the examples into folds: example i of all processes belongs to fold i mod K."""
    batches = list(data)
    places = first_places(ranks, [len(pair[1]) for pair in batches])
    num_examples = sum(ranks.exchange(sum(len(pair[1]) for pair in batches)))
    if not num_examples:
        raise ValueError("The data holds no example: pass at least one batch.")
    if not 2 <= num_folds <= num_examples:
        raise ValueError(
            f"Cross-fitting {num_examples} examples takes 2 to {num_examples} folds, got "
            f"{num_folds}."
        )
    if ranks.size == 1:
        # All batches make one.
        xs, *others = zip(*batches, strict=True)
        batches = [(join(xs), *map(torch.cat, others))]
    start, folds = 0, []
    for number in range(num_folds):
        fold = Fold([], [], 0.0)
        for (x, *others), place in zip(batches, places, strict=False):
            part = slice((number - place) % num_folds, None, num_folds)
            if len(others[0][part]):
                fold.pairs.append((take(x, part), *(of[part] for of in others)))
                before = place + part.start - number + num_folds - 1
                fold.places.append(start + before // num_folds)
        size = sum(ranks.exchange(sum(map(weight_of, fold.pairs))))
        if not size:
            raise ValueError("All examples of a fold have the weight zero: use fewer folds.")
        folds.append(replace(fold, size=size))
        start += (num_examples - number + num_folds - 1) // num_folds
    return folds


# From what ratio of rank and size on a factor's range is worth changing coordinates for.
_MUCH_SMALLER = 0.7


def fit_crossfit(problem: FitContext, data: Pairs, num_folds: int, curvature: str) -> CurvatureFit:
    """Directions from all examples at hand, magnitudes out of fold.

    K-FAC takes one pass over the data, EKFAC two. Both hold the factors of all folds. A factor of
    full rank is decomposed K + 1 times; one of rank r, as few examples of a linear layer give it,
    once, and then K matrices `[r, r]` are. The diagonal's directions are the coordinate axes,
    whatever the data: out of fold or not, its magnitudes are the same.
    """
    folds = split_folds(problem.ranks, data, num_folds)
    if curvature == "diag":
        everything = Fold([], [], 0.0)
        for fold in folds:
            everything.pairs.extend(fold.pairs)
            everything.places.extend(fold.places)
        return fit_diagonal(problem, everything, None)
    of_folds, seen = [], DataTotals()
    for fold in folds:
        sums, of_fold = factor_sums(problem, fold)
        of_folds.append(sums)
        seen = seen + of_fold
    del sums
    if curvature == "ekfac":
        # Of several processes each has the factors of the blocks that it owns.
        totals = {b: (_total(of_folds, b, 0), _total(of_folds, b, 1)) for b in of_folds[0]}
        bases = eigenbases(problem, totals, seen.weight)
        table = exact_crossfit(problem, folds, of_folds, bases)
        of_folds.clear()
        for block, measured in table.items():
            table[block] = bases[block].pooled(measured, problem.dtype)
        return CurvatureFit(assemble(problem, bases, table), seen)
    return CurvatureFit(_of_factors(problem, [fold.size for fold in folds], of_folds), seen)


def _of_factors(
    problem: FitContext, sizes: Sequence[float], of_folds: list[FactorSums]
) -> BlockDiagonal:
    """K-FAC from the factors of the blocks that are here, which are freed on the way."""
    parts: dict[Block, list[Tensor | None]] = {}
    for block in [block for block in problem.blocks if block in of_folds[0]]:
        basis, along = _mean_basis(of_folds, sizes, block), []
        of_block = [sums.pop(block) for sums in of_folds]
        for factors, known in zip(zip(*of_block, strict=True), basis.sides, strict=True):
            along.append(crossfit_magnitudes(factors, sizes, known, problem.dtype))
        parts[block] = [basis.U_G, basis.U_A, basis.pooled(outer(*along), problem.dtype)]
    return _of_all_ranks(problem, parts)[0]


def crossfit_with_replicates(
    problem: FitContext, sizes: Sequence[float], of_folds: Sequence[FactorSums]
) -> list[BlockDiagonal]:
    """K-FAC cross-fitted from factors, the plain one, and replicates without each fold.

    A replicate is for a jackknife. It has the eigenbasis of the other folds, which cross-fitting
    makes anyway. Its magnitudes are the cross-fitted ones, each times the ratio of the other folds'
    eigenvalue to the mean of that over the replicates: so no factor is decomposed for them. `sizes`
    are those of all processes; `of_folds` has the blocks that this process owns, and is kept.
    """
    parts: dict[Block, list[Tensor | None]] = {}
    for block in [block for block in problem.blocks if block in of_folds[0]]:
        basis, sides = _mean_basis(of_folds, sizes, block), []
        for side, known in enumerate(basis.sides):
            factors, others = [sums[block][side] for sums in of_folds], list[Eigenpairs]()
            along = crossfit_magnitudes(factors, sizes, known, problem.dtype, others)
            mean = torch.stack([values for values, _ in others]).mean(0)
            # Where the others have no curvature there is nothing but rounding to compare.
            least = resolution(problem.dtype) * mean.amax(-1, keepdim=True)
            ratios = [torch.where(mean > least, values / mean, 1.0) for values, _ in others]
            of_others = [(along * r, U) for r, (_, U) in zip(ratios, others, strict=True)]
            sides.append([(along, known[1]), *of_others])
        ((along_G, _), (along_A, _)), *without = zip(*sides, strict=True)
        table = basis.pooled(outer(along_G, along_A), problem.dtype)
        plain = outer(basis.along_G, basis.along_A)
        parts[block] = [basis.U_G, basis.U_A, table, basis.U_G, basis.U_A, plain]
        for (along_G, U_G), (along_A, U_A) in without:
            parts[block] += [U_G, U_A, outer(along_G, along_A)]
    return _of_all_ranks(problem, parts)


def _mean_basis(of_folds: Sequence[FactorSums], sizes: Sequence[float], block: Block) -> Eigenbasis:
    """The eigenbasis of a block's factors over all folds."""
    along_G, U_G = eigh(_total(of_folds, block, 0) / sum(sizes), f"factor G of {block.name}")
    along_A, U_A = eigh(_total(of_folds, block, 1) / sum(sizes), f"factor A of {block.name}")
    return Eigenbasis(U_G, U_A, along_G, along_A)


def _total(of_folds: Sequence[FactorSums], block: Block, side: int) -> Factor:
    return reduce(operator.add, [sums[block][side] for sums in of_folds])


def _of_all_ranks(
    problem: FitContext, parts: Mapping[Block, list[Tensor | None]]
) -> list[BlockDiagonal]:
    """Curvatures of the blocks of all processes: `U_G`, `U_A` and magnitudes, one after another."""
    shared = problem.ranks.share(parts, owners_of(problem))
    curvatures: list[dict[str, EigenKronecker]] = []
    for block in problem.blocks:
        of_block = shared.pop(block)
        for number in range(len(of_block) // 3):
            U_G, U_A, magnitudes = of_block[3 * number : 3 * number + 3]
            assert magnitudes is not None
            if number == len(curvatures):
                curvatures.append({})
            found = EigenKronecker(U_G, U_A, magnitudes).to(problem.dtype)
            curvatures[number][block.name] = found
    return [BlockDiagonal(blocks) for blocks in curvatures]


def crossfit_magnitudes(
    factors: Sequence[Factor] | Tensor,
    sizes: Sequence[float],
    known: Eigenpairs | None = None,
    precision: torch.dtype | None = None,
    others_too: list[Eigenpairs] | None = None,
) -> Float[Tensor, "*groups d"]:
    """Out-of-fold curvature of one Kronecker factor, along directions of descending curvature.

    What is measured along directions that the other folds do not determine, those without
    curvature there above all, is averaged over their space; see `directions.pooled`.

    A diagonal factor's directions are the coordinate axes, whatever the data: out of fold or not,
    its magnitudes are its entries.

    Magnitude i is the mean over folds, weighed by their sizes, of the fold's own mean curvature
    along the i-th eigenvector of the other folds; behind thin directions one is for the rest.
    `known` are the eigenpairs of the mean factor; `others_too` takes those of the other folds, fold
    by fold. `precision` is the dtype that the factors were computed in, which says what counts as
    no curvature.
    """
    num_examples = sum(sizes)

    def others(fold: int) -> Factor:
        """The mean factor of the other folds; made anew for each fold, it need not be kept."""
        of_others = reduce(operator.add, (*factors[:fold], *factors[fold + 1 :]))
        return of_others / (num_examples - sizes[fold])

    values, U = eigh(reduce(operator.add, factors) / num_examples) if known is None else known
    if U is None:
        if others_too is not None:
            others_too += [eigh(others(fold)) for fold in range(len(sizes))]
        return values
    precision = values.dtype if precision is None else precision
    within = _Within(values, U, precision)
    magnitudes = torch.zeros_like(values)
    for fold, factor in enumerate(factors):
        of_others, basis = within.eigenpairs(others(fold))
        own = directional_curvature(within.projected(factor), basis)
        measured = within.with_rest(own, factor)
        if others_too is not None:
            others_too.append((of_others, within.lifted(basis)))
        del basis
        # `factor` is a sum over the fold: dividing by all examples weighs the fold by its size.
        magnitudes += pooled(measured, of_others, precision, left_by(U)) / num_examples
    return magnitudes


class _Within:
    """The space in which all folds of a factor have curvature, if it is much the smaller one.

    Every fold's factor is at most the sum of all: it vanishes where that does. So eigenbases of
    others' factors are eigenbases of matrices `[r, r]` in coordinates of the sum's range. The
    factors of groups are small, of different ranks, and stay as they are.
    """

    def __init__(
        self, values: Tensor, U: Float[Tensor, "*groups d r"] | None, precision: torch.dtype | None
    ) -> None:
        assert U is not None
        self.basis: Tensor | None = None
        self.rest: list[Tensor] = []
        self._num_values, self._left = values.shape[-1], left_by(U)
        if is_thin(U):
            self.basis = U
        elif U.ndim == 2:
            rank = max(1, numerical_rank(values, precision))
            if rank <= _MUCH_SMALLER * len(values):
                self.basis, self.rest = U[:, :rank], [U[:, rank:]]

    def projected(self, factor: Factor) -> Float[Tensor, "*groups r r"]:
        """A factor in coordinates of the space."""
        if isinstance(factor, Rows):
            return moments(factor.rows if self.basis is None else factor.rows @ self.basis)
        return factor if self.basis is None else self.basis.T @ factor @ self.basis

    def eigenpairs(
        self, factor: Factor
    ) -> tuple[Float[Tensor, "*groups d"], Float[Tensor, "*groups r r"]]:
        """Eigenvalues of a factor, those of the rest behind them, and eigenvectors in the space."""
        values, basis = eigh(self.projected(factor))
        assert basis is not None
        return self.with_rest(values, factor), basis

    def with_rest(
        self, along: Float[Tensor, "*groups r"], factor: Factor
    ) -> Float[Tensor, "*groups d"]:
        """A factor's curvature along a basis of the space, and behind it that of the rest."""
        rest = 0.0
        if isinstance(factor, Rows) and self._left > 1:
            rest = (
                float((factor.rows.square().sum() + factor.rest - along.sum()).clamp_min(0))
                / self._left
            )
        return F.pad(along, (0, self._num_values - along.shape[-1]), value=rest)

    def lifted(self, basis: Float[Tensor, "*groups r r"]) -> Float[Tensor, "*groups d columns"]:
        """An orthonormal basis of the space, and behind it, if it is not thin, one of the rest."""
        if self.basis is None:
            return basis
        return torch.cat([self.basis @ basis, *self.rest], dim=1)


def exact_crossfit(
    problem: FitContext,
    folds: Sequence[Fold],
    of_folds: list[FactorSums],
    of_all: dict[Block, Eigenbasis],
) -> Sums:
    """EKFAC's magnitudes `[*groups, d_out, d_in]` of every fold along others' bases, averaged."""
    num_examples = sum(fold.size for fold in folds)
    table: Sums = {}
    for number, fold in enumerate(folds):
        bases, others = {}, of_folds[:number] + of_folds[number + 1 :]
        for block in of_folds[0]:
            sides: list[Eigenpairs] = []
            for side, (along, U) in enumerate(of_all[block].sides):
                mean = _total(others, block, side) / (num_examples - fold.size)
                if U is None:
                    sides.append(eigh(mean))
                else:
                    within = _Within(along, U, problem.dtype)
                    values, basis = within.eigenpairs(mean)
                    sides.append((values, within.lifted(basis)))
            (along_G, U_G), (along_A, U_A) = sides
            bases[block] = Eigenbasis(U_G, U_A, along_G, along_A)
        bases = shared_bases(problem, bases)
        of_fold = exact_sums(problem, bases, fold, 0)[0]
        for block in list(of_fold):
            squares = bases.pop(block).pooled(of_fold.pop(block), problem.dtype)
            add_to(table, block, squares / num_examples)
    return table
