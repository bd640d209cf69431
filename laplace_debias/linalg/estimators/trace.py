"""The trace of an operator: Hutchinson, Hutch++ and XTrace."""

from collections.abc import Callable

import torch

from laplace_debias.linalg.checks import check_choice, check_square
from laplace_debias.linalg.estimators.leave_one_out import ValueAndError, xtrace
from laplace_debias.linalg.estimators.quadratic_forms import QuadraticForms, at_least_rounding
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_trace
from laplace_debias.system.checks import whole


def trace(
    A: LinearOperator,
    method: str = "hutchinson",
    num_matvecs: int = 100,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimate the trace of a square operator by products with vectors.

    All methods are unbiased, for operators that are not symmetric too.

    - `"hutchinson"`: the mean of $\omega^\top A \omega$ over probes of ±1. Its error falls as
      $\|A\|_F / \sqrt m$ whatever the spectrum.
    - `"hutch++"`: exact on the range of a sketch $A\Omega = QR$, Hutchinson on the rest. A third of
      the products makes the sketch, a third $AQ$, the rest are probes, whose standard error is
      that of the estimate. Best on decaying spectra.
    - `"xtrace"`: half of the products make a sketch. Each of its probes is also tested outside the
      range of the others, which takes the other half. More precise than Hutch++ after as many
      products. Its standard error is the jackknife's over probes. It is up to a few times too large
      if the spectrum decays fast, so that 95 % intervals cover in 94 to 100 % of runs.

    Intervals of 95 % (`Estimate.interval`) of the first two methods cover the trace in 93 to 97 %
    of runs from 12 products on, in simulations of flat, decaying, indefinite spectra and low ranks
    with noise. For operators that are not symmetric, and if few eigenvalues are nearly all of the
    trace, intervals after 12 products cover in 88 to 93 %.

    A structured operator's trace is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        num_matvecs: Products to use; Hutch++ needs 3, XTrace 6. XTrace uses an even number.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The operator is not square or a product not finite, a name is unknown, a number
            too small, or the generator on another device.

    Reference:
        Hutchinson. A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines. 1989. Meyer, Musco, Musco, Woodruff. Hutch++: optimal stochastic trace
        estimation. SOSA, 2021. Epperly, Tropp, Webber. XTrace: making the most of every sample in
        stochastic trace estimation. SIMAX, 2024.
    """
    n = check_square(A, "trace", generator)
    check_choice(method, _METHODS, "method")
    estimate, least = _METHODS[method]
    whole(num_matvecs, "num_matvecs", least)
    closed_form = exact_trace(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="trace") as products:
        if total == n:
            traces = [columns[rows].trace() for rows, columns in products.columns()]
            return Estimate.exact(torch.stack(traces).sum(), products.count)
        mean, standard_error, degrees = estimate(products, total, generator)
        return Estimate(mean, standard_error, products.count, degrees_of_freedom=degrees)


def _hutchinson(products: Products, total: int, generator: torch.Generator | None) -> ValueAndError:
    forms = QuadraticForms(products.operator.is_symmetric)
    for size in products.chunks(total):
        probes = draw(products.operator, size, "rademacher", generator)
        forms.add(probes, products(probes))
    return forms.mean()


def _hutch_plus_plus(
    products: Products, total: int, generator: torch.Generator | None
) -> ValueAndError:
    A = products.operator
    probes = draw(A, total // 3, "rademacher", generator)
    Q = torch.linalg.qr(products(probes)).Q
    terms = Q * products(Q)
    probes = draw(A, total - products.count, "rademacher", generator)
    images = products(probes - Q @ (Q.T @ probes))
    forms = QuadraticForms(A.is_symmetric)
    forms.add(probes, images - Q @ (Q.T @ images))
    mean, standard_error, degrees = forms.mean()
    return terms.sum() + mean, at_least_rounding(standard_error, terms.abs().sum()), degrees


# With the fewest products: Hutch++ needs one for each of the sketch, its basis and a probe.
# XTrace leaves out two of its probes for the jackknife.
_METHODS: dict[str, tuple[Callable[..., ValueAndError], int]] = {
    "hutchinson": (_hutchinson, 1),
    "hutch++": (_hutch_plus_plus, 3),
    "xtrace": (xtrace, 6),
}
