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

from functools import reduce
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.inputs import Inputs, join, take
from laplace_debias.curvature.kfac.directions import Eigenbasis, eigenbasis, eigh
from laplace_debias.curvature.kfac.fit import (
    Batches,
    FactorSums,
    Fitted,
    Problem,
    Sums,
    add_to,
    assemble,
    eigenbases,
    exact_sums,
    factor_sums,
    together,
)
from laplace_debias.curvature.kfac.magnitudes import along

Fold = tuple[Inputs, Tensor]


def fit_crossfit(problem: Problem, data: Batches, num_folds: int, curvature: str) -> Fitted:
    """Directions from all examples at hand, magnitudes out of fold.

    K-FAC takes one pass over the data, EKFAC two. Both decompose every factor K + 1 times and hold
    the factors of all folds.

    Args:
        problem: The network and its blocks.
        data: Batches `(x, y)`; example i belongs to fold i mod K.
        num_folds: K, at least 2.
        curvature: `"kfac"` or `"ekfac"`.

    Raises:
        ValueError: If there are fewer examples than folds; as `sweep`.
    """
    folds = split_folds(data, num_folds)
    starts = list(accumulate((len(y) for _, y in folds), initial=0))
    passes = [
        factor_sums(problem, [fold], first) for fold, first in zip(folds, starts, strict=False)
    ]
    of_folds = [sums for sums, _ in passes]
    seen = reduce(together, (seen for _, seen in passes))
    if curvature == "ekfac":
        table = _exact_magnitudes(problem, folds, starts, of_folds)
    else:
        sizes = torch.tensor([len(y) for _, y in folds]).to(folds[0][1].device)
        table = {}
        for block in problem.blocks:
            G, A = (torch.stack([sums[block][i] for sums in of_folds]) for i in (0, 1))
            table[block] = torch.outer(crossfit_magnitudes(G, sizes), crossfit_magnitudes(A, sizes))
    bases = eigenbases({b: _total(of_folds, b) for b in problem.blocks}, seen.num_examples)
    return Fitted(assemble(problem, bases, table), seen)


def crossfit_magnitudes(factors: Float[Tensor, "folds d *d"], sizes: Tensor) -> Float[Tensor, " d"]:
    """Out-of-fold curvature of one Kronecker factor, along directions of descending curvature.

    A diagonal factor's directions are the coordinate axes, whatever the data: out of fold or not,
    its magnitudes are its entries.

    Args:
        factors: The factor of each fold, summed over its examples, `[K, d, d]`; `[K, d]` for a
            diagonal one.
        sizes: Examples in each fold, `[K]`.

    Returns:
        `[d]`: entry i is the mean over folds, weighed by their sizes, of the fold's own mean
        curvature along the i-th eigenvector of the other folds.
    """
    total, num_examples = factors.sum(0), sizes.sum()
    magnitudes = torch.zeros_like(total[0])
    for factor, size in zip(factors, sizes, strict=True):
        _, basis = eigh((total - factor) / (num_examples - size))
        # `factor` is a sum over the fold: dividing by all examples weighs the fold by its size.
        magnitudes += along(factor, basis) / num_examples
    return magnitudes


def _exact_magnitudes(
    problem: Problem, folds: list[Fold], starts: list[int], of_folds: list[FactorSums]
) -> Sums:
    """EKFAC's magnitudes of every fold along the eigenbases of the others, averaged."""
    num_examples = sum(len(y) for _, y in folds)
    table: Sums = {}
    for fold, first, own in zip(folds, starts, of_folds, strict=False):
        others = num_examples - len(fold[1])
        bases: dict[Block, Eigenbasis] = {}
        for block in problem.blocks:
            G, A = _total(of_folds, block)
            bases[block] = eigenbasis((G - own[block][0]) / others, (A - own[block][1]) / others)
        for block, squares in exact_sums(problem, bases, [fold], first)[0].items():
            add_to(table, block, squares / num_examples)
    return table


def _total(of_folds: list[FactorSums], block: Block) -> tuple[Tensor, Tensor]:
    G, A = zip(*(sums[block] for sums in of_folds), strict=True)
    return torch.stack(G).sum(0), torch.stack(A).sum(0)


def split_folds(data: Batches, num_folds: int) -> list[Fold]:
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
