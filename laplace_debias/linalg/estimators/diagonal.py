"""The diagonal of an operator, by Hutchinson's probes or XDiag."""

from collections.abc import Callable

import torch

from laplace_debias.linalg.checks import check_choice, check_square
from laplace_debias.linalg.estimators.leave_one_out import ValueAndError, xdiag
from laplace_debias.linalg.estimators.quadratic_forms import RunningMoments, at_least_rounding
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_diagonal
from laplace_debias.system.checks import whole


def diagonal(
    A: LinearOperator,
    method: str = "hutchinson",
    num_matvecs: int = 100,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimate a square operator's diagonal without bias, by products with vectors.

    - `"hutchinson"`: the mean of $\omega \odot A\omega$ over probes ω of ±1. Intervals of 95 %
      (`Estimate.interval`) cover an entry in 93 to 97 % of runs from 12 products on.
    - `"xdiag"`: half of the products make a sketch of the range, the other half are products of the
      adjoint with its basis. Each probe is also tested outside the range of the others. Best on
      decaying spectra. Its standard error is the jackknife's over probes.

    A structured operator's diagonal is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"` or `"xdiag"`.
        num_matvecs: Products to use; XDiag needs 6 and uses an even number.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: `num_matvecs` is not a whole number.
        ValueError: The operator is not square or a product not finite, the number too small, or the
            generator on another device; or `method` is unknown.

    Reference:
        Bekas, Kokiopoulou, Saad. An estimator for the diagonal of a matrix. Applied Numerical
        Mathematics, 2007. Epperly, Tropp, Webber. XTrace: making the most of every sample in
        stochastic trace estimation. SIMAX, 2024.
    """
    n = check_square(A, "diagonal", generator)
    check_choice(method, _METHODS, "method")
    estimate, least = _METHODS[method]
    whole(num_matvecs, "num_matvecs", least)
    closed_form = exact_diagonal(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="diagonal") as products:
        if total == n:
            diagonals = [columns[rows].diagonal() for rows, columns in products.columns()]
            return Estimate.exact(torch.cat(diagonals), products.count)
        mean, standard_error, degrees = estimate(products, total, generator)
        return Estimate(mean, standard_error, products.count, degrees_of_freedom=degrees)


def _hutchinson(products: Products, total: int, generator: torch.Generator | None) -> ValueAndError:
    # Mean and squared deviations, not the samples: they are `[n, m]`.
    moments = RunningMoments()
    for size in products.chunks(total):
        probes = draw(products.operator, size, "rademacher", generator)
        moments.add(probes * products(probes))
    standard_error = torch.full_like(moments.mean, torch.inf)
    if total > 1:
        standard_error = (moments.deviations / (total - 1) / total).sqrt()
        standard_error = at_least_rounding(standard_error, moments.mean.abs())
    return moments.mean, standard_error, torch.full_like(moments.mean, total - 1.0)


# With the fewest products: XDiag leaves out two of its probes for the jackknife.
_METHODS: dict[str, tuple[Callable[..., ValueAndError], int]] = {
    "hutchinson": (_hutchinson, 1),
    "xdiag": (xdiag, 6),
}
