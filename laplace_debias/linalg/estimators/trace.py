"""Estimate the trace of an operator by Hutchinson's method, Hutch++ or XTrace."""

from collections.abc import Callable

import torch

from laplace_debias.linalg.checks import check_choice, check_square
from laplace_debias.linalg.estimators.leave_one_out import xtrace
from laplace_debias.linalg.estimators.quadratic_forms import (
    QuadraticForms,
    ValueAndError,
    at_least_rounding,
)
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
    r"""Estimate the trace of a square operator from products with vectors.

    All methods are unbiased, even if the operator is not symmetric.

    - `"hutchinson"`: the mean of $\omega^\top A \omega$ over probes of ±1. Its error decreases as
      $\|A\|_F / \sqrt m$ for any spectrum, where m is the number of probes.
    - `"hutch++"`: exact on the range of a sketch $A\Omega = QR$, and Hutchinson's method on its
      complement. A third of the products compute the sketch, a third compute $AQ$, and the rest are
      for probes, which also determine the standard error. This is best for decaying spectra.
    - `"xtrace"`: half of the products compute a sketch. Each of its probes is also evaluated on the
      complement of the range of the other probes, which needs the other half. For the same number
      of products, this is more precise than Hutch++. The standard error is a jackknife estimate
      over probes. If the spectrum decays fast, it is up to a few times too large, so 95 % intervals
      cover the trace in 94 to 100 % of runs.

    For the first two methods and at least 12 products, 95 % intervals (`Estimate.interval`) covered
    the trace in 93 to 97 % of simulated runs (flat, decaying and indefinite spectra, and low ranks
    with noise). With 12 products, the coverage was 88 to 93 % for operators that are not symmetric,
    and for spectra in which a few eigenvalues make up nearly all of the trace.

    The trace is exact for structured operators, which need no products, and for operators with at
    most `num_matvecs` columns, which need one product per column.

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        num_matvecs: Number of products; at least 3 for Hutch++ and 6 for XTrace, which uses an even
            number.
        generator: Source of randomness, on the operator's device, such as
            `torch.Generator().manual_seed(0)`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the operator is not square, a product is not finite, a name is unknown, a
            number is too small, or the generator is on a different device.

    Reference:
        Hutchinson. A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines. 1989. Meyer, Musco, Musco, Woodruff. Hutch++: optimal stochastic trace
        estimation. SOSA, 2021. Epperly, Tropp, Webber. XTrace: making the most of every sample in
        stochastic trace estimation. SIMAX, 2024.
    """
    n = check_square(A, "trace", generator)
    check_choice(method, _METHODS, "method")
    estimator, least = _METHODS[method]
    whole(num_matvecs, "num_matvecs", least)
    closed_form = exact_trace(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="trace") as products:
        if total == n:
            traces = [columns[rows].trace() for rows, columns in products.columns()]
            return Estimate.exact(torch.stack(traces).sum(), products.count)
        estimate = estimator(products, total, generator)
    return estimate.to_estimate(products.count, A.dtype)


def _hutchinson(products: Products, total: int, generator: torch.Generator | None) -> ValueAndError:
    forms = QuadraticForms(products.operator.is_symmetric, products.operator.dtype)
    for size in products.chunks(total):
        probes = draw(products.operator, size, "rademacher", generator)
        forms.add(probes, products(probes))
    return forms.mean()


def _hutch_plus_plus(
    products: Products, total: int, generator: torch.Generator | None
) -> ValueAndError:
    """Compute the trace on the range of a sketch exactly, and estimate the rest by probes."""
    A = products.operator
    probes = draw(A, total // 3, "rademacher", generator)
    Q = torch.linalg.qr(products(probes)).Q
    terms = (Q * products(Q)).double()
    probes = draw(A, total - products.count, "rademacher", generator)
    images = products(probes - Q @ (Q.T @ probes))
    forms = QuadraticForms(A.is_symmetric, A.dtype)
    forms.add(probes, images - Q @ (Q.T @ images))
    outside = forms.mean()
    magnitude = terms.abs().sum()
    return ValueAndError(
        terms.sum() + outside.value,
        at_least_rounding(outside.standard_error, magnitude, A.dtype),
        outside.degrees_of_freedom,
    )


# Each method with its smallest number of products. Hutch++ needs one product for the sketch, one
# for its basis and one for a probe. XTrace needs three probes, because its jackknife leaves out two
# of them.
_METHODS: dict[str, tuple[Callable[..., ValueAndError], int]] = {
    "hutchinson": (_hutchinson, 1),
    "hutch++": (_hutch_plus_plus, 3),
    "xtrace": (xtrace, 6),
}
