"""The trace of an operator: Hutchinson, Hutch++ and XTrace."""

from collections.abc import Callable

import torch
from torch import Tensor

from laplace_debias.linalg.checks import (
    check_at_least,
    check_choice,
    check_finite,
    check_generator,
    check_square,
)
from laplace_debias.linalg.estimators.quadratic_forms import QuadraticForms
from laplace_debias.linalg.estimators.sketch import LeftOutPairs, RangeSketch
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_trace


def trace(
    A: LinearOperator,
    method: str = "hutchinson",
    num_matvecs: int = 100,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""The trace of a square operator, from products alone.

    All three methods are unbiased, for operators that are not symmetric too.

    - `"hutchinson"`: the mean of $\omega^\top A \omega$ over probes of ±1. Its error falls as
      $\|A\|_F / \sqrt m$ whatever the spectrum.
    - `"hutch++"`: exact on the range of a sketch $A\Omega = QR$, Hutchinson on the rest. A third of
      the products makes the sketch, a third $AQ$, the rest are probes, whose standard error is
      that of the estimate.
    - `"xtrace"`: every probe in turn is left out of the sketch and used on what the others miss;
      the mean over all of them. Best on decaying spectra. Its standard error allows for the
      estimates' dependence, which the paper's leaves out; on nearly constant spectra it is too
      large.

    Intervals of 95 % (`Estimate.interval`) cover the trace in 93 to 97 % of runs from 12 products
    on, in simulations of flat, decaying, indefinite spectra and low ranks with noise. XTrace's
    cover in 99 % where few outliers stand over a nearly constant rest, in 90 % where a single one
    stands a thousand times over it. For operators that are not symmetric, and where few eigenvalues
    are nearly all of the trace, intervals after 12 products cover in 88 to 93 %.

    A structured operator's trace is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        num_matvecs: Products to use; Hutch++ needs 3, XTrace 4 and uses an even number.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The operator is not square or a product not finite, a name is unknown, a number
            too small, or the generator on another device.

    Reference:
        Hutchinson. A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines. 1989. Meyer, Musco, Musco, Woodruff. Hutch++: optimal stochastic trace
        estimation. SOSA, 2021. Epperly, Tropp, Webber. XTrace. SIMAX, 2024.
    """
    n = check_square(A, "trace")
    check_choice(method, _METHODS, "method")
    estimate, least, why = _METHODS[method]
    check_at_least(num_matvecs, least, "num_matvecs", why)
    check_generator(generator, A)
    check_finite(A)
    closed_form = exact_trace(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    total = min(n, num_matvecs)
    with Products(A, progress=progress, total=total, label="trace") as products:
        if total == n:
            parts = [columns[places].trace() for places, columns in products.columns()]
            return Estimate.exact(torch.stack(parts).sum(), products.count)
        mean, standard_error, degrees = estimate(products, total, generator)
        return Estimate(mean, standard_error, products.count, degrees_of_freedom=degrees)


Parts = tuple[Tensor, Tensor, Tensor]
"""A value, its standard error, and the degrees of freedom of that."""


def _hutchinson(products: Products, total: int, generator: torch.Generator | None) -> Parts:
    forms = QuadraticForms(products.operator.is_symmetric)
    for size in products.chunks(total):
        probes = draw(products.operator, size, "rademacher", generator)
        forms.add(probes, products(probes))
    return forms.mean()


def _hutch_plus_plus(products: Products, total: int, generator: torch.Generator | None) -> Parts:
    A = products.operator
    probes = draw(A, total // 3, "rademacher", generator)
    Q = RangeSketch(probes, products(probes)).Q
    inside = (Q * products(Q)).sum()
    probes = draw(A, total - products.count, "rademacher", generator)
    rest = products(probes - Q @ (Q.T @ probes))
    forms = QuadraticForms(A.is_symmetric)
    forms.add(probes, rest - Q @ (Q.T @ rest))
    mean, standard_error, degrees = forms.mean()
    return inside + mean, standard_error, degrees


def _xtrace(products: Products, total: int, generator: torch.Generator | None) -> Parts:
    probes = draw(products.operator, total // 2, "spherical", generator)
    sketch = RangeSketch(probes, products(probes))
    return _leave_one_out_traces(sketch, products(sketch.Q))


Method = Callable[[Products, int, torch.Generator | None], Parts]
_METHODS: dict[str, tuple[Method, int, str]] = {
    "hutchinson": (_hutchinson, 1, "one for a probe"),
    "hutch++": (_hutch_plus_plus, 3, "for the sketch, its basis and a probe"),
    "xtrace": (_xtrace, 4, "two for each of two probes"),
}


def _leave_one_out_traces(sketch: RangeSketch, images: Tensor) -> Parts:
    r"""The mean of one estimate a probe, its error and degrees of freedom, in $O(l^2 n)$.

    $t_i = \mathrm{tr}\, Q_{(i)}^\top A Q_{(i)} + \nu_i^\top A \nu_i$ with $\nu_i = (I -
    Q_{(i)}Q_{(i)}^\top)\,\omega_i = \omega_i - Q x_i$, scaled to the length expected of it, where
    $x_i = (I - s_i s_i^\top) Q^\top \omega_i$ and $A\omega_i = Q r_i$. Leaving out probe j too
    takes a unit vector $u_{ij}$ from the basis and adds $Q u_{ij} u_{ij}^\top Q^\top \omega_i$ to
    $\nu_i$.
    """
    (n, count), R, S = sketch.Q.shape, sketch.R, sketch.left_out()
    H = sketch.Q.T @ images
    W = sketch.Q.T @ sketch.probes
    T = images.T @ sketch.probes
    X = W - S * (S * W).sum(dim=0)
    outside = ((W - X) * R).sum(dim=0) - (T * X).sum(dim=0) + (X * (H @ X)).sum(dim=0)
    squared_length = (sketch.probes**2).sum(dim=0) - (X**2).sum(dim=0)
    scale = (n - count + 1) / squared_length
    samples = H.trace() - (S * (H @ S)).sum(dim=0) + scale * outside
    pairs = LeftOutPairs(S)
    on_probe = pairs.project(W)
    on_basis = pairs.quadratic(H)
    outside_too = outside[:, None] + on_probe**2 * on_basis
    outside_too = outside_too + on_probe * pairs.project(R - H @ X + T - H.T @ X)
    scale_too = (n - count + 2) / (squared_length[:, None] + on_probe**2)
    changes = on_basis + scale[:, None] * outside[:, None] - scale_too * outside_too
    changes = torch.where(pairs.known, changes, 0)
    return pairs.mean_of(samples, (changes * changes.T).sum(dim=1))
