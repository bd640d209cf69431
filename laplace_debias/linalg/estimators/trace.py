"""The trace of an operator: Hutchinson, Hutch++ and XTrace."""

from collections.abc import Callable

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_choice, check_finite, check_generator, check_square
from laplace_debias.linalg.estimators.moments import mean_of
from laplace_debias.linalg.estimators.quadratic_forms import QuadraticForms
from laplace_debias.linalg.estimators.refinement import check_budget, refine
from laplace_debias.linalg.estimators.sketch import LeftOutPairs, RangeSketch
from laplace_debias.linalg.probes import DISTRIBUTIONS, draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_trace

Draw = Callable[[int], Tensor]

_LEAST = {
    "hutchinson": (1, "one for a probe"),
    "hutch++": (3, "for the sketch, its basis and a probe"),
    "xtrace": (4, "two for each of two probes"),
}


def trace(
    A: LinearOperator,
    method: str = "hutchinson",
    num_matvecs: int = 100,
    *,
    tol: float | None = None,
    max_matvecs: int | None = None,
    distribution: str | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    chunk: int | None = None,
) -> Estimate:
    r"""The trace of a square operator, from products alone.

    All three methods are unbiased, for operators that are not symmetric too.

    - `"hutchinson"`: the mean of $\omega^\top A \omega$ over probes. Its error falls as
      $\|A\|_F / \sqrt m$ whatever the spectrum.
    - `"hutch++"`: exact on the range of a sketch $A\Omega = QR$, Hutchinson on the rest. A third of
      the products makes the sketch, a third $AQ$, the rest are probes, whose standard error is
      that of the estimate.
    - `"xtrace"`: every probe in turn is left out of the sketch and used on what the others miss;
      the mean over all of them. Best on decaying spectra. Its standard error
      allows for the estimates' dependence, which the paper's leaves out; on nearly constant spectra
      it is too large.

    Intervals of 95 % (`Estimate.interval`) cover the trace in 93 to 97 % of runs from 12 products
    on, in simulations of flat, decaying, indefinite spectra and low ranks with noise. XTrace's
    cover in 99 % where few outliers stand over a nearly constant rest, in 90 % where a single one
    stands a thousand times over it. For operators that claim to be symmetric the vectors $A\omega$
    tell the spread; for others the samples do, and where few eigenvalues are nearly all of the
    trace, intervals after 12 products cover in 88 to 93 %.

    A structured operator's trace is exact (no products), and so is that of one of at most
    `num_matvecs` columns (as many products as columns).

    Args:
        A: Operator of shape `[n, n]`.
        method: `"hutchinson"`, `"hutch++"` or `"xtrace"`.
        num_matvecs: Products to use; Hutch++ needs 3, XTrace 4 and uses an even number.
        tol: If given, products are added until the standard error is at most `tol` times the
            estimate. Start with some sixty (`num_matvecs`): standard errors of fewer are
            too rough to stop by.
        max_matvecs: With `tol`, the greatest number of products; default `10 * num_matvecs`.
        distribution: Of the probes: `"rademacher"` (default for Hutchinson and Hutch++),
            `"gaussian"` or `"spherical"` (default for XTrace, which then scales the part of each
            probe outside the sketch to its expected length).
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.
        chunk: Columns multiplied at once; does not change the result.

    Returns:
        The trace, a scalar tensor, with its standard error.

    Raises:
        ValueError: The operator is not square or a product not finite, a name is unknown, a number
            too small, or the generator on another device.

    Warns:
        RuntimeWarning: `tol` was missed; the result's `converged` is then false.

    Reference:
        Hutchinson. A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines. 1989. Meyer, Musco, Musco, Woodruff. Hutch++: optimal stochastic trace
        estimation. SOSA, 2021. Epperly, Tropp, Webber. XTrace. SIMAX, 2024.
    """
    n = check_square(A, "trace")
    check_choice(method, _LEAST, "method")
    distribution = distribution or ("spherical" if method == "xtrace" else "rademacher")
    check_choice(distribution, DISTRIBUTIONS, "distribution")
    greatest = check_budget(num_matvecs, *_LEAST[method], tol, max_matvecs)
    check_generator(generator, A)
    check_finite(A)
    closed_form = exact_trace(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)
    with Products(A, chunk=chunk, progress=progress, total=min(n, num_matvecs), label="trace") as P:

        def draw_probes(count: int) -> Tensor:
            return draw(A, count, distribution, generator)

        advance: Callable[[int], Estimate]
        if method == "hutchinson":
            advance = _Hutchinson(P, draw_probes, distribution).advance
        elif method == "hutch++":
            advance = _HutchPlusPlus(P, draw_probes, distribution).advance
        else:
            advance = _XTrace(P, draw_probes, rescale=distribution == "spherical").advance
        return refine(
            advance,
            lambda: _by_columns(P),
            size=n,
            num_matvecs=num_matvecs,
            tol=tol,
            max_matvecs=greatest,
        )


def _by_columns(products: Products) -> Estimate:
    parts = [columns[places].trace() for places, columns in products.columns()]
    return Estimate.exact(torch.stack(parts).sum(), products.count)


class _Hutchinson:
    def __init__(self, products: Products, draw_probes: Draw, distribution: str) -> None:
        self._products, self._draw = products, draw_probes
        self._forms = QuadraticForms(distribution, products.operator.is_symmetric)

    def advance(self, total: int) -> Estimate:
        for size in self._products.chunks(total - self._products.count):
            probes = self._draw(size)
            self._forms.add(probes, self._products(probes))
        mean, standard_error, degrees = self._forms.mean()
        count = self._products.count
        return Estimate(mean, standard_error, count, degrees_of_freedom=degrees)


class _HutchPlusPlus:
    def __init__(self, products: Products, draw_probes: Draw, distribution: str) -> None:
        self._products, self._draw, self._distribution = products, draw_probes, distribution
        empty = draw_probes(0)
        self._sketch = RangeSketch(empty)
        self._images = self._probes = self._rest_images = empty

    def advance(self, total: int) -> Estimate:
        multiply, sketch = self._products, self._sketch
        more = total // 3 - sketch.Q.shape[1]
        if more > 0:
            probes = self._draw(more)
            new = sketch.extend(probes, multiply(probes))
            images = multiply(new)
            self._images = torch.cat([self._images, images], dim=1)
            # Old probes are still independent of the sketch: project them on the smaller rest.
            self._rest_images = self._rest_images - images @ (new.T @ self._probes)
        probes = self._draw(total - multiply.count)
        self._probes = torch.cat([self._probes, probes], dim=1)
        rest = multiply(probes - sketch.Q @ (sketch.Q.T @ probes))
        self._rest_images = torch.cat([self._rest_images, rest], dim=1)
        forms = QuadraticForms(self._distribution, multiply.operator.is_symmetric)
        inside = sketch.Q.T @ self._rest_images
        forms.add(self._probes, self._rest_images - sketch.Q @ inside)
        mean, standard_error, degrees = forms.mean()
        value = (sketch.Q * self._images).sum() + mean
        return Estimate(value, standard_error, multiply.count, degrees_of_freedom=degrees)


class _XTrace:
    def __init__(self, products: Products, draw_probes: Draw, rescale: bool) -> None:
        self._products, self._draw, self._rescale = products, draw_probes, rescale
        self._images = draw_probes(0)
        self._sketch = RangeSketch(self._images)

    def advance(self, total: int) -> Estimate:
        multiply, sketch = self._products, self._sketch
        probes = self._draw(total // 2 - sketch.Q.shape[1])
        new = sketch.extend(probes, multiply(probes))
        self._images = torch.cat([self._images, multiply(new)], dim=1)
        mean, standard_error, degrees = _leave_one_out_traces(sketch, self._images, self._rescale)
        return Estimate(mean, standard_error, multiply.count, degrees_of_freedom=degrees)


def _leave_one_out_traces(
    sketch: RangeSketch, images: Tensor, rescale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The mean of one estimate a probe, its error and degrees of freedom, in $O(l^2 n)$.

    $t_i = \mathrm{tr}\, Q_{(i)}^\top A Q_{(i)} + \nu_i^\top A \nu_i$ with $\nu_i = (I -
    Q_{(i)}Q_{(i)}^\top)\,\omega_i = \omega_i - Q x_i$, where $x_i = (I - s_i s_i^\top) Q^\top
    \omega_i$ and $A\omega_i = Q r_i$. Leaving out probe j too takes a unit vector $u_{ij}$ from the
    basis and adds $Q u_{ij} u_{ij}^\top Q^\top \omega_i$ to $\nu_i$.
    """
    (n, count), R, S = sketch.Q.shape, sketch.R, sketch.left_out()
    H = sketch.Q.T @ images
    W = sketch.Q.T @ sketch.probes
    T = images.T @ sketch.probes
    X = W - S * (S * W).sum(dim=0)
    outside = ((W - X) * R).sum(dim=0) - (T * X).sum(dim=0) + (X * (H @ X)).sum(dim=0)
    squared_length = (sketch.probes**2).sum(dim=0) - (X**2).sum(dim=0)
    scale = (n - count + 1) / squared_length if rescale else torch.ones_like(outside)
    samples = H.trace() - (S * (H @ S)).sum(dim=0) + scale * outside
    if count == 1:
        return mean_of(samples)

    pairs = LeftOutPairs(S)
    on_probe = pairs.project(W)
    on_basis = pairs.quadratic(H)
    outside_too = outside[:, None] + on_probe**2 * on_basis
    outside_too = outside_too + on_probe * pairs.project(R - H @ X + T - H.T @ X)
    scale_too = torch.ones_like(outside_too)
    if rescale:
        scale_too = (n - count + 2) / (squared_length[:, None] + on_probe**2)
    changes = on_basis + scale[:, None] * outside[:, None] - scale_too * outside_too
    return pairs.mean_of(samples, (changes * changes.T).sum(dim=1))
