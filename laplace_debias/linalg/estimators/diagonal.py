"""The diagonal of an operator, by Hutchinson's probes."""

import torch

from laplace_debias.linalg.checks import check_square
from laplace_debias.linalg.estimators.quadratic_forms import RunningMoments, at_least_rounding
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_diagonal
from laplace_debias.system.checks import whole


def diagonal(
    A: LinearOperator,
    num_matvecs: int = 100,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""The diagonal of a square operator, from its products; unbiased.

    It is the mean of $\omega \odot A\omega$ over probes ω of ±1. Intervals of 95 %
    (`Estimate.interval`) cover an entry in 93 to 97 % of runs from 12 products on.

    A structured operator's diagonal is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        num_matvecs: Products to use.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: `num_matvecs` is not a whole number.
        ValueError: The operator is not square or a product not finite, the number too small, or the
            generator on another device.

    Reference:
        Bekas, Kokiopoulou, Saad. An estimator for the diagonal of a matrix. Applied Numerical
        Mathematics, 2007.
    """
    n = check_square(A, "diagonal", generator)
    whole(num_matvecs, "num_matvecs")
    closed_form = exact_diagonal(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="diagonal") as products:
        if total == n:
            diagonals = [columns[rows].diagonal() for rows, columns in products.columns()]
            return Estimate.exact(torch.cat(diagonals), products.count)
        # Mean and squared deviations, not the samples: they are `[n, m]`.
        moments = RunningMoments()
        for size in products.chunks(total):
            probes = draw(A, size, "rademacher", generator)
            moments.add(probes * products(probes))
    standard_error = torch.full_like(moments.mean, torch.inf)
    if total > 1:
        standard_error = (moments.deviations / (total - 1) / total).sqrt()
        standard_error = at_least_rounding(standard_error, moments.mean.abs())
    return Estimate(moments.mean, standard_error, total, degrees_of_freedom=total - 1.0)
