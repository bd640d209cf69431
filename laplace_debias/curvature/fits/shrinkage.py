r"""Shrunk magnitudes: eigenvalues corrected for their bias in closed form, without folds.

Sample eigenvalues spread: the largest are too large and the smallest too small, by how much depends
on the ratio of dimension and number of rows. Under assumptions on the rows the best value for each
eigenvector is known in the limit of large dimension, and is estimated here from the sample
eigenvalues alone: `shrunk_eigenvalues`. The rows of a factor are not those of the theory: positions
of an example are correlated, and examples weigh differently. So what stands for the number of rows
is measured: `effective_rows`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.crossfit import numerical_rank, split_folds
from laplace_debias.curvature.fits.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.fits.kfac import (
    Batches,
    FactorSums,
    Fitted,
    Problem,
    Seen,
    assemble,
    factor_sums,
    together,
)
from laplace_debias.curvature.layers.blocks import Block

# The kernel of a width of h relative to its eigenvalue must not reach zero: √5 h < 1.
_WIDEST = 0.4
# Of the kernel, 3 / (4√5) · max(0, 1 − x²/5).
_SCALE = 3 / (4 * math.sqrt(5))
# From where on two large terms of its Hilbert transform cancel.
_FAR = 20.0
# From so many times more rows than its rank on, a factor lacks directions for good.
_ROWS_OF_RANK = 1.5


def fit_shrunk(problem: Problem, data: Batches, num_folds: int) -> Fitted:
    """K-FAC with shrunk eigenvalues: one pass over the data, one eigendecomposition a factor.

    Args:
        problem: The network and its blocks.
        data: Batches `(x, y)`; example i belongs to group i mod `num_folds`.
        num_folds: How many groups the effective number of rows is found from, at least 2, or one an
            example if there are fewer; of their factors nothing is kept but a norm.

    Raises:
        ValueError: If there are fewer than two examples; as `sweep`.
    """
    data = list(data)
    num_examples = sum(len(y) for _, y in data)
    if num_examples == 1:
        raise ValueError("Shrinkage is by how much examples differ: it takes at least 2, got 1.")
    num_folds = max(2, min(num_folds, num_examples))
    totals: FactorSums = {}
    squares: dict[Block, list[Tensor]] = {}
    seen = Seen(0, 0.0)
    sizes = []
    for fold in split_folds(data, num_folds):
        sums, of_fold = factor_sums(problem, [fold], seen.num_examples)
        size = of_fold.num_examples
        sizes.append(size)
        seen = together(seen, of_fold)
        for block, factors in sums.items():
            norms = torch.stack([factor.square().sum() / size for factor in factors])
            if block not in totals:
                totals[block], squares[block] = factors, [norms]
                continue
            for total, factor in zip(totals[block], factors, strict=True):
                total += factor
            squares[block].append(norms)
    bases: dict[Block, Eigenbasis] = {}
    table: dict[Block, Tensor] = {}
    for block in list(totals):
        means = [total / seen.num_examples for total in totals.pop(block)]
        spread = torch.stack(squares.pop(block)).sum(0)
        basis = eigenbasis(means[0], means[1], block.name)
        shrunk = []
        for mean, norms, values in zip(means, spread, (basis.along_G, basis.along_A), strict=True):
            if mean.ndim == 1:
                # Coordinate axes are not chosen by the data, so their curvature is not biased.
                shrunk.append(values)
                continue
            rows = effective_rows(mean, norms, seen.num_examples, len(sizes))
            shrunk.append(shrunk_eigenvalues(values, rows, problem.dtype))
        bases[block] = basis
        table[block] = torch.outer(*shrunk)
    return Fitted(assemble(problem, bases, table), seen)


def effective_rows(
    mean: Float[Tensor, "d d"], squares: Float[Tensor, ""], num_examples: int, num_folds: int
) -> float:
    r"""How many independent Gaussian rows would make a factor as uncertain as it is.

    The mean of n independent Gaussian rows' products has
    $\mathrm E\lVert S - \Sigma\rVert_F^2 = ((\operatorname{tr}\Sigma)^2 +
    \lVert\Sigma\rVert_F^2)/n$. The left-hand side is estimated without bias from how much the
    factors of the groups differ; so correlated positions count for less than one row each, and
    examples of unequal weight for less than one each.

    Args:
        mean: S, the mean factor over all examples.
        squares: `Σ_k ‖F_k‖² / m_k` of the groups' summed factors F_k over their m_k examples.
        num_examples: How many examples.
        num_folds: How many groups, at least 2.

    Returns:
        The number of rows, infinite where the groups do not differ.
    """
    norm = mean.square().sum().item()
    variance = (squares.item() - num_examples * norm) / (num_folds - 1) / num_examples
    if variance <= 16 * torch.finfo(mean.dtype).eps * norm:
        return math.inf
    return (mean.trace().item() ** 2 + max(0.0, norm - variance)) / variance


def shrunk_eigenvalues(
    values: Float[Tensor, " d"], num_rows: float, precision: torch.dtype | None = None
) -> Float[Tensor, " d"]:
    r"""Analytical nonlinear shrinkage of sample eigenvalues.

    With the kernel estimate f of the density of the sample eigenvalues and its Hilbert transform
    $\mathcal H f$, and $c = d/n$,

    $$\tilde d_i = \frac{\lambda_i}{(\pi c\lambda_i f(\lambda_i))^2 +
    (1 - c - \pi c\lambda_i\,\mathcal H f(\lambda_i))^2}.$$

    Assumes uncentred rows that are independent linear images of vectors with independent entries.
    A matrix of lower rank r than its size d is one of r rows, and all its null directions get the
    same curvature, unless there are clearly more rows than that: then it has none along them.

    Args:
        values: Sample eigenvalues, descending.
        num_rows: n, the number of independent rows that they are from; infinite for none to shrink.
        precision: What the matrix was computed in, which says what counts as zero; the values' own
            dtype if None.

    Returns:
        Estimated curvature along each of the eigenvectors, in the order of `values`.

    Raises:
        ValueError: If the number of rows is not positive.

    Reference:
        Ledoit, Wolf (2020), "Analytical nonlinear shrinkage of large-dimensional covariance
        matrices", Annals of Statistics 48(5).
    """
    if not num_rows > 0:
        raise ValueError(f"num_rows is {num_rows}; expected a positive number of rows")
    rank = numerical_rank(values, precision)
    # One eigenvalue is a mean, which is not biased.
    if math.isinf(num_rows) or rank == 0 or len(values) == 1:
        return values
    has_null = rank < len(values) and num_rows < _ROWS_OF_RANK * rank
    rows = float(rank) if has_null else num_rows
    positive = values[:rank].double()
    h = min(rows ** (-1 / 3), _WIDEST)
    widths = h * positive
    x = (positive[:, None] - positive) / widths
    inside = 1 - x.square() / 5
    density = (_SCALE * inside.clamp_min(0) / widths).mean(1)
    hilbert = (_hilbert_of_kernel(x) / (math.pi * widths)).mean(1)
    c = rank / rows
    denominator = (math.pi * c * positive * density).square() + (
        1 - c - math.pi * c * positive * hilbert
    ).square()
    shrunk = torch.zeros_like(values, dtype=torch.float64)
    shrunk[:rank] = positive / denominator
    if has_null:
        reach = math.sqrt(5) * h
        log = math.log((1 + reach) / (1 - reach))
        at_zero = (
            0.3 / h**2 + _SCALE / h * (1 - 1 / (5 * h**2)) * log
        ) * positive.reciprocal().mean()
        shrunk[rank:] = rank / ((len(values) - rank) * at_zero)
    return shrunk.to(values.dtype)


def _hilbert_of_kernel(x: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    r"""π times the Hilbert transform of the kernel, $\mathrm{PV}\!\int k(t)/(t - x)\,dt$."""
    root = math.sqrt(5)
    log = ((root - x) / (root + x)).abs().log()
    # At the kernel's edge, |x| = √5, the logarithm is infinite and its factor zero.
    edge = torch.where(log.isfinite(), (1 - x.square() / 5) * log, torch.zeros_like(x))
    near = _SCALE * edge - 0.3 * x
    u = root / x
    series = [2 / ((2 * k + 1) * (2 * k + 3)) * u ** (2 * k + 1) for k in range(8)]
    far = -2 * _SCALE * torch.stack(series).sum(0)
    return torch.where(x.abs() > _FAR, far, near)
